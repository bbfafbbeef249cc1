"""What is served, by hand: pixels, an adaptation, confusion, norms, files of queries, forecasts in other units."""

import csv
import json
import warnings
from functools import partial
from types import SimpleNamespace

import numpy as np
import polars as pl
import pytest
import torch
from PIL import Image
from torch import nn

from obbo_lightning import MLP, OBBO, FewShot, GradientDescent, OnlineBilevelModule, cli, load
from obbo_lightning.networks.settled import settled
from obbo_lightning.runs.checkpoints import list_checkpoints
from obbo_lightning.serving import forecast_files, predictions
from obbo_lightning.serving.events import choose_events
from obbo_lightning.serving.forecast import forecast
from obbo_lightning.serving.forecast_files import draw_forecast
from obbo_lightning.serving.heads import with_classes
from obbo_lightning.serving.inputs import ExampleInputs, ImageInputs
from obbo_lightning.serving.parcel import shape_of
from obbo_lightning.serving.predictions import Predictions, predict_in_batches
from obbo_lightning.serving.sets import Examples, read_query, read_support
from obbo_lightning.streams.market_data import simulate_market
from obbo_lightning.training import run as runs

GREY = ImageInputs([1, 16, 16], [0.25], [0.5])


@pytest.fixture
def undrawn(monkeypatch):
    """Figures take longer than the runs."""
    monkeypatch.setattr(runs, "draw_figures", lambda *arguments: [])
    monkeypatch.setattr(forecast_files, "save_drawing", lambda drawing, folder: [])


def test_floats_are_rounded_to_the_nearest_byte():
    shades = np.linspace(0, 1, 256).reshape(16, 16)
    expected = (np.round(shades * 255) / 255 - 0.25) / 0.5
    assert torch.allclose(GREY([shades])[0, 0], torch.from_numpy(expected).float())
    between = (np.arange(256) + 0.7).clip(0, 255).reshape(16, 16) / 255  # a byte that is not whole
    nearest = np.minimum(np.arange(256) + 1, 255).reshape(16, 16) / 255
    assert torch.allclose(GREY([between])[0, 0], torch.from_numpy((nearest - 0.25) / 0.5).float())


def test_grey_and_colour_become_what_the_run_had():
    rng = np.random.default_rng(0)
    colour = rng.integers(0, 256, (16, 16, 3), dtype=np.uint8)
    grey = np.asarray(Image.fromarray(colour).convert("L"))
    for given in (colour, torch.from_numpy(colour).movedim(-1, 0), Image.fromarray(colour), grey, grey[:, :, None]):
        assert torch.allclose(GREY([given])[0, 0], torch.from_numpy((grey / 255 - 0.25) / 0.5).float())
    means, deviations = [0.1, 0.2, 0.3], [1.0, 0.5, 2.0]
    three = ImageInputs([3, 16, 16], means, deviations)
    for c in range(3):
        assert torch.allclose(three([grey])[0, c], torch.from_numpy((grey / 255 - means[c]) / deviations[c]).float())
        expected = (colour[:, :, c] / 255 - means[c]) / deviations[c]
        assert torch.allclose(three([colour])[0, c], torch.from_numpy(expected).float())
    wide = np.zeros((16, 40), np.uint8)
    wide[:, 12:28] = grey
    assert torch.equal(GREY([wide]), GREY([grey]))  # the square in the middle


@pytest.mark.parametrize("given", [np.full((2, 2), np.nan), np.zeros((2, 3)), np.zeros((0, 2)), np.zeros(2)])
def test_vectors_of_another_kind_are_refused(given):
    inputs = ExampleInputs([2], "label", None, [1.0, 2.0], [0.5, 4.0])
    with pytest.raises(ValueError, match=r"examples must be (finite )?numbers"):
        inputs(given)
    assert inputs([[2.0, 6.0]]).tolist() == [[2.0, 1.0]]


def checkpoint_of(folder, seed=5, batch_size=None, **options):
    """A run's checkpoint without the run: an MLP for two classes of two features."""
    inner = GradientDescent(steps=3, lr=0.2, batch_size=batch_size)
    problem = FewShot(partial(MLP, ways=2, shape=[2], widths=[4]), proximity=0.3, **options)
    module = OnlineBilevelModule(problem, OBBO(inner=inner), seed=seed)
    if options:
        module.outer.data[:, -1] = np.log(0.7)
    inputs = {"kind": "examples", "shape": [2], "label": "label", "columns": None, "mean": [0, 0], "deviation": [1, 1]}
    content = {"global_step": 7, "recipe": module._recipe(), "state_dict": {"outer": module.outer.detach()}}
    torch.save({**content, "inputs": inputs}, folder / "run.ckpt")
    return folder / "run.ckpt", module


