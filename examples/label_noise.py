"""Learn the weights of five annotators, two of which guess, in a plain torch loop: python label_noise.py."""

import torch
from torch import nn
from torch.nn import functional

from obbo_lightning import Hyperparameters, OnlineTuner, OnSimplex

torch.manual_seed(0)
ANNOTATORS, CLASSES = 5, 4
centres = 2 * torch.randn(CLASSES, 8)


def generate(count):
    """Return examples and their true labels."""
    labels = torch.randint(CLASSES, (count,))
    return centres[labels] + torch.randn(count, 8), labels


class Model(nn.Module):
    """An ordinary network, and a weight for each annotator."""

    def __init__(self):
        super().__init__()
        self.network = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, CLASSES))
        self.hyper = Hyperparameters(annotators=OnSimplex(ANNOTATORS))


def training_loss(model, batch, hyper):
    """Return the loss on the annotators' labels, each with its annotator's weight."""
    x, labels, annotator = batch
    losses = functional.cross_entropy(model.network(x), labels, reduction="none")
    return ANNOTATORS * (hyper["annotators"][annotator] * losses).mean()


def validation_loss(model, batch, hyper):
    """Return the loss on clean validation examples."""
    return functional.cross_entropy(model.network(batch[0]), batch[1])


model = Model()
optimizer = torch.optim.SGD(model.network.parameters(), lr=0.05, momentum=0.9)
x, labels = generate(80)  # 80 clean validation examples in 4 disjoint folds, used in turn
clean = [(x[k::4], labels[k::4]) for k in range(4)]
tuner = OnlineTuner(training_loss=training_loss, validation_loss=validation_loss, folds=4)
for step in range(400):
    x, truth = generate(50)
    annotator = torch.arange(50) % ANNOTATORS
    guesses = torch.randint(CLASSES, (50,))
    batch = (x, torch.where(annotator < 2, guesses, truth), annotator)  # annotators 0 and 1 guess
    optimizer.zero_grad()
    training_loss(model, batch, model.hyper).backward()
    optimizer.step()
    if step % 5 == 4:
        tuner.step(model, batch, clean[tuner.steps % 4], optimizer)  # one hypergradient, one step on the simplex
print("weights:", [round(value, 3) for value in model.hyper["annotators"].tolist()])
print(*tuner.result.lines(), sep="\n")
assert model.hyper["annotators"][:2].sum() < 0.05
