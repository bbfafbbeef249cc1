"""The W&B workspace, report and sweeps, without a network."""

import importlib.util
import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml
from jsonschema import Draft7Validator
from small_runs import config_of

from obbo_lightning import cli
from obbo_lightning.cli.dashboard import BY, SECTIONS, build
from obbo_lightning.experiments.report_data import COLOURS

# wandb-workspaces itself uses what pydantic deprecates
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")
CONFIGS = Path(__file__).parents[2] / "configs"


@pytest.fixture(scope="module")
def specification(tmp_path_factory):
    path = tmp_path_factory.mktemp("dashboard") / "sent.json"
    flags = ["--project", "mine", "--entity", "me", "--group", "fc100", "--dry_run", "--output", str(path)]
    assert cli.main(["dashboard", *flags]) == 0
    return json.loads(path.read_text())


def panels(tree):
    """Yield every line plot, wherever it is."""
    if isinstance(tree, dict):
        if tree.get("viewType") == "Run History Line Plot":
            yield tree
        for value in tree.values():
            yield from panels(value)
    elif isinstance(tree, list):
        for value in tree:
            yield from panels(value)


@pytest.mark.parametrize("kind", ["workspace", "report"])
def test_workspace_and_report_show_regret_accuracy_gradient_norm_and_compute(specification, kind):
    shown = [(p["config"]["xAxis"], *p["config"]["metrics"]) for p in panels(specification[kind])]
    assert {("round", "regret/euclidean"), ("round", "test_accuracy"), ("round", "hypergradient_norm")} <= set(shown)
    assert {("evaluations", "test_accuracy"), ("_runtime", "test_accuracy"), ("round", "seconds")} <= set(shown)
    assert len(shown) == sum(map(len, SECTIONS.values()))
    for panel in panels(specification[kind]):
        assert panel["config"]["xAxisTitle"]
        assert panel["config"]["yAxisTitle"]


def test_every_panel_shows_a_metric_that_runs_log(tmp_path):
    flags = ["--rounds", "1", "--evaluation.tasks", "1", "--problem.network.filters", "2", "--data.image_size", "16"]
    assert cli.main(["fit", *flags, "--output", str(tmp_path)]) == 0
    (run,) = tmp_path.glob("*/*")
    columns = [(run / name).read_text().splitlines()[0].split(",") for name in ("metrics.csv", "timings.csv")]
    logged = {*columns[0], *columns[1], "evaluations", "RelativeTime(Process)", "test_loss", "test_mse"}
    assert {word for section in SECTIONS.values() for panel in section for word in (panel.metric, panel.x)} <= logged


def test_runs_are_grouped_by_algorithm_in_our_colours_and_panels_do_not_overlap(specification):
    section = specification["workspace"]["spec"]["section"]
    assert section["runSets"][0]["grouping"] == [{"section": "config", "name": "algorithm.value.name"}]
    assert set(section["customRunColors"].values()) >= set(COLOURS.values())
    grids = [b for b in specification["report"]["spec"]["blocks"] if b["type"] == "panel-grid"]
    assert [len(list(panels(grid))) for grid in grids] == [len(section) for section in SECTIONS.values()]
    for grid in grids:
        places = [(panel["layout"]["x"], panel["layout"]["y"]) for panel in panels(grid)]
        assert len(set(places)) == len(places)
        assert all(x + 8 <= 24 for x, _ in places)
        (runs,) = grid["metadata"]["runSets"]
        assert runs["grouping"] == [{"section": "config", "name": "algorithm.value.name"}]
        (chosen,) = runs["filters"]["filters"]
        assert (chosen["key"]["name"], chosen["value"]) == ("group", "fc100")
    section, key = BY.split(".")
    assert config_of()[section][key] == "obbo"


