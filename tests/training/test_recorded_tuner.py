"""Values that `OnlineTuner` learns equal the recorded ones, step by step."""

import lightning as L
import pytest
import torch
from recorded import require_recorded
from small_runs import QUIET
from torch.utils.data import DataLoader, TensorDataset

from obbo_lightning import OBBO, Hyperparameters, Interval, OnlineTuner, OnSimplex, Positive
from obbo_lightning.hypergradients import FixedPoint

OPTIMIZERS = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9),
    "adam": lambda parameters: torch.optim.Adam(parameters, lr=1e-2),
}
SMALL_SCALE = OBBO(lr="auto", window=1, scale=0.02, hypergradient=FixedPoint(steps=2, while_contracting=True))
TUNERS = {"usual": {}, "window": {"algorithm": OBBO(lr="auto", window=5)}, "small scale": {"algorithm": SMALL_SCALE}}


class Sources(L.LightningModule):
    """Two layers on labels of four sources, one of them wrong; decay, smoothing and source weights are learned."""

    def __init__(self, optimizer):
        super().__init__()
        self.optimizer = optimizer
        self.net = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Linear(8, 3))
        self.hyper = Hyperparameters(
            sources=OnSimplex(4), decay=Positive(1e-3), smoothing=Interval(0.0, 0.3, start=0.1)
        )

    def training_loss(self, batch, hyper):
        x, y, source = batch
        each = torch.nn.functional.cross_entropy(self.net(x), y, reduction="none")
        log = self.net(x).log_softmax(-1).mean()
        fit = (4 * hyper["sources"][source] * each).mean() - hyper["smoothing"] * log
        return fit + hyper["decay"] * sum(p.square().sum() for p in self.net.parameters())

    def validation_loss(self, batch, hyper):
        x, y, _ = batch
        return torch.nn.functional.cross_entropy(self.net(x), y)

    def training_step(self, batch, batch_idx):
        return self.training_loss(batch, self.hyper)

    def configure_optimizers(self):
        return OPTIMIZERS[self.optimizer](self.net.parameters())


def examples(count, seed, wrong):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(count, 6, generator=g, dtype=torch.float64)
    y, source = x[:, :3].argmax(-1), torch.randint(4, (count,), generator=g)
    return TensorDataset(x, torch.where((source == 2) & wrong, (y + 1) % 3, y), source)


class Values(L.Callback):
    """Every value after every batch."""

    def __init__(self, tuner):
        self.tuner, self.seen = tuner, []

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.seen.append(list(self.tuner.values().values()))


def values_of(optimizer, tuner):
    torch.manual_seed(0)
    module = Sources(optimizer).double()
    checked = DataLoader(examples(40, 1, torch.tensor(False)), batch_size=20, shuffle=True)
    tuner = OnlineTuner(checked, every=2, **TUNERS[tuner])
    values = Values(tuner)
    trainer = L.Trainer(**{**QUIET, "max_epochs": 2}, callbacks=[tuner, values])
    trainer.fit(module, DataLoader(examples(200, 2, torch.tensor(True)), batch_size=20))
    return {"names": list(tuner.values()), "values": values.seen}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("tuner", TUNERS)
def test_values_are_those_that_were_recorded(optimizer, tuner):
    require_recorded("tuner", f"{optimizer}, {tuner}", values_of(optimizer, tuner))
