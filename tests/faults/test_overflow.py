"""Numbers that overflow are never written as something that JSON does not have."""

import json
import math

from obbo_lightning import cli


def test_a_summary_is_json_where_numbers_are_not_finite(tmp_path, monkeypatch):
    from obbo_lightning.training import run

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(run, "summarise", with_nonfinite(run.summarise))
    monkeypatch.setattr(run, "print_summary", lambda *_: None)
    short = ["--config", "quadratic", "--rounds", "2", "--evaluation.tasks", "1"]
    assert cli.main(["fit", *short]) == 0
    (file,) = tmp_path.glob("runs/*/*/summary.json")

    def refuse(word):
        raise AssertionError(word)

    found = json.loads(file.read_text(), parse_constant=refuse)
    assert found["gain_se"] is None


def with_nonfinite(summarise):
    return lambda *given: {**summarise(*given), "gain_se": math.nan, "prequential_loss": math.inf}


def test_a_precision_that_has_no_effect_is_refused(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert cli.main(["fit", "--config", "quadratic", "--trainer.precision", "32"]) == 2
    assert "trainer.precision must be 64 for a problem that is computed in float64, got" in capsys.readouterr().err
    assert cli.main(["fit", "--config", "quadratic", "--trainer.precision", "bf16-true"]) == 2
    assert "trainer.precision must be 32 or 64, got bf16-true" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
