"""Labels of five annotators, two of whom guess; a plain torch loop that finds out which: python label_noise.py."""

import torch
from torch import nn
from torch.nn import functional

from obbo_lightning import Hyperparameters, OnlineTuner, OnSimplex

torch.manual_seed(0)
ANNOTATORS, CLASSES = 5, 4
centres = 2 * torch.randn(CLASSES, 8)


def draw(count):
    """Examples and their true labels."""
    labels = torch.randint(CLASSES, (count,))
    return centres[labels] + torch.randn(count, 8), labels


class Model(nn.Module):
    """An ordinary network, and how far each annotator is trusted."""

    def __init__(self):
        super().__init__()
        self.network = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, CLASSES))
        self.hyper = Hyperparameters(trust=OnSimplex(ANNOTATORS))


def training_loss(model, batch, hyper):
    """What annotators said, each with its weight."""
    x, said, annotator = batch
    losses = functional.cross_entropy(model.network(x), said, reduction="none")
    return ANNOTATORS * (hyper["trust"][annotator] * losses).mean()


def validation_loss(model, batch, hyper):
    """Labels that can be trusted."""
    return functional.cross_entropy(model.network(batch[0]), batch[1])


model = Model()
optimizer = torch.optim.SGD(model.network.parameters(), lr=0.05, momentum=0.9)
tuner = OnlineTuner(training_loss=training_loss, validation_loss=validation_loss, lr=0.05)
checked = draw(40)  # labels that can be trusted, few
for step in range(400):
    x, truth = draw(50)
    annotator = torch.arange(50) % ANNOTATORS
    guessed = torch.randint(CLASSES, (50,))
    said = torch.where(annotator < 2, guessed, truth)  # annotators 0 and 1 guess
    batch = (x, said, annotator)
    optimizer.zero_grad()
    training_loss(model, batch, model.hyper).backward()
    optimizer.step()
    if step % 5 == 4:
        tuner.step(model, batch, checked)  # one hypergradient, one step on the simplex
print("trust:", [round(value, 3) for value in model.hyper["trust"].tolist()])
assert model.hyper["trust"][:2].sum() < 0.05
