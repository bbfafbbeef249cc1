"""The fixed tasks that a run is judged on while it is played."""

import statistics
from collections.abc import Sequence

from torch import Tensor

from obbo_lightning.core.problem import Task
from obbo_lightning.core.statistics import mean_and_error
from obbo_lightning.settings.files import Settings
from obbo_lightning.streams.stream import Stream
from obbo_lightning.training.evaluation import Scores, evaluate_all
from obbo_lightning.training.module import OnlineBilevelModule
from obbo_lightning.training.ranks import Ranks


def judged_splits(settings: Settings, stream: Stream) -> tuple[Sequence[Task], Sequence[Task]]:
    """The test and the validation tasks of a run; a split that it is not judged on is not so much as looked at."""
    split = settings["evaluation"]["split"]
    test = stream.test if split in ("test", "both") else ()
    validation = stream.validation if split in ("validation", "both") else ()
    if split in ("validation", "both") and not len(validation):
        raise ValueError(
            f"evaluation.split must be test or none for {type(stream).__name__}, which has no validation tasks, "
            f"got {split!r}"
        )
    return test, validation


def scores_of(module: OnlineBilevelModule, tasks: Sequence[Task], metric: str, ranks: Ranks) -> Scores:
    """Of every task and lane, the metric and what else the problem reports of it."""

    def judge(task: Task) -> dict[str, Tensor]:
        there = module.transfer_batch_to_device(task, module.device, 0)
        return module.evaluate(module.trainer.precision_plugin.convert_input(there))

    return evaluate_all(judge, tasks, [metric, *module.problem.further], module.outer.detach(), ranks)


def centre_and_error(values: Sequence[float], tasks: int) -> tuple[float, float | None]:
    """What stands for an evaluation: like all of a row the median over lanes; tasks of one lane have a mean.

    >>> centre_and_error([1.0, 2.0, 6.0], tasks=3), centre_and_error([1.0, 2.0, 6.0, 1.0, 9.0, 3.0], tasks=3)
    ((3.0, 1.5275252316519468), (2.5, None))
    """
    several_lanes = len(values) > tasks
    return (statistics.median(values), None) if several_lanes else mean_and_error(values)
