"""Learned models: the outer variable by name, and few-shot classifiers that adapt to new classes."""

import copy
import importlib.util
import inspect
from collections.abc import Hashable, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from obbo_lightning.config.registry import short_name, untrusted_source
from obbo_lightning.config.serialization import from_config
from obbo_lightning.core.inner_solvers import InnerSolver
from obbo_lightning.core.oracle import Oracle
from obbo_lightning.core.randomness import Key
from obbo_lightning.core.validation import one_of
from obbo_lightning.inference.artifact import Artifact, read_artifact, write_artifact
from obbo_lightning.inference.inputs import Inputs, inputs_from
from obbo_lightning.networks.flat import Factory, seeded, without_noise, without_running_statistics
from obbo_lightning.networks.norms import frozen_batch_norm
from obbo_lightning.problems.few_shot import FewShot

BATCH = 256  # queries per forward pass; inductive predictions do not depend on it


def load_model(path: str | Path, trust: bool = False) -> "LearnedModel":
    """Load what was learned from an export, a run directory (its newest checkpoint) or a checkpoint file.

    A few-shot run gives a `LearnedClassifier`, which adapts to new classes; every other run gives λ by name. Neither
    the training data nor Lightning are needed.

    Args:
        path: of the export, run directory or checkpoint.
        trust: import classes that it names (``file.py:Class``) although no installed package has them.
    """
    with untrusted_source(None if trust else f"load_model({str(path)!r}, trust=True)"):
        return model_from(read_artifact(Path(path)))


def model_from(artifact: Artifact) -> "LearnedModel":
    """Return the model of an artifact."""
    return LearnedClassifier(artifact) if "init_args" in artifact.metadata else LearnedModel(artifact)


def export_model(
    run: str | Path, out: str | Path, checkpoint: str | Path | None = None, file_format: str = "safetensors"
) -> "LearnedModel":
    """Write what a run has learned to a new folder, completely or not at all.

    Args:
        run: a run directory, or a checkpoint.
        out: the folder; it must not exist, or be empty.
        checkpoint: of the run; None for its newest.
        file_format: ``safetensors``, which is always written, or ``onnx`` in addition: network.onnx with the logits of
            standardised examples, any number of them, before adaptation. Norms that use the statistics of the batch
            do so in that file, too.
    """
    out = Path(out)
    onnx = one_of("--format", file_format, ("safetensors", "onnx")) == "onnx"
    for package in ("onnx", "onnxscript") if onnx else ():
        if importlib.util.find_spec(package) is None:
            raise ValueError(f"--format onnx needs {package}, which is not installed: pip install '.[onnx]'")
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ValueError(f"{out} must be a new or empty folder to export to, and is not")
    artifact = read_artifact(Path(run), None if checkpoint is None else Path(checkpoint))
    model = model_from(artifact)  # so that what could not be loaded again is refused
    network = None
    if onnx:
        if not isinstance(model, LearnedClassifier):
            raise ValueError(f"--format must be safetensors for a run without a network, got {file_format!r}")
        if model.metadata["inputs"] is None:
            raise ValueError("--format onnx needs a run whose stream describes its inputs, and this one does not")
        network = without_noise(without_running_statistics(model.network()))
    write_artifact(artifact, out, network)
    return model


class LearnedModel:
    """The learned outer variable by name.

    Attributes:
        outer: λ: one number per lane for each named coordinate, or all of it as ``outer`` ``[lanes, d]``; the
            network's state_dict for few-shot runs.
        metadata: plain values about it: round, checkpoint, version and so on, as in metadata.json of an export.
        name: of the problem, or of the network where there is one.
    """

    def __init__(self, artifact: Artifact) -> None:
        self.metadata, self.outer = artifact.metadata, artifact.tensors
        self.name = short_name(self.metadata["problem"] or "an unnamed problem")

    @property
    def title(self) -> str:
        """Name and number of rounds: ``CNN4 after 200 rounds``."""
        return f"{self.name} after {self.metadata['round']} rounds"

    def adapt(
        self, support: Any, labels: Sequence[Hashable], steps: int | None = None, lr: float | None = None
    ) -> "AdaptedClassifier":
        """Refuse; a `LearnedClassifier` can be adapted."""
        raise ValueError(f"adapt needs a model of a few-shot run, got λ of {self.name}")


