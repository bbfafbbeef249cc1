"""The LightningModule: one training step is one round."""

import os
import warnings
from typing import TYPE_CHECKING, Any

import lightning as L
import torch
from torch import Tensor, nn
from torch.nn import Parameter
from torch.optim import Optimizer

from obbo_lightning.core.algorithm import Algorithm
from obbo_lightning.core.memory import Warm
from obbo_lightning.core.problem import Problem, Task
from obbo_lightning.core.randomness import Key
from obbo_lightning.core.recipes import make_again, recipe_of
from obbo_lightning.core.rounds import Round, play
from obbo_lightning.core.statistics import mean_and_error
from obbo_lightning.core.validation import at_least, instance_of, one_of
from obbo_lightning.parts import only_installed
from obbo_lightning.runs.checkpoints import read_checkpoint
from obbo_lightning.streams.stream import Stream
from obbo_lightning.training.evaluation import evaluate, gathered
from obbo_lightning.training.outer_step import BregmanOuterStep
from obbo_lightning.training.ranks import Ranks
from obbo_lightning.training.rows import Row, more_columns, row_of

if TYPE_CHECKING:
    import polars as pl

# What Lightning warns of, and is taken care of here.
SERVED = (
    ".*no pre-optimization state was saved.*",  # a checkpoint after the step is what a resumed stream needs
    ".*your dataloader is not resumable.*",  # it goes on with the round that is next
    ".*does not have many workers.*",  # a task is made faster than a round is played
    ".*IterableDataset.*has `__len__` defined.*",  # each loader process has its own tasks
    ".*sync_dist=True.*",  # what is logged is the same on every rank
    ".*across ranks is zero.*",  # a stream need not have validation tasks
    ".*treespec, LeafSpec.*",  # between Lightning and torch
)


