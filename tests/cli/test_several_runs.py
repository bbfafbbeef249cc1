"""Commands on several runs and from several sides: exit codes, which run goes on, what is told apart."""

import signal

import pytest
from rich.console import Console

from obbo_lightning import cli
from obbo_lightning.cli import resume as resuming, watch
from obbo_lightning.cli.compare import _print_plan
from obbo_lightning.experiments.grid import Cell, Grid
from obbo_lightning.training import resume as training


@pytest.fixture
def asked(monkeypatch):
    """What each run was asked for; they end with the codes in ``ends``, or are refused."""

    class Asked(list):
        def __init__(self):
            self.ends = {}

        def __call__(self, directory, checkpoint=None, devices=None, rounds=None, data=None):
            self.append((str(directory), checkpoint, devices, rounds, data))
            end = self.ends.get(str(directory), 0)
            if isinstance(end, str):
                raise KeyError(end) if end == "a defect" else ValueError(end)
            return end

    found = Asked()
    monkeypatch.setattr(training, "resume", found)
    return found


@pytest.mark.parametrize(
    ("ends", "code"),
    [
        ({}, 0),
        ({"b": 1}, 1),
        ({"a": 1}, 1),
        ({"b": "is finished"}, 2),
        ({"a": 1, "b": "is finished"}, 2),
        ({"c": "is finished"}, 2),
        ({"a": "a defect"}, 2),
    ],
)
def test_of_several_runs_the_worst_code_is_returned_and_all_are_played(ends, code, asked, capsys):
    asked.ends = ends
    assert cli.main(["resume", "a", "b", "c", "--rounds", "7", "--data.path", "x", "--data.beyond=8"]) == code
    more = (None, None, 7, {"path": "x", "beyond": 8})
    assert asked == [(name, *more) for name in "abc"]
    said = capsys.readouterr()
    assert said.out == "run a\nrun b\nrun c\n"
    assert said.err.count("\n") == sum(isinstance(end, str) for end in ends.values())


def test_a_signal_ends_all_of_them(asked):
    asked.ends = {"b": 128 + signal.SIGTERM}
    with pytest.raises(SystemExit) as end:
        cli.main(["resume", "a", "b", "c"])
    assert end.value.code == 143
    assert [one[0] for one in asked] == ["a", "b"]


def test_one_run_has_its_checkpoint_and_devices_and_several_have_none(asked, capsys):
    asked.ends = {"a": 143}
    assert cli.main(["resume", "a", "--checkpoint", "c.ckpt", "--devices", "2"]) == 143
    ((_, checkpoint, devices, rounds, data),) = asked
    assert (str(checkpoint), devices, rounds, data) == ("c.ckpt", 2, None, None)
    for flags in (["--checkpoint", "c.ckpt"], ["--devices", "2"]):
        assert cli.main(["resume", "a", "b", *flags]) == 2
        assert "--checkpoint and --devices are for one RUN_DIR, got several" in capsys.readouterr().err
    assert len(asked) == 1


@pytest.mark.parametrize(
    ("words", "rest", "data"),
    [
        (["a", "--rounds", "3"], ["a", "--rounds", "3"], []),
        (["a", "--data.path", "x", "b"], ["a", "b"], ["--data.path", "x"]),
        (["--data.path=x", "a"], ["a"], ["--data.path=x"]),
        (["a", "--data", "market"], ["a"], ["--data", "market"]),
        (["a", "--data.path"], ["a"], ["--data.path"]),
        (["a.b", "--rounds=3"], ["a.b", "--rounds=3"], []),
    ],
)
def test_flags_of_the_data_are_told_from_those_of_the_command(words, rest, data):
    assert resuming._apart(words) == (rest, data)
    with pytest.raises(ValueError, match=r"got --algorithm\.lr: what else decides"):
        resuming._apart([*words[:1], "--algorithm.lr=3"])


