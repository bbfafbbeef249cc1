"""Parts of a run by themselves: which tasks are served, which checkpoint is offered, what a process says."""

from types import SimpleNamespace

import pytest
import torch
from obbo_lightning.training.judging import centre_and_error
from toy import Nonlinear, toy_point, toy_task

from obbo_lightning import ExactCheckpoints, StreamDataModule, Tasks
from obbo_lightning.hypergradients import InnerState
from obbo_lightning.runs.checkpoints import CheckpointError, newest_checkpoint, verify_checkpoint
from obbo_lightning.training import run as running, sizes
from obbo_lightning.training.datamodule import ArrivingRounds, InOrder, Rounds
from obbo_lightning.training.evaluation import evaluate
from obbo_lightning.training.signals import Stopped


def numbered(n):
    return {"n": torch.tensor([float(n)])}


def numbers(rounds):
    return [[int(task["n"]) for task in tasks] for tasks in rounds]


class Counting:
    """Tasks 0, 1, 2, …; says where it is."""

    def __init__(self):
        self.next = 0

    def __iter__(self):
        return self

    def __next__(self):
        self.next += 1
        return numbered(self.next - 1)

    def state_dict(self):
        return {"next": self.next}

    def load_state_dict(self, state):
        self.next = state["next"]


def test_rounds_have_neighbouring_tasks_and_do_not_overlap():
    rounds = Rounds(Tasks(numbered, 100), 3, range(3))
    assert numbers(rounds[t] for t in range(3)) == [[0, 1, 2], [3, 4, 5], [6, 7, 8]]
    assert numbers([Rounds(Tasks(numbered, 100), 4, range(2, 4))[5]]) == [[22, 23]]


@pytest.mark.parametrize("slots", [range(2), range(1, 2)])
def test_arriving_tasks_of_played_rounds_are_passed_over(slots):
    expected = [[tasks[slot] for slot in slots] for tasks in ([6, 7], [8, 9])]
    assert numbers(ArrivingRounds([numbered(n) for n in range(20)], 5, 2, slots, played=3)) == expected
    assert numbers(ArrivingRounds([numbered(n) for n in range(7)], None, 2, range(2))) == [[0, 1], [2, 3], [4, 5]]


def test_a_stream_says_where_it_was_after_a_round_although_loaders_are_ahead():
    arriving = ArrivingRounds(Counting(), None, 2, range(2))
    drawn = iter(arriving)
    for _ in range(4):
        next(drawn)
    assert [arriving.state_after(t) for t in (2, 3, 4)] == [{"next": 4}, {"next": 6}, {"next": 8}]
    again = iter(ArrivingRounds(Counting(), None, 2, range(2), played=3, state=arriving.state_after(3)))
    assert numbers([next(again)]) == [[6, 7]]


def test_loader_processes_take_turns(monkeypatch):
    for worker, expected in ((0, [4, 7]), (1, [5, 8]), (2, [6])):
        asked = SimpleNamespace(id=worker, num_workers=3)
        monkeypatch.setattr("obbo_lightning.training.datamodule.get_worker_info", lambda asked=asked: asked)
        assert list(InOrder(list(range(100)), range(4, 9), 9)) == expected


def test_as_many_tasks_are_judged_as_was_asked_for():
    tasks = Tasks(numbered, 9)
    for judged, count in ((4, 4), (None, 9), (20, 9)):
        data = StreamDataModule(tasks, validation=tasks, test=Tasks(lambda n: numbered(10 + n), 9), judged=judged)
        assert numbers([data.val_dataloader(), data.test_dataloader()]) == [
            list(range(count)),
            list(range(10, 10 + count)),
        ]


def test_the_newest_sound_checkpoint_is_offered_for_a_damaged_one(tmp_path):
    paths = [tmp_path / f"round-{n:08d}.ckpt" for n in (5, 10, 15, 20)]
    for n, path in enumerate(paths):
        ExactCheckpoints().save_checkpoint({"n": n}, path)
    assert newest_checkpoint(tmp_path) == paths[3]
    assert ExactCheckpoints().load_checkpoint(paths[2]) == {"n": 2}
    for path in (paths[2], paths[3]):
        whole = path.read_bytes()
        path.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))  # one bit
        with pytest.raises(CheckpointError, match="is damaged"):
            verify_checkpoint(path)
    with pytest.raises(CheckpointError, match=f"the one before it: --checkpoint {paths[1]}"):
        newest_checkpoint(tmp_path)


def test_tasks_of_one_lane_have_a_mean_with_its_error_and_lanes_a_median():
    assert centre_and_error([1.0, 2.0, 6.0], 3) == (3.0, pytest.approx((7 / 3) ** 0.5))
    assert centre_and_error([1.0, 2.0, 6.0, 1.0, 9.0, 3.0], 3) == (2.5, None)


@pytest.mark.parametrize(
    ("raised", "code", "said"),
    [
        (Stopped(15, 3), 143, "stopped by SIGTERM after round 3; go on with: python -m obbo_lightning resume here"),
        (Stopped(2, 3), 130, "stopped by SIGINT after round 3"),
        (FloatingPointError("a blow-up"), 1, "obbo: a blow-up"),
        (None, 0, ""),
    ],
)
def test_a_process_says_how_its_run_ended(raised, code, said, monkeypatch, capsys):
    def fit(*args, **settings):
        if raised:
            raise raised

    monkeypatch.setattr(running, "fit", fit)
    assert running.fit_to_exit_code({}, SimpleNamespace(path="here"), None, None) == code
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(("algorithm", "solved"), [("oagd", 8000), ("obbo", 0)])
def test_what_a_run_keeps_is_estimated_from_its_task_and_its_outer_variable(algorithm, solved, monkeypatch):
    asked = {}
    monkeypatch.setattr(sizes, "require_memory", lambda key, count, size: asked.__setitem__(key, (count, size)))
    settings = {"algorithm": {"name": algorithm, "window": 5}, "regret_window": 10, "workers": 1000}
    settings |= {"tasks_per_round": 2, "evaluation": {"tasks": 3}}
    start, task = torch.zeros(2, 100, dtype=torch.float64), {"x": torch.zeros(1000, dtype=torch.float64), "name": "x"}
    sizes.require_sizes(settings, start, task)
    assert asked == {
        "tasks_per_round": (2, 2 * 8000),
        "evaluation.tasks": (3, 3 * 8000),
        "regret_window": (10, 10 * (1600 + 100)),
        "algorithm.window": (5, 5 * (1600 + solved + 100)),  # OAGD keeps tasks, too
    }
    sizes.require_sizes(settings, None, None)  # neither is known: a little is assumed
    assert asked["tasks_per_round"] == (2, 2000)
    assert asked["regret_window"] == (10, 10 * 1100)
    with pytest.raises(ValueError, match="workers must be at most 1000, got 1001"):
        sizes.require_sizes({**settings, "workers": 1001}, start, task)


@pytest.mark.parametrize("carries", [False, True])
def test_a_solver_that_carries_nothing_is_given_no_start(carries):
    given = []
    solver = SimpleNamespace(carries=carries, whole=lambda oracle, first: given.append(first) or toy_point(1))
    evaluate(Nonlinear(), SimpleNamespace(inner=solver), toy_point(1), toy_task(lanes=1), InnerState())
    (first,) = given
    assert (first is not None) is carries
