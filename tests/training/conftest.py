import lightning as L
import pytest
from small_runs import QUIET

from obbo_lightning import ExactCheckpoints


@pytest.fixture
def make_trainer(tmp_path):
    """Return a function that makes a plain, quiet Trainer; options replace the usual ones."""
    usual = {**QUIET, "default_root_dir": tmp_path, "plugins": [ExactCheckpoints()]}
    usual |= {"limit_val_batches": 0, "num_sanity_val_steps": 0}
    return lambda **options: L.Trainer(**{**usual, **options})


FEW_SHOT = """
experiment: tiny
rounds: 10
on_nonfinite: raise
algorithm: {lr: 0.01, window: 3, inner: {steps: 2, lr: 0.05}, hypergradient: {steps: 2}}
data: {ways: 3, shots: 2, queries: 2, image_size: 16}
problem: {network: {filters: 3}}
evaluation: {every: 5, tasks: 2}
checkpoint: {every: 4}
trainer: {accelerator: cpu}
per_algorithm:
  sobbo:
    inner: {batch_size: 4}
    hypergradient: {name: stochastic_neumann, max_terms: 3, smoothness: 20.0, batch_size: 4}
  sobow:
    discount: 0.9
    inner: {start: previous}
    hypergradient: {name: conjugate_gradient, steps: 2, warm_start: true}
"""


@pytest.fixture
def here(tmp_path, monkeypatch):
    """Work in an empty folder, and return it."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def few_shot(here):
    """Return flags of a small few-shot run, in which the algorithms have every kind of state."""
    (here / "tiny.yaml").write_text(FEW_SHOT)
    return ["--config", "tiny.yaml"]