class LearnedClassifier(LearnedModel):
    """A learned initialisation of a network, to be adapted to new classes.

    Attributes:
        inputs: turns images or vectors into the tensors that the network takes.
        solver: the run's inner solver.
    """

    def __init__(self, artifact: Artifact) -> None:
        super().__init__(artifact)
        self.inputs: Inputs = inputs_from(self.metadata["inputs"])
        self.solver: InnerSolver = from_config(self.metadata["inner"])
        problem = from_config({"component": self.metadata["problem"], "init_args": self.metadata["init_args"]})
        if not isinstance(problem, FewShot):
            raise ValueError(f"problem of an export with a network must be a FewShot, got {self.name!r}")
        self._problem = problem
        self._network = copy.deepcopy(problem.network.template)
        self.name = type(self._network).__name__
        try:
            self._network.load_state_dict(self.outer)
        except RuntimeError:
            raise ValueError(f"the weights do not fit the network {self.name}: its class has changed since") from None
        self._network.to(next(p.dtype for p in self.outer.values() if p.is_floating_point()))

    def network(self) -> nn.Module:
        """Return a copy of the network with λ, an ordinary module."""
        return copy.deepcopy(self._network)

    def adapt(
        self, support: Any, labels: Sequence[Hashable], steps: int | None = None, lr: float | None = None
    ) -> "AdaptedClassifier":
        """Adapt the network to a few labelled examples as the run adapts it to its test tasks: from λ, near λ.

        Any number of classes from 2 up, and any number of examples of each. Each class starts from a learned row of the
        last layer; with more classes than in training several classes start from the same row.

        Args:
            support: images (a list of PIL images; a uint8 array [n, height, width, channels] or tensor [n, channels,
                height, width] of any size; floats between 0 and 1), or vectors as in the run's data file.
            labels: class of each example, anything hashable.
            steps: K; None for the run's.
            lr: η; None for the run's.
        """
        names = labels.tolist() if hasattr(labels, "tolist") else list(labels)
        classes = list(dict.fromkeys(names))
        if len(classes) < 2:
            raise ValueError(f"labels must have 2 classes or more, got {len(classes)}")
        asked: dict[str, Any] = {k: v for k, v in (("steps", steps), ("lr", lr)) if v is not None}
        unknown = [name for name in asked if name not in inspect.signature(type(self.solver)).parameters]
        if unknown:
            raise ValueError(f"{unknown[0]} cannot be chosen for the inner solver {type(self.solver).__name__}")
        solver = type(self.solver)(**self.solver.init_args | asked).without_sampling
        examples = self.prepare(support)
        if len(examples) != len(names):
            raise ValueError(f"labels must be one for each example, got {len(names)} and {len(examples)} examples")
        network = self._network
        with torch.no_grad():
            ways = without_noise(without_running_statistics(self.network()))(examples).shape[1]
        if ways != len(classes):
            network = resize_classifier(network, self._problem.init_args.get("network"), ways, len(classes))
        problem = type(self._problem)(**self._problem.init_args | {"network": network})  # starts from λ
        task = {"support": examples, "support_labels": torch.tensor([classes.index(name) for name in names])}
        outer = problem.initial_outer(0)
        oracle = Oracle(problem, outer, task, Key(self.metadata["seed"], -1))
        inner = solver(oracle, problem.initial_inner(outer, task))
        return AdaptedClassifier(self, classes, problem.loaded_network(inner), examples)

    def prepare(self, examples: Any) -> Tensor:
        """Return images or vectors as the tensor that the network takes."""
        return self.inputs(examples).to(next(self._network.parameters()).dtype)


class AdaptedClassifier:
    """A network that was adapted to some classes.

    Attributes:
        classes: labels of the support examples, in the order of `probabilities`.
    """

    def __init__(
        self, learned: LearnedClassifier, classes: list[Hashable], network: nn.Module, support: Tensor
    ) -> None:
        self._learned, self.classes, self._support = learned, classes, support
        self._transductive = without_noise(without_running_statistics(network))

    @cached_property
    def network(self) -> nn.Module:
        """The adapted network, an ordinary module; batch norms use the statistics of the support examples."""
        return frozen_batch_norm(self._transductive, self._support)

    @torch.no_grad()
    def probabilities(self, queries: Any, transductive: bool = False) -> Tensor:
        """Return the probability of each class for each query ``[n, classes]``.

        Args:
            queries: examples as `LearnedClassifier.adapt` takes them.
            transductive: normalise all queries together, as in the run's own evaluation, so that a prediction depends
                on the other queries. Otherwise it depends on the support examples only.
        """
        examples = self._learned.prepare(queries)
        if transductive:
            return self._transductive(examples).softmax(-1)
        return torch.cat([self.network(batch) for batch in examples.split(BATCH)]).softmax(-1)

    def predict(self, queries: Any, transductive: bool = False) -> list[Hashable]:
        """Return the most probable class of each query."""
        return [self.classes[i] for i in self.probabilities(queries, transductive).argmax(-1).tolist()]


def resize_classifier(network: nn.Module, make: Factory | None, ways: int, classes: int) -> nn.Module:
    """Return the same network with ``classes`` outputs.

    Everything but the last layer stays. Tensors that have a row for each class (weight and bias of a last layer) repeat
    the learned rows: fewer classes use the first of them, more classes share them. Which row a class starts from has no
    meaning, because tasks number their classes at random; but rows must differ, because a few steps from equal rows
    separate them too slowly (docs/predicting.md has the numbers).

    ``make``, a partial of the network's class, has constructed a network for the ``ways`` classes of a training task.
    """
    if not isinstance(make, partial) or "ways" not in make.keywords:
        raise ValueError(
            f"labels must be of {ways} classes for a network whose class has no argument ways, got {classes} classes"
        )
    with seeded(0, torch.device("cpu")):
        resized = make.func(*make.args, **{**make.keywords, "ways": classes})
    learned, made = network.state_dict(), resized.state_dict()
    for name, values in learned.items():
        before, after = values.shape, made[name].shape
        if before != after:
            if before[1:] != after[1:] or len(values) != ways:
                raise ValueError(
                    f"labels must be of {ways} classes: {name} of the network is {list(before)}, and with another "
                    f"number of classes {list(after)}, which is not one row per class"
                )
            learned[name] = values[torch.arange(len(made[name])) % ways]
    resized.load_state_dict(learned)
    return resized.to(next(iter(learned.values())).dtype)