def adapted_by_hand(module, x, y, proximity, lr=0.2, steps=3):
    network = module.network()
    first = [p.detach().clone() for p in network.parameters()]
    for _ in range(steps):
        loss = nn.functional.cross_entropy(network(x), y)
        near = sum((p - q).square().sum() for p, q in zip(network.parameters(), first, strict=True))
        gradients = torch.autograd.grad(loss + 0.5 * proximity * near, list(network.parameters()))
        with torch.no_grad():
            for p, g in zip(network.parameters(), gradients, strict=True):
                p -= lr * g
    return network


@pytest.mark.parametrize(
    ("batch_size", "options", "proximity", "asked"),
    [(None, {}, 0.3, {}), (4, {}, 0.3, {}), (None, {"learn_proximity": True}, 0.7, {"lr": 0.5, "steps": 5})],
)
def test_an_adaptation_is_the_runs_solver_on_all_examples_from_lambda(tmp_path, batch_size, options, proximity, asked):
    file, module = checkpoint_of(tmp_path, batch_size=batch_size, **options)
    x = torch.randn(6, 2, generator=torch.Generator().manual_seed(1))
    labels = ["b", "a", "b", "a", "b", "b"]
    adapted = load(file).adapt(x.numpy(), labels, **asked)
    assert adapted.classes == ["b", "a"]  # in the order in which they come
    y = torch.tensor([0, 1, 0, 1, 0, 0])
    network = adapted_by_hand(module, x, y, proximity, **asked)
    with torch.no_grad():
        expected = network(x).softmax(-1)
    assert torch.allclose(adapted.probabilities(x.numpy()), expected, atol=1e-6)
    assert adapted.predict(x.numpy()) == [["b", "a"][i] for i in expected.argmax(-1)]
    about = load(file).about
    assert (about["seed"], about["round"], about["ways"], shape_of(about)) == (5, 7, 2, [2])
    assert about["with"]["proximity"] == pytest.approx(proximity)


def test_norms_keep_mean_and_variance_of_the_support():
    torch.manual_seed(0)
    norm = nn.BatchNorm1d(3)
    nn.init.normal_(norm.weight)
    nn.init.normal_(norm.bias)
    support, query = torch.randn(5, 3), torch.randn(2, 3)
    alone = settled(nn.Sequential(norm), support)
    expected = (query - support.mean(0)) / (support.var(0, unbiased=False) + norm.eps).sqrt() * norm.weight + norm.bias
    assert torch.allclose(alone(query), expected, atol=1e-6)
    assert torch.allclose(alone(query[:1]), expected[:1], atol=1e-6)
    assert norm.training


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_other_numbers_of_classes_take_the_learned_rows_in_turn(dtype):
    make = partial(MLP, ways=3, shape=[2], widths=[4])
    network = make().to(dtype)
    learned = list(network.state_dict().values())
    for classes in (2, 3, 7):
        state = with_classes(network, make, 3, classes).state_dict()
        rows = torch.arange(classes) % 3
        for name, before, now in zip(state, learned, state.values(), strict=True):
            assert now.dtype == dtype
            assert torch.equal(now, before[rows] if len(before) == 3 else before), name


def some_predictions(labels=("a", "b", "b", "c", "a")):
    chances = torch.tensor([[0.7, 0.2, 0.1], [0.1, 0.8, 0.1], [0.6, 0.3, 0.1], [0.2, 0.5, 0.3], [0.1, 0.2, 0.7]])
    given = np.arange(10.0).reshape(5, 2)
    return Predictions(
        ["a", "b", "c"], Examples(list("12345"), given, None if labels is None else list(labels)), chances
    )


