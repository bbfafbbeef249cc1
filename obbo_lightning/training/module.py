"""The LightningModule, whose training step is one round, and the callback that owns its outer step."""

import os
import warnings
from itertools import chain
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn
from torch.nn import Parameter
from torch.optim import Optimizer

from obbo_lightning.config.registry import untrusted_source
from obbo_lightning.config.serialization import from_config, to_config
from obbo_lightning.core.algorithm import Algorithm
from obbo_lightning.core.memory import InnerState
from obbo_lightning.core.outer_step import OuterStep
from obbo_lightning.core.parameter_groups import FEW_COORDINATES
from obbo_lightning.core.problem import Problem, Task
from obbo_lightning.core.randomness import Key
from obbo_lightning.core.round import run_round
from obbo_lightning.core.statistics import mean_and_error
from obbo_lightning.core.validation import at_least, instance_of, one_of
from obbo_lightning.runs.provenance import read_checkpoint
from obbo_lightning.training.datamodule import StreamDataModule
from obbo_lightning.training.distributed import Processes
from obbo_lightning.training.evaluation import evaluate

# Warnings of Lightning about what is taken care of here.
IGNORED_WARNINGS = (
    ".*no pre-optimization state was saved.*",  # a checkpoint after the step is what a resumed stream needs
    ".*your dataloader is not resumable.*",  # it continues with the next round
    ".*does not have many workers.*",  # making a task is faster than a round
    ".*IterableDataset.*has `__len__` defined.*",  # each loader process has its own tasks
    ".*across ranks is zero.*",  # a stream need not have validation tasks
    ".*treespec, LeafSpec.*",  # between Lightning and torch
)


