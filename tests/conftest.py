from obbo_lightning.threads import bound_spinning

bound_spinning()  # before torch is imported: two workers and what they start share the cores

from collections import Counter  # noqa: E402

import pytest  # noqa: E402
import torch  # noqa: E402
from hypothesis import settings  # noqa: E402

settings.register_profile("project", deadline=None, max_examples=60, derandomize=True)
settings.load_profile("project")
torch.set_num_threads(1)


@pytest.fixture
def generator():
    return torch.Generator().manual_seed(0)


def pytest_collection_modifyitems(items):
    """Files with slow tests come first, so that both workers end at about the same time."""
    slow = Counter(item.path for item in items if item.get_closest_marker("slow"))
    items.sort(key=lambda item: -slow[item.path])


@pytest.fixture
def no_figures(monkeypatch):
    """Draw no figures, which takes longer than a small run."""
    monkeypatch.setattr("obbo_lightning.training.run.draw_figures", lambda *arguments: [])