def test_the_confusion_has_actual_classes_in_rows(tmp_path, monkeypatch):
    monkeypatch.setattr(predictions, "draw_predictions", lambda found, path: path)
    found = some_predictions()
    assert found.predicted == ["a", "b", "a", "b", "c"]
    assert found.accuracy() == 0.4
    assert found.confusion() == [[1, 0, 1], [1, 1, 0], [0, 1, 0]]
    assert found.write(tmp_path / "p.csv", "row") == [tmp_path / "p.csv", tmp_path / "p.png"]
    rows = list(csv.reader((tmp_path / "p.csv").read_text().splitlines()))
    assert rows[0] == ["row", "actual", "predicted", "p(a)", "p(b)", "p(c)"]
    assert rows[3:5] == [
        ["3", "b", "a", "0.600000", "0.300000", "0.100000"],
        ["4", "c", "b", "0.200000", "0.500000", "0.300000"],
    ]
    unknown = some_predictions(None)
    assert (unknown.accuracy(), unknown.predicted) == (None, found.predicted)
    unknown.write(tmp_path / "p.csv", "file")
    assert (tmp_path / "p.csv").read_text().splitlines()[0] == "file,predicted,p(a),p(b),p(c)"


def test_the_table_of_a_prediction_is_its_confusion_or_its_counts(capsys):
    from rich.console import Console

    from obbo_lightning.cli.predict import _print

    for labels, rows in (
        (("a", "b", "b", "c", "a"), [["a", "1", "·", "1"], ["b", "1", "1", "·"], ["c", "·", "1", "·"]]),
        (None, [["a", "2"], ["b", "2"], ["c", "1"]]),
    ):
        _print(Console(width=100), some_predictions(labels), "title")
        text = capsys.readouterr().out
        cells = [[cell.strip() for cell in line.strip("│").split("│")] for line in text.splitlines() if "│" in line]
        assert cells == rows
        assert ("accuracy 0.400 on 5 queries" in text) == (labels is not None)


@pytest.mark.parametrize(("transductive", "sizes"), [(False, [256, 256, 88]), (True, [600])])
def test_queries_are_asked_in_batches_or_together(transductive, sizes):
    asked = []

    def probabilities(given, together):
        asked.append((len(given), together))
        return torch.from_numpy(given)

    queries = Examples([str(i) for i in range(600)], np.arange(600.0).reshape(600, 1), None)
    parts = list(predict_in_batches(SimpleNamespace(probabilities=probabilities), queries, transductive))
    assert asked == [(size, transductive) for size in sizes]
    assert torch.cat(parts).flatten().tolist() == list(range(600))


def write_images(root, *places):
    for i, place in enumerate(places):
        (root / place).parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(np.full((16, 16), i + 1, np.uint8)).save(root / place)
    return root


def test_support_and_queries_have_the_names_of_their_files(tmp_path):
    places = ("b/2.png", "a/x/1.PNG", ".old/0.png", "a/.hidden/3.png", "a/.4.png")
    support = read_support(write_images(tmp_path / "support", *places), GREY)
    assert support.names == ["a/x/1.PNG", "b/2.png"]
    assert support.labels == ["a", "b"]
    assert [int(image[0, 0, 0]) for image in support.given] == [2, 1]
    known = read_query(tmp_path / "support", GREY, {"a", "b", "c"})
    assert (known.names, known.labels) == (support.names, support.labels)
    assert read_query(tmp_path / "support", GREY, {"z"}).labels is None  # folders that are called like no class
    flat = read_query(write_images(tmp_path / "flat", "2.png", "1.png", ".0.png"), GREY, {"a"})
    assert (flat.names, flat.labels) == (["1.png", "2.png"], None)
    np.savez(tmp_path / "q.npz", examples=np.ones((3, 2)), labels=np.array([7, 8, 7]))
    vectors = ExampleInputs([2], "label", None, [0, 0], [1, 1])
    found = read_query(tmp_path / "q.npz", vectors, {"7", "8"})
    assert (found.names, found.labels) == (["1", "2", "3"], ["7", "8", "7"])
    with pytest.raises(ValueError, match=r"must have examples of the support's classes 7, 9, got '8'"):
        read_query(tmp_path / "q.npz", vectors, {"7", "9"})
    np.savez(tmp_path / "q.npz", examples=np.ones((3, 4)))
    with pytest.raises(ValueError, match=r"must hold examples of shape \[2\], got \[4\]"):
        read_query(tmp_path / "q.npz", vectors, {"7"})


