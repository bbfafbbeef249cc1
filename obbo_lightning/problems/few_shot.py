"""Few-shot adaptation of a small convolutional network, with a proximal term that keeps it near its initialisation."""

import copy
import math
from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional

from obbo_lightning.core.problem import Problem, Task
from obbo_lightning.core.randomness import Sample
from obbo_lightning.core.validation import at_least, nonnegative


class CNN4(nn.Module):
    """Four blocks of 3x3 convolution, batch norm (statistics of the batch, none kept), ReLU, 2x2 max-pool; one linear.

    With 64 filters, 3x32x32 images and 5 ways it has 114,373 parameters.

    Args:
        ways: number of classes.
        filters: in each convolution.
        channels: of the images.
        image_size: side of the images, at least 16.
    """

    def __init__(self, ways: int = 5, filters: int = 64, channels: int = 3, image_size: int = 32) -> None:
        super().__init__()
        at_least("problem.ways", ways, 2)
        at_least("problem.filters", filters, 1)
        at_least("problem.channels", channels, 1)
        at_least("problem.image_size", image_size, 16)
        widths = [channels, filters, filters, filters, filters]
        self.blocks = nn.Sequential(*(self._block(a, b) for a, b in pairwise(widths)))
        self.linear = nn.Linear(filters * (image_size // 16) ** 2, ways)

    @staticmethod
    def _block(channels: int, filters: int) -> nn.Sequential:
        return nn.Sequential(
            nn.Conv2d(channels, filters, kernel_size=3, padding=1),
            nn.BatchNorm2d(filters, track_running_stats=False),
            nn.MaxPool2d(2),
            nn.ReLU(),  # commutes with the maximum, derivatives too, and has a quarter of the work behind it
        )

    def forward(self, images: Tensor) -> Tensor:
        """Logits ``[images, ways]``."""
        return self.linear(self.blocks(images).flatten(1))


class FewShot(Problem):
    """g_t(λ, β) = L(β; support) + γ/2 ‖λ − β‖², f_t(λ, β) = L(β; query), L the mean cross-entropy of a CNN4.

    One lane: λ and β are all parameters of the network, flat ``[1, d]``. A task holds ``support`` and ``query`` images
    ``[n, channels, size, size]`` and their labels. Several tasks side by side are as many lanes: ``[lanes, n, …]``.

    Args:
        ways: number of classes of a task.
        channels: of the images.
        image_size: side of the images.
        filters: in each convolution.
        proximity: γ.
        learn_proximity: make log γ one more, last coordinate of λ, starting at ``proximity``.
    """

    def __init__(
        self,
        ways: int = 5,
        channels: int = 3,
        image_size: int = 32,
        filters: int = 64,
        proximity: float = 0.5,
        learn_proximity: bool = False,
    ) -> None:
        self.network = CNN4(ways, filters, channels, image_size)  # a template: its own parameters are never used
        self.proximity = nonnegative("problem.proximity", proximity)
        self.learn_proximity = learn_proximity
        if learn_proximity and proximity == 0:
            raise ValueError("problem.proximity must be positive where problem.learn_proximity is true, got 0")
        self._shapes = {name: p.shape for name, p in self.network.named_parameters()}
        self._sizes = [shape.numel() for shape in self._shapes.values()]

    def initial_outer(self, seed: int) -> Tensor:
        """λ_1: torch's own initialisation of the network, from ``seed``."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            for module in self.network.modules():
                if isinstance(module, (nn.Conv2d, nn.BatchNorm2d, nn.Linear)):
                    module.reset_parameters()
        flat = [p.detach().flatten() for p in self.network.parameters()]
        if self.learn_proximity:
            flat.append(torch.tensor([math.log(self.proximity)]))
        return torch.cat(flat).unsqueeze(0)

    def loaded_network(self, outer: Tensor) -> CNN4:
        """The network with the parameters of λ (or of an adapted β): an ordinary module, for use elsewhere."""
        network = copy.deepcopy(self.network).to(outer.device, outer.dtype)
        network.load_state_dict(self._parameters(self._weights(outer.detach())[0]))
        return network

    def inner_loss(self, outer: Tensor, inner: Tensor, task: Task, sample: Sample | None = None) -> Tensor:
        fit = self._cross_entropy(inner, task["support"], task["support_labels"], sample)
        distance = (self._weights(outer) - inner).square().sum(-1)
        return fit + 0.5 * self._proximity(outer) * distance

    def outer_loss(self, outer: Tensor, inner: Tensor, task: Task, sample: Sample | None = None) -> Tensor:
        return self._cross_entropy(inner, task["query"], task["query_labels"], sample)

    def side_by_side(self, tasks: Sequence[Task]) -> Task:
        return {name: torch.stack([task[name] for task in tasks]) for name in tasks[0]}

    def laid_out(self, task: Task) -> Task:
        # Convolutions follow the layout of their images; products with second derivatives are slower in this one.
        return {k: v.contiguous(memory_format=torch.channels_last) if v.ndim == 4 else v for k, v in task.items()}

    def inner_from_outer(self, outer: Tensor) -> Tensor:
        return self._weights(outer)

    def initial_inner(self, outer: Tensor, task: Task) -> Tensor:
        return self._weights(outer)

    def mixed_term(
        self, outer: Tensor, inner: Tensor, task: Task, vector: Tensor, sample: Sample | None = None
    ) -> Tensor:
        if not self.learn_proximity:
            return -self.proximity * vector
        proximity = outer[:, -1:].exp()
        by_weights = -proximity * vector
        # ∂/∂(log γ) of ∇_β g · v = γ ⟨β − λ, v⟩
        by_log_proximity = proximity * ((inner - self._weights(outer)) * vector).sum(-1, keepdim=True)
        return torch.cat([by_weights, by_log_proximity], dim=-1)

    @torch.no_grad()
    def scores(self, outer: Tensor, inner: Tensor, task: Task) -> dict[str, Tensor]:
        """Accuracy on the query images."""
        hits = self._logits(inner, self.laid_out(task)["query"]).argmax(-1) == task["query_labels"]
        return {"accuracy": hits.to(inner.dtype).mean().reshape(1)}

    def _weights(self, outer: Tensor) -> Tensor:
        return outer[:, :-1] if self.learn_proximity else outer

    def _proximity(self, outer: Tensor) -> Tensor | float:
        return outer[:, -1].exp() if self.learn_proximity else self.proximity

    def _cross_entropy(self, inner: Tensor, images: Tensor, labels: Tensor, sample: Sample | None) -> Tensor:
        if sample is not None:
            rows = sample.indices(labels.shape[0], labels.device)
            images, labels = images[rows], labels[rows]
        if images.ndim == 5:  # tasks side by side, a lane each
            logits = torch.func.vmap(self._logits_of_one)(inner, images)
            return (
                functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none")
                .view_as(labels)
                .mean(-1)
            )
        return functional.cross_entropy(self._logits(inner, images), labels).reshape(1)

    def _logits(self, inner: Tensor, images: Tensor) -> Tensor:
        if inner.shape[0] != 1:
            raise ValueError(f"a few-shot problem has 1 lane, got {inner.shape[0]}")
        return self._logits_of_one(inner[0], images)

    def _logits_of_one(self, inner: Tensor, images: Tensor) -> Tensor:
        return functional_call(self.network, self._parameters(inner), (images,))

    def _parameters(self, flat: Tensor) -> dict[str, Tensor]:
        pieces = flat.split(self._sizes)
        return {name: piece.view(shape) for (name, shape), piece in zip(self._shapes.items(), pieces, strict=True)}
