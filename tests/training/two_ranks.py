"""What two processes do together; started by test_ranks.py with torchrun, not by pytest."""

import json
import sys
from pathlib import Path

import lightning as L
import torch
from torch import distributed, nn
from torch.nn import Parameter
from torch.utils.data import DataLoader, TensorDataset

from obbo_lightning import OBBO, Hyperparameters, OnlineTuner, Positive, cli
from obbo_lightning.core.distributed import Shard
from obbo_lightning.core.inner_solvers import GradientDescent
from obbo_lightning.core.memory import InnerState
from obbo_lightning.core.outer_step import OuterStep
from obbo_lightning.core.randomness import Key
from obbo_lightning.core.round import play
from obbo_lightning.geometry import Euclidean
from obbo_lightning.streams.quadratic import QuadraticTasks


def total(values):
    summed = values.clone()
    distributed.all_reduce(summed)
    return summed


def meet_nan(folder):
    """Rank 1's task of the second round is not a number; every rank writes what it did."""
    rank = distributed.get_rank()
    stream = QuadraticTasks(rounds=8, inner_dim=4, outer_dim=2)
    algorithm = OBBO(lr=0.01, window=2, geometry=Euclidean(), inner=GradientDescent(steps=5, lr=0.5))
    step = OuterStep(Parameter(stream.initial_outer()), algorithm, on_nonfinite="skip")
    share = Shard(first=rank, tasks=2, total=total)
    warms, seen = [InnerState()], []
    for t in range(4):
        task = stream[2 * t + rank]
        if t == 1 and rank == 1:
            task = {name: values * torch.nan for name, values in task.items()}
        played = play(stream.problem, algorithm, step, [task], warms, Key(0, t), share)
        warms = played.states
        seen.append({"skipped": played.skipped.tolist(), "outer": played.outer.tolist()})
    (folder / f"nan-{rank}.json").write_text(json.dumps(seen))


class Tuned(L.LightningModule):
    """A linear model with a decay that is learned; its weights do not move, so that every rank's part is known."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(2, 1)
        self.hyper = Hyperparameters(decay=Positive(0.1, upper=10.0))

    def training_loss(self, batch, hyper):
        return (self.linear(batch[0]).squeeze(-1) - batch[1]).square().mean() + hyper[
            "decay"
        ] * self.linear.weight.norm()

    def validation_loss(self, batch, hyper):
        return (self.linear(batch[0]).squeeze(-1) - batch[1]).square().mean()

    def training_step(self, batch, index):
        return self.training_loss(batch, self.hyper)

    def configure_optimizers(self):
        return torch.optim.SGD(self.linear.parameters(), lr=1e-30)


def batches_to_tune_on():
    x = torch.randn(16, 2, generator=torch.Generator().manual_seed(1))
    return x, x.sum(-1)


class Watched(OnlineTuner):
    """Remembers its hypergradients."""

    def __init__(self):
        super().__init__(lambda n: tuple(v[n : n + 4] for v in batches_to_tune_on()), every=1, lr=0.1)
        self.seen = []

    def step(self, *arguments, **more):
        played = super().step(*arguments, **more)
        self.seen.append(float(played.hypergradient))
        return played


def tune(folder):
    """Each rank has batches of its own, and all have the same hyperparameters."""
    tuner, module = Watched(), Tuned()
    mine = [v[distributed.get_rank() :: 2] for v in batches_to_tune_on()]
    quiet = {
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
    }
    trainer = L.Trainer(
        accelerator="cpu",
        devices=2,
        strategy="ddp",
        max_epochs=1,
        callbacks=[tuner],
        use_distributed_sampler=False,
        **quiet,
    )
    trainer.fit(module, DataLoader(TensorDataset(*mine), batch_size=4))
    found = {"hypergradients": tuner.seen, "decay": float(module.hyper["decay"])}
    (folder / f"tuned-{distributed.get_rank()}.json").write_text(json.dumps(found))


def main():
    folder, jobs = Path(sys.argv[1]), json.loads(sys.argv[2])
    for arguments in jobs:
        code = cli.main(arguments)
        if code:
            raise SystemExit(code)
    meet_nan(folder)
    tune(folder)
    distributed.barrier()
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()