def test_an_export_is_of_the_checkpoint_that_is_asked_for_and_others_may_read_it(tmp_path, undrawn, capsys):
    flags = ["--config", "quadratic", "--rounds", "4", "--checkpoint.every", "2", "--evaluation.tasks", "2"]
    assert cli.main(["fit", *flags, "--trainer.accelerator", "cpu", "--output", str(tmp_path / "runs")]) == 0
    (run,) = (tmp_path / "runs").glob("*/*")
    old, new = list_checkpoints(run / "checkpoints")
    capsys.readouterr()
    for out, more, file, rounds in (("old", ["--checkpoint", str(old)], old, 2), ("new", [], new, 4)):
        assert cli.main(["export", str(run), str(tmp_path / out), *more]) == 0
        assert f"Quadratic after {rounds} rounds" in capsys.readouterr().out
        about = json.loads((tmp_path / out / "export.json").read_text())
        assert (about["round"], about["checkpoint"]["file"]) == (rounds, file.name)
        content = torch.load(file, weights_only=True)["state_dict"]["outer"]
        assert torch.equal(load(tmp_path / out).outer["outer"], content)
        assert [path.stat().st_mode & 0o777 for path in sorted((tmp_path / out).iterdir())] == [0o644, 0o644]
        assert (tmp_path / out).stat().st_mode & 0o777 == 0o755
    assert sorted(path.name for path in tmp_path.iterdir()) == ["new", "old", "runs"]
    for command in ("test", "validate"):
        assert cli.main([command, str(run), "--checkpoint", str(old), "--tasks", "3"]) == 0
        one = capsys.readouterr().out
        assert f"{command} on 3 tasks, round-00000002" in " ".join(one.split())
        assert cli.main([command, str(run)]) == 0
        two = capsys.readouterr().out
        assert f"{command} on 2 tasks, round-00000004" in " ".join(two.split())
        assert one.splitlines()[-2] != two.splitlines()[-2]


MARKET = ["--config", "market", "--data.subset", "30", "--data.subsets", "20", "--trainer.enable_progress_bar", "false"]


def market(folder, *flags):
    assert cli.main(["fit", *MARKET, *map(str, flags), "--output", str(folder / "runs")]) == 0
    (run,) = (folder / "runs").glob("*/*")
    return run


def test_simulated_prices_are_those_of_the_run_also_behind_its_events(tmp_path, undrawn, capsys):
    flags = ["--data.horizon", 5, "--data.beyond", 4, "--rounds", 24, "--seed", 3, "--algorithm.lr", 0.05]
    run = market(tmp_path, *flags)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # the prices are not those of the run
        found = forecast(run)
    judged = pl.read_csv(run / "events.csv")
    assert found.events["mse"].to_list() == judged["test_mse"].to_list()
    assert found.events["last_value_mse"].to_list() == judged["naive_mse"].to_list()
    capsys.readouterr()
    assert cli.main(["predict", str(run), "--output", str(tmp_path / "f.csv")]) == 0
    words = " ".join(capsys.readouterr().out.replace("│", " ").split())
    errors, naive = judged["test_mse"].to_numpy(), judged["naive_mse"].to_numpy()
    low, middle, high = np.quantile(judged["weight"].to_numpy(), (0, 0.5, 1))
    assert "forecast of 5 bars after 40 events" in words
    assert f"largest {low:.3g}, {middle:.3g}, {high:.3g}" in words
    assert "bars that are known already 200 of 200" in words
    for name, values in (("spline", errors), ("last value", naive)):
        assert f"{name}: mse, standardised mean {values.mean():.4f}, median {np.median(values):.4f}" in words
    assert f"better / worse {(errors < naive).sum()} / {(errors > naive).sum()}" in words


