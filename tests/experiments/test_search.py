"""A method's search by Optuna: what decides it, what it may cost, and what becomes of it when it is killed."""

import contextlib
import sys

import pytest
from optuna.storages.journal import JournalFileBackend

from obbo_lightning.experiments.search import Result, Search, open_journal
from obbo_lightning.experiments.tune_request import read_tune
from obbo_lightning.streams.stream import Metric

ASKED = {
    "search": {"algorithm.lr": {"low": 1e-4, "high": 1.0}, "algorithm.window": [1, 10]},
    "budget": {"rounds": 60},
    "prune": "median",
    "rungs": [4],
    "at_once": 2,
    "seed": 1,
}
UNTUNED = {"algorithm.lr": 0.1, "algorithm.window": 1}  # a good one: what comes after it may be given up


class Killed(BaseException):
    """What no code catches."""


def gives(values, rounds):
    """A made-up objective, better near 0.1 and with more rounds; large steps blow up."""
    step = values["algorithm.lr"]
    return None if step > 0.9 else abs(step - 0.1) / rounds + 0.01 * values.get("algorithm.window", 0)


def opened(path, asked=None, **changes):
    request = read_tune({**ASKED, **(asked or {}), **changes})
    return Search(open_journal(path), "obbo", request, request.search, UNTUNED, 10, Metric("loss"))


def search_all(search, calls_of_a_round=2):
    """What `tune` does, with the made-up objective."""
    while search.generation():
        for rounds in (*search.request.rungs, 10):
            for trial in [one for one in search.trials if not one.ended]:
                value = trial.results.get(rounds, gives(trial.values, rounds))
                search.report(trial, rounds, Result(value, rounds, calls_of_a_round * rounds))
    return search.trials, search.best


@pytest.mark.parametrize(("sampler", "every"), [("random", 1), ("tpe", 9)])
def test_a_search_that_is_killed_at_any_write_ends_as_if_it_had_not_been(tmp_path, monkeypatch, sampler, every):
    asked = {"at_once": 2, "sampler": sampler, "budget": {"rounds": 40}}
    undisturbed = search_all(opened(tmp_path / "whole", **asked))
    write, left = JournalFileBackend.append_logs, [0]

    def dies(self, logs):
        if left[0] == 0:
            raise Killed
        left[0] -= 1
        write(self, logs)

    writes = (tmp_path / "whole").read_bytes().count(b"\n")
    monkeypatch.setattr("os.fsync", lambda descriptor: None)
    for first in range(0, writes, every):
        path = tmp_path / f"killed_{first}"
        monkeypatch.setattr(JournalFileBackend, "append_logs", dies)
        for left[0] in (first, 3):  # twice
            with contextlib.suppress(Killed):
                search_all(opened(path, **asked))
        monkeypatch.setattr(JournalFileBackend, "append_logs", write)
        assert search_all(opened(path, **asked)) == undisturbed


def test_half_a_line_that_a_loss_of_power_left_is_forgotten(tmp_path):
    undisturbed = search_all(opened(tmp_path / "whole"))
    lines = (tmp_path / "whole").read_bytes().splitlines(keepends=True)
    (tmp_path / "cut").write_bytes(b"".join(lines[:20]) + lines[20][:10])
    assert search_all(opened(tmp_path / "cut")) == undisturbed


def test_rounds_that_pruning_saves_go_to_more_trials_within_the_budget(tmp_path):
    trials, best = search_all(opened(tmp_path / "a", budget={"rounds": 120}))
    assert 110 < sum(trial.rounds for trial in trials) <= 120  # what is left is not another trial
    assert len(trials) > 12
    given_up = [trial for trial in trials if trial.pruned and trial.results]
    assert given_up
    assert all(list(trial.results) == [4] and trial.rounds == 4 for trial in given_up)
    whole = [trial for trial in trials if not trial.pruned]
    assert best == min(whole, key=lambda trial: trial.results[10])
    assert trials[0].values == UNTUNED  # what it had before is one of those that are compared


def test_a_budget_of_calls_counts_calls(tmp_path):
    trials, _ = search_all(opened(tmp_path / "a", budget={"calls": 210}, prune="none", rungs=[]))
    assert len(trials) == 10  # 20 calls each
    dear, _ = search_all(opened(tmp_path / "b", budget={"calls": 210}, prune="none", rungs=[]), calls_of_a_round=5)
    assert len(dear) == 4  # 50 calls each


def test_a_grid_is_every_combination_once(tmp_path):
    lists = {"algorithm.lr": [0.01, 0.1, 0.95], "algorithm.window": [1, 10]}
    trials, best = search_all(opened(tmp_path / "a", search=lists, sampler="grid", prune="none", rungs=[]))
    found = [(trial.values["algorithm.lr"], trial.values["algorithm.window"]) for trial in trials]
    assert found == [(step, window) for step in lists["algorithm.lr"] for window in (1, 10)]
    assert [trial.pruned for trial in trials] == [False] * 4 + [True] * 2  # what blew up
    assert best.values == {"algorithm.lr": 0.1, "algorithm.window": 1}


def test_seeds_decide_what_is_tried_and_whole_numbers_stay_whole(tmp_path):
    changes = {"search": {**ASKED["search"], "algorithm.inner.steps": {"low": 1, "high": 20}}}
    untuned = {**UNTUNED, "algorithm.inner.steps": 5}
    tried = []
    for name, seed in (("a", 0), ("b", 0), ("c", 2)):
        request = read_tune({**ASKED, **changes, "seed": seed})
        search = Search(open_journal(tmp_path / name), "obbo", request, request.search, untuned, 10, Metric())
        tried.append([trial.values for trial in search.generation()])
    assert tried[0] == tried[1] != tried[2]
    assert all(isinstance(values["algorithm.inner.steps"], int) for values in tried[0])
    assert all(1e-4 <= values["algorithm.lr"] <= 1 for values in tried[0])


def test_without_optuna_one_line_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "optuna", None)
    with pytest.raises(ValueError, match=r"tune needs optuna.*pip install 'obbo_lightning\[tune\]'"):
        opened(tmp_path / "a")
