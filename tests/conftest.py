import pytest
import torch
from hypothesis import settings

settings.register_profile("project", deadline=None, max_examples=60, derandomize=True)
settings.load_profile("project")
torch.set_num_threads(1)


@pytest.fixture
def generator():
    return torch.Generator().manual_seed(0)
