"""What two processes compute together; started by test_distributed.py with torchrun, not by pytest."""

import json
import sys
from pathlib import Path

import lightning as L
import torch
from torch import distributed, nn
from torch.utils.data import DataLoader, TensorDataset

from obbo_lightning import Hyperparameters, OnlineTuner, Positive, cli
from obbo_lightning.streams.quadratic import QuadraticStream


class NotFinite(QuadraticStream):
    """Its fourth task is NaN, which is rank 1's of the second round where there are two per round."""

    def __init__(self, seed: int = 0):
        super().__init__(seed=seed)
        task = self.train.task
        self.train.task = lambda t: {name: v * (torch.nan if t == 3 else 1) for name, v in task(t).items()}


class DecayModule(L.LightningModule):
    """Linear model with a learned decay; its weights do not change, so that the part of every rank is known."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(2, 1)
        self.hyper = Hyperparameters(decay=Positive(0.1, upper=10.0))

    def training_loss(self, batch, hyper):
        return self.validation_loss(batch, hyper) + hyper["decay"] * self.linear.weight.norm()

    def validation_loss(self, batch, hyper):
        return (self.linear(batch[0]).squeeze(-1) - batch[1]).square().mean()

    def training_step(self, batch, index):
        return 0 * self.training_loss(batch, self.hyper)

    def configure_optimizers(self):
        return torch.optim.SGD(self.linear.parameters(), lr=0.1)


def tuning_rows():
    x = torch.randn(16, 2, generator=torch.Generator().manual_seed(1))
    return x, x.sum(-1)


class RecordingTuner(OnlineTuner):
    """Remembers its hypergradients."""

    def __init__(self):
        super().__init__(lambda n: tuple(v[n : n + 4] for v in tuning_rows()), every=1, folds="new")
        self.hypergradients = []

    def step(self, *arguments, **options):
        finished = super().step(*arguments, **options)
        self.hypergradients.append(float(finished.hypergradient))
        return finished


def tune(folder):
    """Tune with batches of its own on each rank; all ranks have the same hyperparameters."""
    tuner, module, rank = RecordingTuner(), DecayModule(), distributed.get_rank()
    options = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "accelerator": "cpu"}
    options |= {"devices": 2, "strategy": "ddp", "use_distributed_sampler": False, "max_epochs": 1}
    trainer = L.Trainer(**options, callbacks=[tuner])
    trainer.fit(module, DataLoader(TensorDataset(*(v[rank::2] for v in tuning_rows())), batch_size=4))
    found = {"hypergradients": tuner.hypergradients, "decay": float(module.hyper["decay"])}
    (folder / f"tuned-{rank}.json").write_text(json.dumps(found))


def main():
    folder, jobs = Path(sys.argv[1]), json.loads(sys.argv[2])
    for arguments in jobs:
        code = cli.main(arguments)
        if code:
            raise SystemExit(code)
    tune(folder)
    distributed.barrier()
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()