def test_a_forecast_in_plain_prices_without_an_event_that_went_bad(tmp_path, undrawn):
    prices, events = simulate_market(4, 60, 20, seed=2)
    prices.drop("row").write_csv(tmp_path / "prices.csv")
    events.drop("row").write_csv(tmp_path / "events.csv")
    files = ["--data.prices", tmp_path / "prices.csv", "--data.events", tmp_path / "events.csv"]
    more = ["--data.horizon", 6, "--data.transform", "none", "--data.on_bad_event", "skip", "--algorithm.lr", 0.5]
    run = market(tmp_path, *files, *more, "--rounds", 20)
    weights = pl.read_csv(run / "events.csv")["weight"].to_list()
    assert len(set(weights)) == 4
    whole = forecast(run)
    assert whole.events["weight"].to_list() == weights
    assert set(whole.curves["step"]) == set(range(-29, 7))
    for lane, ticker in enumerate(whole.events["ticker"]):
        closes = prices.filter(pl.col("ticker") == ticker)["close"].to_numpy()
        seen = closes[30:60]
        y = (seen - seen.mean()) / seen.std()
        differences = np.diff(np.eye(30), axis=0)
        beta = np.linalg.solve(np.eye(30) + weights[lane] * differences.T @ differences, y)
        expected = seen.mean() + seen.std() * beta
        curve = whole.curves.filter(pl.col("ticker") == ticker)
        assert np.allclose(curve["fitted"].drop_nulls(), expected)
        assert np.allclose(curve["forecast"].drop_nulls(), expected[-1])
        row = whole.events.row(lane, named=True)
        ahead = closes[60:66]
        assert row["rmse"] == pytest.approx(np.sqrt(((expected[-1] - ahead) ** 2).mean()))
        assert row["last_value_rmse"] == pytest.approx(np.sqrt(((closes[59] - ahead) ** 2).mean()))
        assert row["mse"] == pytest.approx((((expected[-1] - ahead) / seen.std()) ** 2).mean())
    spoiled = prices.filter(pl.col("ticker") != "SIM001").drop("row")
    spoiled.write_csv(tmp_path / "fewer.csv")
    with pytest.warns(UserWarning, match=r"1 of 4 events skipped: events.csv, row 2, event SIM001 .*: the ticker must"):
        fewer = forecast(run, prices=tmp_path / "fewer.csv")
    assert fewer.events.equals(whole.events[[0, 2, 3]])
    shorter = forecast(run, bars=4)
    seen, ahead = closes[30:60], closes[60:64]
    assert shorter.events["mse"][3] == pytest.approx((((expected[-1] - ahead) / seen.std()) ** 2).mean())
    assert shorter.events["last_value_mse"][3] == pytest.approx((((closes[59] - ahead) / seen.std()) ** 2).mean())
    longer = forecast(run, bars=9)  # the run's own six are compared with the past, without a warning
    assert longer.events["bars_known"].to_list() == [9] * 4
    drawn = draw_forecast(whole, shown=3)
    titles = [axes.get_title() for axes in drawn.figure.axes if axes.get_visible()]
    order = np.argsort(weights)[[0, 2, 3]]  # from the smallest λ to the largest
    assert [title.split()[0] for title in titles] == [whole.events["ticker"][int(i)] for i in order]


def test_events_are_chosen_once_in_the_order_of_asking(tmp_path):
    moments = pl.Series(["2021-01-04 10:00:00", "2021-01-05 10:00:00"]).str.to_datetime()
    known = pl.DataFrame({"ticker": ["A", "A", "B"], "timestamp": moments[[0, 1, 0]], "weight": [1.0, 2.0, 3.0]})
    asked = pl.DataFrame({"row": [1, 2, 3], "ticker": ["B", "A", "B"], "timestamp": moments[[0, 1, 0]]})
    assert choose_events(known, asked, "asked.csv", tmp_path)["weight"].to_list() == [3.0, 2.0]
    with pytest.raises(ValueError, match=r"asked\.csv, row 2: must be one of the 1 events of .*, got A 2021-01-05 10"):
        choose_events(known[2:], asked, "asked.csv", tmp_path)


def test_more_steps_are_recommended_where_there_are_more_classes_and_lr_is_taken(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("obbo_lightning.serving.predictions.draw_predictions", lambda found, path: path)
    file, _ = checkpoint_of(tmp_path)
    for classes, steps, hint in ((2, [], False), (3, [], True), (3, ["--steps", "4"], False)):
        x = np.random.default_rng(0).normal(size=(4 * classes, 2))
        np.savez("s.npz", examples=x, labels=np.arange(4 * classes) % classes)
        np.savez("q.npz", examples=x)
        assert cli.main(["predict", str(file), "--support", "s.npz", "--query", "q.npz", *steps]) == 0
        assert ("more --steps may help" in capsys.readouterr().out) == hint
    chances = []
    for flags in ([], ["--lr", "0.2"], ["--lr", "0.9"]):
        assert cli.main(["predict", str(file), "--support", "s.npz", "--query", "q.npz", *flags]) == 0
        chances.append((tmp_path / "predictions.csv").read_text())
    assert chances[0] == chances[1] != chances[2]  # 0.2 is the run's own
    assert chances[0].count("\n") == 13
