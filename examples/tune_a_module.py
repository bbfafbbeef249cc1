"""Your LightningModule, whose weight decay and source weights follow the data: python tune_a_module.py."""

import lightning as L
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from obbo_lightning import Hyperparameters, OnlineTuner, OnSimplex, Positive


class Regression(L.LightningModule):
    """An ordinary module; new are the line with `Hyperparameters` and two losses that take them."""

    def __init__(self):
        super().__init__()
        self.network = nn.Sequential(nn.Linear(5, 32), nn.ReLU(), nn.Linear(32, 1))
        self.hyper = Hyperparameters(decay=Positive(1e-3, upper=1.0), sources=OnSimplex(2))

    def training_loss(self, batch, hyper):
        x, y, source = batch
        errors = (self.network(x).squeeze(-1) - y).square()
        shrink = sum(p.square().sum() for p in self.network.parameters())
        return (hyper["sources"][source] * errors).mean() + hyper["decay"] * shrink

    def validation_loss(self, batch, hyper):
        x, y = batch
        return (self.network(x).squeeze(-1) - y).square().mean()

    def training_step(self, batch, index):
        return self.training_loss(batch, self.hyper)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.02, momentum=0.9)


torch.manual_seed(0)
x, source = torch.randn(6400, 5), torch.arange(6400) % 2
wrong = torch.where(torch.arange(6400) < 3200, 0, 1)  # source 0 is wrong in the first half, source 1 in the second
y = x.sum(-1).where(source != wrong, -x.sum(-1))
x_clean = torch.randn(64, 5)  # 64 clean validation examples
clean = DataLoader(TensorDataset(x_clean, x_clean.sum(-1)), batch_size=32, shuffle=True)


class PrintHyperparameters(L.Callback):
    """Prints the hyperparameters every 50 batches."""

    def on_train_batch_end(self, trainer, module, outputs, batch, index):
        if index % 50 == 49:
            weights = ", ".join(f"{value:.2f}" for value in module.hyper["sources"].tolist())
            print(f"batch {index + 1}: sources {weights}, decay {module.hyper['decay']:.1e}")


module = Regression()
tuner = OnlineTuner(clean, every=2)
trainer = L.Trainer(max_epochs=1, callbacks=[tuner, PrintHyperparameters()], logger=False, enable_checkpointing=False)
trainer.fit(module, DataLoader(TensorDataset(x, y, source), batch_size=32))
assert module.hyper["sources"][0] > 0.7, "source 1 is wrong at the end, so source 0 must have the larger weight"
