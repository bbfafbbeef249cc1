import lightning as L
import pytest

from obbo_lightning import ExactCheckpoints


@pytest.fixture
def make_trainer(tmp_path):
    """Return a function that makes a plain, quiet Trainer; options replace the usual ones."""
    usual = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "accelerator": "cpu"}
    usual |= {"default_root_dir": tmp_path, "plugins": [ExactCheckpoints()], "enable_checkpointing": False}
    usual |= {"max_epochs": 1, "limit_val_batches": 0, "num_sanity_val_steps": 0}
    return lambda **options: L.Trainer(**{**usual, **options})