def test_the_specification_is_what_is_sent(monkeypatch, capsys):
    """The two calls at the edge of wandb-workspaces are caught; everything before them is real."""
    import wandb_workspaces.reports.v2.interface as reports
    import wandb_workspaces.workspaces.internal as workspaces

    sent = {}

    def catch_view(view):
        sent["workspace"] = view
        return {"upsertView": {"view": {"name": view.name, "id": "1"}}}

    def catch_report(api, query, variables):
        sent["report"] = variables
        found = {"id": "2", "name": "x", "type": "runs", "displayName": "x", "description": "", "spec": "{}"}
        project = {"id": "3", "name": "mine", "entityName": "me"}
        user = {"id": "4", "username": "me", "name": "me", "photoUrl": None, "userType": "", "admin": False}
        found |= {"project": project, "user": user, "createdAt": None, "updatedAt": None, "previewUrl": None}
        return {"upsertView": {"view": found, "inserted": True}}

    project = SimpleNamespace(name="mine")
    monkeypatch.setattr("obbo_lightning.cli.dashboard.has_login", lambda: True)
    monkeypatch.setattr(workspaces, "upsert_view2", catch_view)
    monkeypatch.setattr(reports, "execute_graphql", catch_report)
    monkeypatch.setattr(reports, "_get_api", lambda: SimpleNamespace(projects=lambda entity: [project]))
    monkeypatch.setattr(reports, "get_app_url", lambda api: "scheme://app")
    monkeypatch.setattr(type(build("me", "mine")["workspace"]), "url", "scheme://app/me/mine")
    assert cli.main(["dashboard", "--entity", "me", "--project", "mine", "--group", "fc100"]) == 0
    workspace, report = capsys.readouterr().out.split()
    assert workspace == "scheme://app/me/mine"
    assert report.startswith("scheme://app/me/mine/reports/")
    assert (sent["report"]["entityName"], sent["report"]["projectName"]) == ("me", "mine")
    body = json.loads(sent["report"]["spec"])
    assert [p["config"]["metrics"] for p in panels(body)] == [[p.metric] for s in SECTIONS.values() for p in s]
    assert sent["workspace"].project == "mine"


def test_missing_login_and_impossible_output_are_refused(monkeypatch, tmp_path, capsys):
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    assert cli.main(["dashboard"]) == 2
    error = capsys.readouterr().err
    assert "dashboard needs a W&B login, got none" in error
    assert error.count("\n") == 1
    assert cli.main(["dashboard", "--dry_run", "--output", str(tmp_path / "no" / "where.json")]) == 2
    assert "where.json: No such file or directory" in capsys.readouterr().err


SWEEPS = sorted((CONFIGS / "sweeps").glob("*.yaml"))


@pytest.mark.parametrize("path", SWEEPS, ids=lambda p: p.stem)
def test_sweeps_are_valid_and_commands_of_their_agents_are_accepted(path, monkeypatch, capsys):
    (folder,) = importlib.util.find_spec("sweeps").submodule_search_locations  # W&B's package, not imported
    schema = Draft7Validator(json.loads((Path(folder) / "config" / "schema.json").read_text()))
    sweep = yaml.safe_load(path.read_text())
    assert [error.message for error in schema.iter_errors(sweep)] == []
    assert schema.is_valid({**sweep, "method": "guess"}) is False  # it can fail
    assert path.read_text().startswith("#")
    assert sweep["metric"]["name"].startswith("validation/")
    monkeypatch.chdir(CONFIGS.parent)
    command = sweep["command"]
    assert command[:4] == ["${env}", "python", "-m", "obbo_lightning"]
    assert (command[4], command[-1]) == ("fit", "${args}")
    for end in (0, -1):
        chosen = {k: (p.get("values") or [p["min"], p["max"]])[end] for k, p in sweep["parameters"].items()}
        flags = [f"--{key}={value}" for key, value in chosen.items()]  # what ${args} becomes
        assert cli.main(["fit", *command[5:-1], *flags, "--print_config"]) == 0
        found = yaml.safe_load(capsys.readouterr().out)
        assert found["logger"] == "wandb"
        assert found["evaluation"]["split"] == "validation"  # a sweep that saw test tasks would choose by them
        for key, value in chosen.items():
            at = found
            for word in key.split("."):
                at = at[word]
            assert (at["name"] if isinstance(at, dict) else at) == value


def test_sweeps_cover_window_step_decay_and_inner_steps():
    swept = {key for path in SWEEPS for key in yaml.safe_load(path.read_text())["parameters"]}
    assert {"algorithm.window", "algorithm.lr", "algorithm.geometry.decay", "algorithm.inner.steps"} <= swept


def test_the_agent_of_a_sweep_names_the_run(monkeypatch, tmp_path):
    from obbo_lightning.runs.directory import RunDirectory
    from obbo_lightning.training.loggers import _identity

    monkeypatch.setenv("WANDB_SWEEP_ID", "s")
    monkeypatch.setenv("WANDB_RUN_ID", "chosen")
    assert _identity(RunDirectory(tmp_path)) == "chosen"
    monkeypatch.delenv("WANDB_RUN_ID")
    assert _identity(RunDirectory(tmp_path)) == "chosen"  # a resumed run keeps it
