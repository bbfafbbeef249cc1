"""OAGD: online alternating gradient descent."""

from dataclasses import dataclass, field

from obbo_lightning.core.algorithm import BregmanAlgorithm
from obbo_lightning.core.geometry import Euclidean, Geometry
from obbo_lightning.core.memory import Memory, TaskWindow


@dataclass(frozen=True, eq=False, kw_only=True)
class OAGD(BregmanAlgorithm):
    """The last w tasks are solved again at the current λ in every round: w times the work of a stored window.

    Reference: Tarzanagh, Nazari, Hou, Shen, Balzano, "Online Bilevel Optimization: Regret Analysis of Online
    Alternating Gradient Methods", 2024. That paper has no regularizer.

    Args:
        window: w, number of tasks that are solved in a round.

    >>> from obbo_lightning import online
    >>> from obbo_lightning.streams.quadratic import QuadraticTasks
    >>> stream = QuadraticTasks(rounds=3)
    >>> [round.evaluations["gradients"] for round in online(stream.problem, OAGD(), stream, stream.initial_outer())]
    [22, 44, 66]
    """

    geometry: Geometry | None = field(default=Euclidean(), init=False)

    fixed = ("geometry",)

    def memory(self) -> Memory:
        return TaskWindow(self.window)