class OnlineBilevelModule(L.LightningModule):
    """Plays round t on batch t with manual optimization; its one parameter is λ ``[lanes, d]``.

    Every round's row (loss, scores, regrets, norms, calls) is logged, so loggers and callbacks see it by the names that
    metrics.csv has: ``loss``, ``accuracy``, ``regret/euclidean``, … A checkpoint says how problem and algorithm are
    made, so ``OnlineBilevelModule.load_from_checkpoint(path)`` needs nothing else.

    Args:
        problem: what f_t and g_t are.
        algorithm: what to do in a round.
        outer: λ_1; the problem's own where this is None.
        seed: of all randomness within rounds.
        regret_window: w_R of the reported regrets.
        on_nonfinite: ``raise`` or ``skip``.
        tasks_per_round: n; the hypergradient of a round is the mean over its tasks.
        several_tasks: how one process solves several tasks: in a ``loop``, together by ``vmap``, or ``auto``: together
            on a GPU.
    """

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
        self.warms = [Warm() for _ in range(tasks_per_round)]  # of all tasks, and in training of this rank's
        self.judged_from = Warm()
        self.outer_step = BregmanOuterStep(algorithm, regret_window, on_nonfinite, problem.blocks)
        self.played: Round | None = None
        self.row: Row = {}
        self._judged: list[dict[str, Tensor]] = []
        self._loaded_round = 0
        algorithm.require_fit(problem)
        # Refuses a start outside the domain here, not after the data were read.
        self.more_columns = more_columns(problem.blocks, self.configure_optimizers())

    def configure_callbacks(self) -> list[L.Callback]:
        """The outer step is always there."""
        for message in SERVED:
            warnings.filterwarnings("ignore", message=message)
        attached: list[L.Callback] = [] if self._trainer is None else getattr(self.trainer, "callbacks", [])
        return [] if self.outer_step in attached else [self.outer_step]

    def configure_optimizers(self) -> Optimizer:
        """The algorithm's outer rule."""
        return self.algorithm.outer_rule(self.outer, self.problem.blocks)

    def on_fit_start(self) -> None:
        """This rank's share of a round; a checkpoint's warm starts are of all ranks, and on the CPU."""
        together = self.device.type == "cuda" if self.several_tasks == "auto" else self.several_tasks == "vmap"
        ranks = Ranks(self.trainer, len(self.outer), self.tasks_per_round, together)
        self.outer_step.ranks = ranks
        self.warms = [warm.to(self.device) for warm in ranks.own(self.warms)]
        self._play_once()

    def _play_once(self) -> None:
        """A stream is one epoch, whatever the Trainer was told; says so where that was something else."""
        epochs = self.trainer.fit_loop.max_epochs
        if epochs not in (None, -1, 1, 1000):  # 1000 is what Lightning makes of no number at all
            warnings.warn(f"max_epochs is {epochs}, and a stream is played once: there is one epoch", stacklevel=2)
        self.trainer.fit_loop.max_epochs = 1
        data = getattr(self.trainer, "datamodule", None)
        served = getattr(data, "tasks_per_round", self.tasks_per_round)
        if served != self.tasks_per_round:
            raise ValueError(
                f"tasks_per_round must be the same for the module and its data, got {self.tasks_per_round} and {served}"
            )
        total = getattr(data, "rounds", None)
        if total is not None and self._loaded_round >= total:
            warnings.warn(
                f"nothing is left to play: the checkpoint is of round {self._loaded_round} of {total}", stacklevel=2
            )

    def training_step(self, tasks: list[Task], batch_idx: int) -> None:
        """Round t: λ_t meets its tasks, is judged on them, learns from them."""
        step, ranks = self.outer_step.step, self.outer_step.ranks
        if step is None or ranks is None:
            raise RuntimeError("training_step needs the BregmanOuterStep callback: run it through a Trainer")
        key = Key(self.seed, self.trainer.global_step)
        self.played = play(self.problem, self.algorithm, step, tasks, self.warms, key, ranks.share)
        self.warms = self.played.warms
        if ranks.size == 1:  # several are asked when an evaluation begins
            self.judged_from = self.warms[0]
        self.row = {"round": self.trainer.global_step, **row_of(self.played, step.memory.fill)}
        # ``step`` is the place on a logger's axis, which would begin at 0.
        self.log_numbers({**self.row, "step": self.trainer.global_step})

    def log_numbers(self, numbers: Row) -> None:
        """`log` for several numbers, with all their digits; what is None is left out."""
        known = {name: value for name, value in numbers.items() if value is not None}
        tensors = torch.tensor(list(known.values()), dtype=torch.float64)
        self.log_dict(dict(zip(known, tensors, strict=True)), batch_size=1)

    def evaluate(self, task: Task) -> dict[str, Tensor]:
        """Loss and scores of a task that nothing is learned from, per lane; state is not touched."""
        return evaluate(self.problem, self.algorithm, self.outer.detach(), task, self.judged_from, self.seed)

    def gather_start(self) -> None:
        """Where evaluations start, on every rank: the first task's inner variable, in all lanes."""
        ranks = self.outer_step.ranks
        if ranks is not None and self.algorithm.inner.carries:
            self.judged_from = ranks.gather_warms(self.warms)[0].to(self.device)

    def validation_step(self, task: Task, batch_idx: int) -> None:
        """Adapt to one validation task."""
        self._judged.append(self.evaluate(task))

    def test_step(self, task: Task, batch_idx: int) -> None:
        """Adapt to one test task."""
        self._judged.append(self.evaluate(task))

    def on_validation_epoch_start(self) -> None:
        """In the middle of a stream it is the current inner variable that solvers go on from."""
        self.gather_start()

    def on_test_epoch_start(self) -> None:
        """As in a validation."""
        self.gather_start()

    def on_validation_epoch_end(self) -> None:
        """Mean and standard error over the validation tasks."""
        self._log_judged("validation")

    def on_test_epoch_end(self) -> None:
        """Mean and standard error over the test tasks."""
        self._log_judged("test")

    def _log_judged(self, stage: str) -> None:
        scores = gathered(self._judged, self.trainer.world_size)
        for name in scores[0] if scores else ():
            mean, error = mean_and_error([one[name] for one in scores])
            self.log(f"{stage}/{name}", torch.tensor(mean, dtype=torch.float64))
            if error is not None:
                self.log(f"{stage}/{name}_se", torch.tensor(error, dtype=torch.float64))
        self._judged = []

    def network(self) -> nn.Module:
        """The network with the current λ, as an ordinary module, for problems that have one."""
        loaded = getattr(self.problem, "loaded_network", None)
        if loaded is None:
            raise ValueError(f"only a problem with a network has one to give, not {type(self.problem).__name__}")
        found: nn.Module = loaded(self.outer)
        return found

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Where every task's solver starts, and how all of this is made, go with the checkpoint."""
        ranks = self.outer_step.ranks
        warms = self.warms if ranks is None else ranks.gather_warms(self.warms)
        checkpoint["warms"] = [warm.state_dict() for warm in warms]
        checkpoint["recipe"] = self._recipe()
        data = None if self._trainer is None else getattr(self.trainer, "datamodule", None)
        stream = getattr(data, "stream", None)
        if isinstance(stream, Stream):  # what is needed to use λ when the data are gone
            checkpoint["inputs"] = stream.inputs()
            checkpoint["lanes"] = _plain(stream.lanes)

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Continue from where the checkpoint's round ended."""
        if len(checkpoint["warms"]) != self.tasks_per_round:
            raise ValueError(
                f"tasks_per_round must be {len(checkpoint['warms'])} to continue this run, got {self.tasks_per_round}"
            )
        # λ would be loaded before Lightning makes it double, and lose half of its digits.
        self.to(checkpoint["state_dict"]["outer"].dtype)
        self.warms = [Warm(**state) for state in checkpoint["warms"]]
        self.judged_from = self.warms[0]
        self._loaded_round = checkpoint["global_step"]
        _go_on_in_the_same_epoch(checkpoint["loops"]["fit_loop"])

    def _recipe(self) -> dict[str, Any]:
        recipe: dict[str, Any] = {
            "seed": self.seed,
            "regret_window": self.outer_step.regret_window,
            "on_nonfinite": self.outer_step.on_nonfinite,
            "tasks_per_round": self.tasks_per_round,
            "several_tasks": self.several_tasks,
        }
        for name in ("problem", "algorithm"):
            try:
                recipe[name] = recipe_of(getattr(self, name))
            except ValueError as reason:
                recipe[f"no_{name}"] = str(reason)
        return recipe

    @classmethod
    def load_from_checkpoint(  # type: ignore[override]
        cls, checkpoint_path: str | os.PathLike[str], map_location: Any = None, trust: bool = False, **parts: Any
    ) -> "OnlineBilevelModule":
        """The module as it was saved: λ, its problem and its algorithm.

        Args:
            checkpoint_path: a file of `ModelCheckpoint`, or of a run directory.
            map_location: where to put λ.
            trust: run the code that it names (``file.py:Class``), where that is neither installed nor loaded already.
            parts: ``problem`` or ``algorithm``, where a checkpoint cannot say how they are made (a network that was
                given as an object has weights, but no recipe).
        """
        checkpoint = read_checkpoint(checkpoint_path, map_location)
        recipe = checkpoint.get("recipe")
        if recipe is None:
            raise ValueError(f"checkpoint {checkpoint_path} is of an older version, and does not say how it is made")
        for name in ("problem", "algorithm"):
            reason = recipe.pop(f"no_{name}", None)
            if reason and name not in parts:
                raise ValueError(f"load_from_checkpoint needs {name}=…: {reason}")
        with only_installed(None if trust else "load_from_checkpoint(…, trust=True)"):
            made = {**make_again({k: v for k, v in recipe.items() if k not in parts}), **parts}
        module = cls(**made, outer=checkpoint["state_dict"]["outer"])
        module.on_load_checkpoint(checkpoint)
        return module


def _plain(lanes: "pl.DataFrame | None") -> dict[str, list[Any]] | None:
    """Columns of numbers and words: a moment is a word."""
    if lanes is None:
        return None
    return {c.name: [v if isinstance(v, (int, float, str)) else str(v) for v in c] for c in lanes}


def _go_on_in_the_same_epoch(loop: dict[str, Any]) -> None:
    """A stream that was ended before its end (max_steps, max_time) is not over: its epoch goes on where it was."""
    for scope in ("current", "total"):
        loop["epoch_progress"][scope] |= {"processed": 0, "completed": 0}
    loop["epoch_loop.batch_progress"]["is_last_batch"] = False