class BregmanOuterStep(L.Callback):
    """Owner of one `OuterStep`: window memory, non-finite policy, clipping, optimizer step, regret.

    `OnlineBilevelModule` always adds this callback. The module's ``training_step``, not the callback, calls ``step``:
    Lightning advances ``global_step`` only for optimizer steps that are taken there.

    Attributes:
        step: built when training starts, around Lightning's optimizer.

    Args:
        regret_window: w_R.
        on_nonfinite: ``raise`` or ``skip``.
        folds: number of disjoint folds of validation examples that rounds use in turn.
    """

    def __init__(self, regret_window: int = 10, on_nonfinite: str = "raise", folds: int = 1) -> None:
        self.regret_window = at_least("regret_window", regret_window, 1)
        self.folds = at_least("folds", folds, 1)
        self.on_nonfinite = one_of("on_nonfinite", on_nonfinite, ("raise", "skip"))
        self.step: OuterStep | None = None
        self._loaded: dict[str, Any] | None = None

    def on_train_start(self, trainer: L.Trainer, pl_module: Any) -> None:
        """Build the step, and continue from a checkpoint if there was one."""
        optimizer = pl_module.optimizers()
        if isinstance(optimizer, list):
            raise TypeError(f"there is one outer variable and one optimizer, got {len(optimizer)}")
        self.step = OuterStep(
            pl_module.outer,
            pl_module.algorithm,
            self.regret_window,
            self.on_nonfinite,
            optimizer=optimizer.optimizer,
            apply=optimizer.step,
            groups=pl_module.problem.groups,
            folds=self.folds,
        )
        if self._loaded is not None:
            # Lightning has restored the optimizer itself.
            state = {**self._loaded, "optimizer": self.step.optimizer.state_dict()}
            self.step.load_state_dict(state, pl_module.processes.select_entries)
            self._loaded = None

    def on_save_checkpoint(self, trainer: L.Trainer, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        """Save memory and regret of all ranks; Lightning saves the optimizer and the outer variable."""
        if self.step is not None:
            state = self.step.state_dict(pl_module.processes.gather_entries)
            checkpoint["outer_step"] = {name: state[name] for name in ("memory", "regret", "moved")}

    def on_load_checkpoint(self, trainer: L.Trainer, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        """Remember the state until training starts: there is no optimizer yet."""
        self._loaded = checkpoint.get("outer_step")


class OnlineBilevelModule(L.LightningModule):
    """Run round t on batch t with manual optimization; the one parameter is λ ``[lanes, d]``.

    The metrics of every round (loss, scores, regrets, norms, evaluations) reach callbacks (``callback_metrics``) and
    loggers by the names of metrics.csv: ``loss``, ``accuracy``, ``regret/euclidean``, … Loggers also get the values of
    up to 100 named hyperparameters: ``hyper/decay``, ``hyper/sources[0]``, … A checkpoint holds how problem and
    algorithm are constructed, so ``OnlineBilevelModule.load_from_checkpoint(path)`` needs nothing else.

    Args:
        problem: brings f_t and g_t.
        algorithm: what to compute in a round.
        outer: λ_1; the problem's own where this is None.
        seed: of all randomness within rounds.
        regret_window: w_R of the reported regrets.
        on_nonfinite: ``raise`` or ``skip``.
        tasks_per_round: n; the hypergradient of a round is the mean over its tasks.
        several_tasks: how one process solves several tasks: in a ``loop``, together by ``vmap``, or ``auto``: together
            on a GPU.
        folds: number of disjoint folds of validation examples that rounds use in turn (`Stream.folds`); 1: new examples
            in every round.
    """

    processes: Processes
    """What this rank computes of a round; set when fitting starts."""

    def __init__(
        self,
        problem: Problem,
        algorithm: Algorithm,
        outer: Tensor | None = None,
        seed: int = 0,
        regret_window: int = 10,
        on_nonfinite: str = "raise",
        tasks_per_round: int = 1,
        several_tasks: str = "auto",
        folds: int = 1,
    ) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.problem = instance_of("problem", problem, Problem)
        self.algorithm = instance_of("algorithm", algorithm, Algorithm)
        self.seed = seed
        self.tasks_per_round = at_least("tasks_per_round", tasks_per_round, 1)
        self.several_tasks = one_of("several_tasks", several_tasks, ("auto", "loop", "vmap"))
        start = problem.initial_outer(seed) if outer is None else outer
        if start is None:
            raise ValueError(f"outer must be given for {type(problem).__name__}, which has no λ_1 of its own, got None")
        if start.ndim != 2 or not start.is_floating_point():
            raise ValueError(f"outer must be a floating-point tensor [lanes, d], got {start.dtype} {list(start.shape)}")
        self.outer = Parameter(start.detach().clone())
        self.states = [InnerState() for _ in range(tasks_per_round)]  # in training those of this rank's tasks
        self.outer_step = BregmanOuterStep(regret_window, on_nonfinite, folds)
        self._scores: list[dict[str, Tensor]] = []
        self._evaluation_start = InnerState()
        self._loaded_round = 0
        algorithm.require_compatible(problem)
        self.configure_optimizers()  # refuses a start outside the domain before any data are read

    @classmethod
    def from_data(
        cls, data: StreamDataModule, algorithm: Algorithm, seed: int = 0, **options: Any
    ) -> "OnlineBilevelModule":
        """Return a module for the problem that the data's stream poses, from the stream's λ_1.

        ``seed`` is that of λ_1 as well; ``options`` are further arguments of the constructor.
        """
        if data.stream is None:
            raise ValueError("data must serve a Stream, which knows its problem, got tasks only")
        problem = data.stream.problem()
        start = data.stream.start(problem, seed)
        settings = {"tasks_per_round": data.tasks_per_round, "folds": data.stream.folds_of(data.tasks_per_round)}
        return cls(problem, algorithm, start, seed, **settings | options)

    def configure_callbacks(self) -> list[L.Callback]:
        """Return the outer step, unless it is attached already."""
        for message in IGNORED_WARNINGS:
            warnings.filterwarnings("ignore", message=message)
        attached: list[L.Callback] = [] if self._trainer is None else getattr(self.trainer, "callbacks", [])
        return [] if self.outer_step in attached else [self.outer_step]

    def configure_optimizers(self) -> Optimizer:
        return self.algorithm.optimizer(self.outer, self.problem.groups)

    def on_fit_start(self) -> None:
        """Determine this rank's part of a round; the inner states of a checkpoint are those of all ranks."""
        vmap = self.device.type == "cuda" if self.several_tasks == "auto" else self.several_tasks == "vmap"
        self.processes = Processes(self.trainer, len(self.outer), self.tasks_per_round, vmap)
        self.states = [state.to(self.device) for state in self.processes.select(self.states)]
        epochs = self.trainer.fit_loop.max_epochs
        if epochs not in (None, -1, 1, 1000):  # 1000 is Lightning's default
            warnings.warn(f"max_epochs is {epochs}, but a stream is run once: there is one epoch", stacklevel=2)
        self.trainer.fit_loop.max_epochs = 1
        data, own, done = getattr(self.trainer, "datamodule", None), self.tasks_per_round, self._loaded_round
        served, total = getattr(data, "tasks_per_round", own), getattr(data, "rounds", None)
        if served != own:
            raise ValueError(f"tasks_per_round must be the same for the module and its data, got {own} and {served}")
        if total is not None and done >= total:
            warnings.warn(f"no rounds are left: the checkpoint is of round {done} of {total}", stacklevel=2)

    def training_step(self, tasks: list[Task], batch_idx: int) -> dict[str, Any]:
        """Run round t; returns the `Round`, its metrics, which callbacks may extend, and whether they are logged."""
        step = self.outer_step.step
        if step is None:
            raise RuntimeError("training_step needs the BregmanOuterStep callback: run it through a Trainer")
        key = Key(self.seed, self.trainer.global_step)
        finished = run_round(self.problem, self.algorithm, step, tasks, self.states, key, self.processes.shard)
        self.states = finished.states
        metrics = {"round": self.trainer.global_step, **finished.metrics()}
        known = {name: value for name, value in metrics.items() if value is not None}
        tensors = torch.tensor(list(known.values()), dtype=torch.float64).unbind()
        self.trainer.callback_metrics.update(zip(known, tensors, strict=True))
        every = getattr(self.trainer, "log_every_n_steps", 1)  # Lightning sets it, without a type
        return {"round": finished, "metrics": metrics, "log": self.trainer.global_step % max(1, every) == 0}

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Log all metrics of the round, and the values of named parameter groups, in one call per logger.

        Lightning calls this after all callbacks. `self.log` for each number would take longer than a small round.
        """
        if outputs["log"] and self.trainer.loggers:
            known = {name: value for name, value in outputs["metrics"].items() if value is not None}
            groups = self.problem.groups
            if groups is not None and len(groups.coordinates()) <= FEW_COORDINATES:
                known |= {f"hyper/{name}": value for name, value in groups.medians(outputs["round"].outer).items()}
            for logger in self.trainer.loggers:
                logger.log_metrics(known, step=self.trainer.global_step)

    def evaluation_start(self) -> InnerState:
        """Return the inner state that evaluations start from: that of the first task, in all lanes, on every rank."""
        return self._all_states()[0].to(self.device) if self.algorithm.inner.warm_starts else InnerState()

    def _all_states(self) -> list[InnerState]:
        """Return the inner states of all tasks of a round, over all ranks."""
        return self.processes.gather_states(self.states) if hasattr(self, "processes") else self.states

    def evaluate(self, task: Task, start: InnerState | None = None) -> dict[str, Tensor]:
        """Return loss and scores ``[lanes]`` of a task that λ does not learn from; no state is changed."""
        start = self.evaluation_start() if start is None else start
        return evaluate(self.problem, self.algorithm, self.outer.detach(), task, start, self.seed)

    def on_validation_epoch_start(self) -> None:
        """Let warm-started solvers continue from the current inner variable."""
        self._evaluation_start = self.evaluation_start()

    def validation_step(self, task: Task, batch_idx: int) -> None:
        self._scores.append(self.evaluate(task, self._evaluation_start))

    def on_validation_epoch_end(self) -> None:
        """Log mean and standard error over the validation or test tasks."""
        own = [{name: float(values.mean()) for name, values in one.items()} for one in self._scores]
        ranks: list[Any] = [own] * self.trainer.world_size
        if len(ranks) > 1:
            torch.distributed.all_gather_object(ranks, own)
        scores, stage = list(chain(*ranks)), "test" if self.trainer.testing else "validation"
        for name in scores[0] if scores else ():
            mean, error = mean_and_error([one[name] for one in scores])
            self.log(f"{stage}/{name}", torch.tensor(mean, dtype=torch.float64))
            if error is not None:
                self.log(f"{stage}/{name}_se", torch.tensor(error, dtype=torch.float64))
        self._scores = []

    on_test_epoch_start = on_validation_epoch_start
    test_step = validation_step
    on_test_epoch_end = on_validation_epoch_end

    def network(self) -> nn.Module:
        """Return the network with the current λ as an ordinary module, for problems that have one."""
        loaded = getattr(self.problem, "loaded_network", None)
        if loaded is None:
            raise ValueError(f"problem must have a network to return one, got {type(self.problem).__name__}")
        network: nn.Module = loaded(self.outer)
        return network

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Save the inner states of all tasks, how everything is constructed, and what predictions need."""
        checkpoint["inner_states"] = [state.state_dict() for state in self._all_states()]
        checkpoint["module"] = config = {
            "seed": self.seed,
            "regret_window": self.outer_step.regret_window,
            "on_nonfinite": self.outer_step.on_nonfinite,
            "tasks_per_round": self.tasks_per_round,
            "several_tasks": self.several_tasks,
            "folds": self.outer_step.folds,
        }
        for name in ("problem", "algorithm"):
            try:
                config[name] = to_config(getattr(self, name))
            except ValueError as reason:
                config[f"no_{name}"] = str(reason)
        data = None if self._trainer is None else getattr(self.trainer, "datamodule", None)
        stream = getattr(data, "stream", None)
        if stream is not None:  # needed to use λ where the data are not available
            lanes = () if stream.lanes is None else stream.lanes
            plain = {c.name: [v if isinstance(v, (int, float, str)) else str(v) for v in c] for c in lanes}
            checkpoint |= {"inputs": stream.inputs(), "lanes": plain or None}

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Continue from where the checkpoint's round ended."""
        states = checkpoint["inner_states"]
        if len(states) != self.tasks_per_round:
            raise ValueError(f"tasks_per_round must be {len(states)} to continue this run, got {self.tasks_per_round}")
        # Lightning loads λ before it makes the module double, which would lose half of its digits.
        self.to(checkpoint["state_dict"]["outer"].dtype)
        self.states = [InnerState(**state) for state in states]
        self._loaded_round = checkpoint["global_step"]
        # Continue the epoch of a stream that ended early (max_steps, max_time).
        loop = checkpoint["loops"]["fit_loop"]
        for scope in ("current", "total"):
            loop["epoch_progress"][scope] |= {"processed": 0, "completed": 0}
        loop["epoch_loop.batch_progress"]["is_last_batch"] = False

    @classmethod
    def load_from_checkpoint(  # type: ignore[override]
        cls, checkpoint_path: str | os.PathLike[str], map_location: Any = None, trust: bool = False, **components: Any
    ) -> "OnlineBilevelModule":
        """Return the module as it was saved: λ, its problem and its algorithm.

        Args:
            checkpoint_path: a file of `ModelCheckpoint`, or of a run directory.
            map_location: where to put λ.
            trust: import classes that the checkpoint names and that are neither ours nor installed.
            components: ``problem`` or ``algorithm``, where a checkpoint cannot hold how they are constructed (a network
                that was given as an object has weights, but no constructor arguments).
        """
        checkpoint = read_checkpoint(checkpoint_path, map_location)
        config = checkpoint.get("module")
        if config is None:
            raise ValueError(f"checkpoint {checkpoint_path} must be of an OnlineBilevelModule, got another one")
        for name in ("problem", "algorithm"):
            reason = config.pop(f"no_{name}", None)
            if reason and name not in components:
                raise ValueError(f"load_from_checkpoint needs {name}=…: {reason}")
        with untrusted_source(None if trust else "load_from_checkpoint(…, trust=True)"):
            made = {**from_config({k: v for k, v in config.items() if k not in components}), **components}
        module = cls(**made, outer=checkpoint["state_dict"]["outer"])
        module.on_load_checkpoint(checkpoint)
        return module
