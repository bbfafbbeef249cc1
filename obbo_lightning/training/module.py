"""The LightningModule: one training step is one round."""

from typing import Any

import lightning as L
import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from obbo_lightning.core.algorithm import Algorithm
from obbo_lightning.core.memory import Warm
from obbo_lightning.core.oracle import Oracle
from obbo_lightning.core.problem import Problem, Task
from obbo_lightning.core.randomness import Key
from obbo_lightning.core.rounds import Round, play, require_fit
from obbo_lightning.core.validation import at_least, one_of
from obbo_lightning.problems.few_shot import CNN4, FewShot
from obbo_lightning.training.outer_step import BregmanOuterStep


class OnlineBilevelModule(L.LightningModule):
    """Plays round t on batch t with manual optimization; its one parameter is λ ``[lanes, d]``.

    Args:
        problem: what f_t and g_t are; a `FewShot` problem brings the CNN as a template.
        algorithm: what to do in a round.
        outer: λ_1.
        seed: of all randomness within rounds.
        regret_window: w_R of the reported regrets.
        on_nonfinite: ``raise`` or ``skip``.
    """

    def __init__(
        self,
        problem: Problem,
        algorithm: Algorithm,
        outer: Tensor,
        seed: int = 0,
        regret_window: int = 10,
        on_nonfinite: str = "raise",
    ) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.problem = problem
        self.algorithm = algorithm
        self.seed = seed
        self.outer = Parameter(outer.detach().clone())
        self.warm = Warm()
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

    def training_step(self, task: Task, batch_idx: int) -> None:
        """Round t: λ_t meets the task, is judged on it, learns from it."""
        step = self.outer_step.step
        if step is None:
            raise RuntimeError("training_step needs the BregmanOuterStep callback: run it through a Trainer")
        played = play(self.problem, self.algorithm, step, task, self.warm, Key(self.seed, self.trainer.global_step))
        self.warm = played.estimate.warm
        self.played = played

    def evaluate(self, task: Task) -> dict[str, Tensor]:
        """Loss and scores of a task that nothing is learned from, per lane; state is not touched.

        It is λ that is judged: where the problem knows β̂(λ), that is used and not what an inner solver makes of it.
        """
        outer = self.outer.detach()
        oracle = Oracle(self.problem, outer, task, Key(self.seed, -1))
        inner = self.problem.solution(outer, task)
        if inner is None:
            first = self.warm.inner
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
        """β_t and the last linear solution go with the checkpoint."""
        checkpoint["warm"] = self.warm.state_dict()

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Continue from where the checkpoint's round ended."""
        self.warm.load_state_dict(checkpoint["warm"])

    def on_train_start(self) -> None:
        """A checkpoint's warm start is read on the CPU."""
        state = self.warm.state_dict()
        self.warm = Warm(**{name: None if v is None else v.to(self.device) for name, v in state.items()})
