"""Few-shot adaptation of a network, with a proximal term that keeps it near its initialisation."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional

from obbo_lightning.core.problem import Problem, Task
from obbo_lightning.core.randomness import Sample, derive_seed
from obbo_lightning.core.validation import nonnegative
from obbo_lightning.networks.cnn4 import CNN4
from obbo_lightning.networks.flat import Factory, FlatNetwork, without_noise, without_running_statistics
from obbo_lightning.networks.norms import frozen_batch_norm


class FewShot(Problem):
    """g_t(λ, β) = L(β; support) + γ/2 ‖λ − β‖², f_t(λ, β) = L(β; query), L the mean cross-entropy of a network.

    One lane: λ and β are all trainable parameters of the network, flat ``[1, d]``. A task holds ``support`` and
    ``query`` examples ``[n, …]`` (images, sequences, vectors) and their labels ``[n]``. Several stacked tasks are as
    many lanes: ``[lanes, n, …]``.

    Dropout draws from the sample that a loss is given, and is left out where there is none.

    Args:
        network: a class or function without arguments that makes a network, such as ``partial(CNN4, filters=16)``:
            λ_1 is then made from the run's seed. Or a network: λ_1 is then its weights, for every seed.
        proximity: γ, strength of the proximal term that keeps adapted weights near λ.
        learn_proximity: append log γ to λ as its last coordinate, starting at ``proximity``.

    >>> from functools import partial
    >>> from obbo_lightning.networks import MLP
    >>> problem = FewShot(partial(MLP, ways=2, shape=[4], widths=[8]))
    >>> problem.initial_outer(seed=0).shape, problem.notes()["parameters"]
    (torch.Size([1, 58]), 58)
    """

    def __init__(
        self, network: Factory | nn.Module = CNN4, proximity: float = 0.5, learn_proximity: bool = False
    ) -> None:
        self.network = FlatNetwork(network)
        self.is_stochastic = self.network.is_stochastic
        self.evaluation_score_names = ("inductive_accuracy",) if self.network.transductive else ()
        self.proximity = nonnegative("problem.proximity", proximity)
        self.learn_proximity = learn_proximity
        if learn_proximity and proximity == 0:
            raise ValueError("problem.proximity must be positive where problem.learn_proximity is true, got 0")

    def notes(self) -> dict[str, str | int]:
        predictions = "inductive: the prediction for a query depends on no other query"
        if self.network.transductive:
            predictions = "transductive: batch norm sees all queries of a task, so a prediction depends on the others"
        return {"parameters": self.network.size, "predictions": predictions}

    def initial_outer(self, seed: int) -> Tensor:
        """Return λ_1: the network's own initialisation from ``seed``, or the weights that it came with."""
        flat = self.network.initial(seed)
        if self.learn_proximity:
            flat = torch.cat([flat, flat.new_tensor([math.log(self.proximity)])])
        return flat.unsqueeze(0)

    def loaded_network(self, outer: Tensor) -> nn.Module:
        """Return the network with the parameters of λ (or of an adapted β), as an ordinary module."""
        return self.network.loaded(self._weights(outer)[0])

    def proximity_at(self, outer: Tensor) -> Tensor | float:
        """Return γ, which may be a coordinate of λ."""
        return outer[:, -1].exp() if self.learn_proximity else self.proximity

    def inner_loss(self, outer: Tensor, inner: Tensor, task: Task, sample: Sample | None = None) -> Tensor:
        # L(β; support) + γ/2 ‖λ − β‖²
        fit = self._cross_entropy(inner, task["support"], task["support_labels"], sample)
        distance = (self._weights(outer) - inner).square().sum(-1)
        return fit + 0.5 * self.proximity_at(outer) * distance

    def outer_loss(self, outer: Tensor, inner: Tensor, task: Task, sample: Sample | None = None) -> Tensor:
        return self._cross_entropy(inner, task["query"], task["query_labels"], sample)

    def stack_as_lanes(self, tasks: Sequence[Task]) -> Task | None:
        if self.is_stochastic:  # each task has its own noise
            return None
        return {name: torch.stack([task[name] for task in tasks]) for name in tasks[0]}

    def for_gradients(self, task: Task) -> Task:
        if task["support_labels"].ndim == 2:  # stacked tasks
            return task
        # Convolutions follow the layout of their images; second-derivative products are slower in channels_last.
        return {k: v.contiguous(memory_format=torch.channels_last) if v.ndim == 4 else v for k, v in task.items()}

    def inner_from_outer(self, outer: Tensor) -> Tensor:
        return self._weights(outer)

    def initial_inner(self, outer: Tensor, task: Task) -> Tensor:
        return self._weights(outer)

    def mixed_term(
        self, outer: Tensor, inner: Tensor, task: Task, vector: Tensor, sample: Sample | None = None
    ) -> Tensor:
        # ∇²_λβ g = −γ I
        if not self.learn_proximity:
            return -self.proximity * vector
        proximity = outer[:, -1:].exp()
        # ∂/∂(log γ) of ∇_β g · v = γ ⟨β − λ, v⟩
        by_log_proximity = proximity * ((inner - self._weights(outer)) * vector).sum(-1, keepdim=True)
        return torch.cat([-proximity * vector, by_log_proximity], dim=-1)

    @torch.no_grad()
    def scores(self, outer: Tensor, inner: Tensor, task: Task) -> dict[str, Tensor]:
        """Return the accuracy on the queries."""
        logits = self._logits(inner, self.for_gradients(task)["query"])
        return {"accuracy": (logits.argmax(-1) == task["query_labels"]).to(inner.dtype).mean().reshape(1)}

    @torch.no_grad()
    def evaluation_scores(self, outer: Tensor, inner: Tensor, task: Task) -> dict[str, Tensor]:
        """Return the accuracy of predictions that depend on no other query: norms use the support's statistics."""
        if not self.network.transductive:
            return {}
        network = without_noise(without_running_statistics(self.loaded_network(inner)))
        try:
            logits = frozen_batch_norm(network, task["support"])(task["query"])
        except ValueError:  # a norm that is used twice
            return {"inductive_accuracy": inner.new_full((1,), math.nan)}
        return {"inductive_accuracy": (logits.argmax(-1) == task["query_labels"]).to(inner.dtype).mean().reshape(1)}

    def _weights(self, outer: Tensor) -> Tensor:
        return outer[:, : self.network.size]  # of λ, which may end with log γ, or of β

    def _cross_entropy(self, inner: Tensor, examples: Tensor, labels: Tensor, sample: Sample | None) -> Tensor:
        if labels.ndim == 2:  # stacked tasks
            logits = torch.func.vmap(self.network)(inner, examples)
            each = functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none")
            return each.view_as(labels).mean(-1)
        if sample is not None and sample.size is not None:
            rows = sample.indices(len(labels), labels.device)
            examples, labels = examples[rows], labels[rows]
        # its own seed: dropout masks must not depend on the choice of examples
        noise = None if sample is None else derive_seed(sample.seed, "dropout")
        logits = self._logits(inner, examples, noise)
        if labels.device.type == "cpu" and int(labels.max()) >= logits.shape[1]:  # on a GPU this would synchronise
            found = f"{logits.shape[1]} outputs and the label {int(labels.max())}"
            raise ValueError(f"problem.network must have an output for each class of a task, got {found}")
        return functional.cross_entropy(logits, labels).reshape(1)

    def _logits(self, inner: Tensor, examples: Tensor, noise: int | None = None) -> Tensor:
        if inner.shape[0] != 1:
            raise ValueError(f"a few-shot problem has 1 lane, got {inner.shape[0]}")
        return self.network(inner[0], examples, noise)