class Watched:
    def __init__(self, name, looks):
        self.path, self.looks = name, looks

    @property
    def finished(self):
        self.looks -= 1
        return self.looks < 0


def test_runs_are_watched_until_all_are_finished(monkeypatch, capsys):
    slept = []
    monkeypatch.setattr(watch, "describe", lambda run: run.path)
    monkeypatch.setattr(watch.time, "sleep", slept.append)
    runs = [Watched("one", 0), Watched("two", 2)]
    monkeypatch.setattr(watch, "find_runs", lambda paths: runs)
    assert cli.main(["watch", "x", "--every", "2.5"]) == 0
    assert slept == [2.5, 2.5]
    assert capsys.readouterr().out.split() == ["one", "two"] * 3
    runs[:] = [Watched("one", 5)]
    assert cli.main(["watch", "x"]) == 0
    assert len(slept) == 2

    def interrupt(seconds):
        raise KeyboardInterrupt

    monkeypatch.setattr(watch.time, "sleep", interrupt)
    assert cli.main(["watch", "x", "--every", "1"]) == 130


def test_a_first_task_that_is_not_waited_for_ends_with_the_code_of_the_signal(monkeypatch):
    def interrupt(settings):
        raise KeyboardInterrupt

    monkeypatch.setattr("obbo_lightning.training.run.build", interrupt)
    assert cli.main(["fit", "--config", "quadratic"]) == 130


def test_a_plan_counts_what_is_left(tmp_path, monkeypatch, capsys):
    cells = [Cell(f"c{i}", {"rounds": rounds}) for i, rounds in enumerate((100, 2000, 30))]
    (tmp_path / "c0").mkdir()
    (tmp_path / "c0" / "summary.json").write_text("{}")
    measured = []
    monkeypatch.setattr(
        "obbo_lightning.experiments.estimate.estimate_seconds",
        lambda cells, jobs: measured.append(([cell.name for cell in cells], jobs)) or 90.0,
    )
    for request, jobs, said in (
        ({}, None, "2 of 3 cells to play, 2,030 rounds; --measure plays a round of each kind"),
        ({}, 4, "2 of 3 cells to play, 2,030 rounds, about 1.5 minutes with --jobs 4"),
        ({"partition": "p"}, None, "2 of 3 cells to play, 2,030 rounds as Slurm jobs with partition: p"),
    ):
        _print_plan(Grid("g", cells), tmp_path, request, jobs, Console(width=200))
        lines = capsys.readouterr().out.splitlines()
        assert lines[:3] == ["c0: finished", "c1: 2000 rounds", "c2: 30 rounds"]
        assert lines[3].startswith(said)
    assert measured == [(["c1", "c2"], 4)]


@pytest.mark.parametrize(("left_out", "code"), [([], 0), (["x is left out: it is damaged"], 1)])
def test_a_report_without_some_runs_has_a_code_that_says_so(left_out, code, monkeypatch, tmp_path, capsys):
    from obbo_lightning.cli import report
    from obbo_lightning.experiments.report import Report

    given = []

    def write(*arguments):
        given.append(arguments)
        return Report(tmp_path / "report.html", [tmp_path / "report.html", tmp_path / "a.csv"], [], left_out)

    monkeypatch.setattr(report, "write_report", write)
    flags = ["--title", "T", "--event", "AMD 2021-01-04", "--reference", "adam"]
    assert cli.main(["report", str(tmp_path), *flags]) == code
    assert cli.main(["report", str(tmp_path), "--output", "o"]) == code
    said = capsys.readouterr()
    assert "beside it: a.csv" in said.out
    assert [line.removeprefix("obbo: ") for line in said.err.splitlines()] == left_out * 2
    assert given[0] == ([tmp_path], tmp_path / "report", "T", ("AMD", "2021-01-04"), "adam")
    assert given[1][2:] == (tmp_path.name, None, None)
    assert str(given[1][1]) == "o"
