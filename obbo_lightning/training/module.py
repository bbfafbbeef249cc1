"""The LightningModule: one training step is one round."""

from typing import Any

import lightning as L
import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from obbo_lightning.core.algorithm import Algorithm
from obbo_lightning.core.estimates import require_fit
from obbo_lightning.core.memory import Warm
from obbo_lightning.core.oracle import Oracle
from obbo_lightning.core.problem import Problem, Task
from obbo_lightning.core.randomness import Key
from obbo_lightning.core.rounds import Round, play
from obbo_lightning.core.validation import at_least, one_of
from obbo_lightning.problems.few_shot import CNN4, FewShot
from obbo_lightning.training.outer_step import BregmanOuterStep
from obbo_lightning.training.ranks import Ranks


class OnlineBilevelModule(L.LightningModule):
    """Plays round t on batch t with manual optimization; its one parameter is λ ``[lanes, d]``.

    Args:
        problem: what f_t and g_t are; a `FewShot` problem brings the CNN as a template.
        algorithm: what to do in a round.
        outer: λ_1.
        seed: of all randomness within rounds.
        regret_window: w_R of the reported regrets.
        on_nonfinite: ``raise`` or ``skip``.
        tasks_per_round: n; the hypergradient of a round is the mean over its tasks.
        side_by_side: solve a round's tasks together (`torch.func.vmap`) or in a loop; None: together on a GPU.
    """

    def __init__(
        self,
        problem: Problem,
        algorithm: Algorithm,
        outer: Tensor,
        seed: int = 0,
        regret_window: int = 10,
        on_nonfinite: str = "raise",
        tasks_per_round: int = 1,
        side_by_side: bool | None = None,
    ) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.problem = problem
        self.algorithm = algorithm
        self.seed = seed
        self.outer = Parameter(outer.detach().clone())
        self.tasks_per_round = at_least("tasks_per_round", tasks_per_round, 1)
        self.side_by_side = side_by_side
        self.warms = [Warm() for _ in range(tasks_per_round)]  # of all tasks, and in training of this rank's
        self.judged_from = Warm()
        self.outer_step = BregmanOuterStep(algorithm, regret_window, on_nonfinite)
        self.played: Round | None = None
        self._judged: list[dict[str, Tensor]] = []
        require_fit(problem, algorithm)
        at_least("regret_window", regret_window, 1)
        one_of("on_nonfinite", on_nonfinite, ("raise", "skip"))
        algorithm.optimizer(self.outer)  # refuses a start outside the domain here, not after the data were read

    def configure_callbacks(self) -> list[L.Callback]:
        """The outer step is always there."""
        return [self.outer_step]

    def configure_optimizers(self) -> Optimizer:
        """The algorithm's outer rule."""
        return self.algorithm.optimizer(self.outer)

    def training_step(self, tasks: list[Task], batch_idx: int) -> None:
        """Round t: λ_t meets its tasks, is judged on them, learns from them."""
        step = self.outer_step.step
        if step is None:
            raise RuntimeError("training_step needs the BregmanOuterStep callback: run it through a Trainer")
        played = play(self.problem, self.algorithm, step, tasks, self.warms, Key(self.seed, self.trainer.global_step))
        self.warms = played.warms
        self.played = played

    def evaluate(self, task: Task) -> dict[str, Tensor]:
        """Loss and scores of a task that nothing is learned from, per lane; state is not touched.

        It is λ that is judged: where the problem knows β̂(λ), that is used and not what an inner solver makes of it.
        """
        outer = self.outer.detach()
        oracle = Oracle(self.problem, outer, task, Key(self.seed, -1))
        inner = self.problem.solution(outer, task)
        if inner is None:
            first = _moved(self.judged_from, outer.device).inner  # a checkpoint's is on the CPU
            if first is None and self.algorithm.inner.carries:
                first = self.problem.initial_inner(outer, task)
            inner = self.algorithm.inner(oracle, first)
        return {"loss": oracle.outer_loss(inner), **self.problem.scores(outer, inner, task)}

    def validation_step(self, task: Task, batch_idx: int) -> None:
        """Adapt to one validation task."""
        self._judged.append(self.evaluate(task))

    def test_step(self, task: Task, batch_idx: int) -> None:
        """Adapt to one test task."""
        self._judged.append(self.evaluate(task))

    def on_validation_epoch_end(self) -> None:
        """Mean and standard error over the validation tasks."""
        self._log_judged("validation")

    def on_test_epoch_end(self) -> None:
        """Mean and standard error over the test tasks."""
        self._log_judged("test")

    def _log_judged(self, stage: str) -> None:
        for name in self._judged[0] if self._judged else ():
            values = torch.stack([scores[name].mean() for scores in self._judged])
            self.log(f"{stage}/{name}", values.mean())
            if len(values) > 1:
                self.log(f"{stage}/{name}_se", values.std() / len(values) ** 0.5)
        self._judged = []

    def network(self) -> CNN4:
        """The CNN with the current λ, as an ordinary module."""
        if not isinstance(self.problem, FewShot):
            raise ValueError(f"only a FewShot problem has a network, not {type(self.problem).__name__}")
        return self.problem.loaded_network(self.outer)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Where every task's solver starts goes with the checkpoint."""
        ranks = self.outer_step.ranks
        warms = self.warms if ranks is None else ranks.gather_warms(self.warms)
        checkpoint["warms"] = [warm.state_dict() for warm in warms]

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

    def on_fit_start(self) -> None:
        """This rank's share of a round; a checkpoint's warm starts are of all ranks, and on the CPU."""
        together = self.device.type == "cuda" if self.side_by_side is None else self.side_by_side
        ranks = Ranks(self.trainer, len(self.outer), self.tasks_per_round, together)
        self.outer_step.ranks = ranks
        self.warms = [_moved(warm, self.device) for warm in ranks.own(self.warms)]

    def gather_judged_from(self) -> None:
        """Where evaluations start, on every rank: the first task's inner variable, in all lanes."""
        ranks = self.outer_step.ranks
        if ranks is not None and self.algorithm.inner.carries:
            self.judged_from = _moved(ranks.gather_warms(self.warms)[0], self.device)


def _moved(warm: Warm, device: torch.device) -> Warm:
    return Warm(*(None if v is None else v.to(device) for v in (warm.inner, warm.solve)))
