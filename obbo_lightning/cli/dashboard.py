"""`dashboard`: the W&B workspace and report of a project, through wandb-workspaces."""

import argparse
import importlib
import json
import sys
from typing import Any, NamedTuple

from obbo_lightning.experiments.report_data import COLOURS
from obbo_lightning.training.loggers import has_login

BY = "algorithm.name"  # runs of one algorithm are one line with a band


class Panel(NamedTuple):
    """Panel with one line per algorithm: mean over its runs, band: standard error."""

    title: str
    metric: str
    unit: str
    x: str = "round"
    logarithmic: bool = False


SECTIONS = {
    "Regret": (
        Panel("Cumulative regret", "regret/euclidean", "Euclidean bilevel local regret"),
        Panel("Cumulative regret, generalized", "regret/generalized", "with G_X, after clipping", logarithmic=True),
        Panel("Cumulative regret, exact", "regret/exact", "where the problem knows it"),
    ),
    "Accuracy": (
        Panel("Test accuracy", "test_accuracy", "mean over test tasks"),
        Panel("Prequential accuracy", "accuracy", "before a round is learned from"),
        Panel("Outer loss", "loss", "before a round is learned from"),
        Panel("Inner loss", "inner_loss", "after adaptation"),
        Panel("Test loss", "test_loss", "mean over test tasks"),
        Panel("Forecast error", "test_mse", "mean squared error, median over events"),
    ),
    "Gradient norm": (
        Panel("Hypergradient", "hypergradient_norm", "norm of d_t", logarithmic=True),
        Panel("Direction", "direction_norm", "norm of q_t", logarithmic=True),
        Panel("Residual of the linear system", "residual", "relative", logarithmic=True),
    ),
    "Compute": (
        Panel("Test accuracy against gradient evaluations", "test_accuracy", "mean over test tasks", x="evaluations"),
        Panel("Test accuracy against time", "test_accuracy", "mean over test tasks", x="RelativeTime(Process)"),
        Panel("Seconds of a round", "seconds", "s"),
        Panel("Gradients of a round", "gradients", "number"),
        Panel("Second-derivative products of a round", "products", "number"),
    ),
}
X_NAMES = {"round": "round t", "evaluations": "gradients and products so far", "RelativeTime(Process)": "seconds"}


def run(arguments: argparse.Namespace) -> int:
    """The W&B workspace and report of a project, or what would be sent."""
    if arguments.dry_run:
        both = build(arguments.entity or "ENTITY", arguments.project, arguments.group)
        content = {name: one._to_model().model_dump(mode="json", by_alias=True) for name, one in both.items()}
        arguments.output.write_text(json.dumps(content, indent=2) + "\n")
        print(f"{arguments.output}: what would be sent to W&B for project {arguments.project}")
        return 0
    if not has_login():
        raise ValueError("dashboard needs a W&B login, got none: wandb login, or --dry_run to see what would be sent")
    import wandb

    try:
        entity = str(arguments.entity or wandb.Api().default_entity)
        for one in build(entity, arguments.project, arguments.group).values():
            print(one.save().url)
    except (wandb.errors.Error, OSError) as error:
        print(f"obbo: W&B refused: {type(error).__name__} {' '.join(str(error).split())}", file=sys.stderr)
        return 1
    return 0


def build(entity: str, project: str, group: str | None = None) -> dict[str, Any]:
    """Return a workspace, and a report with the same panels, both with one section per question.

    Runs are grouped by algorithm, in the colours of our figures; the report is of one group of runs (a comparison)
    where ``group`` is given.
    """
    try:
        names = ("workspaces", "reports.v2", "expr")
        workspaces, reports, expressions = (importlib.import_module(f"wandb_workspaces.{name}") for name in names)
    except ImportError:
        raise ValueError("dashboard needs wandb-workspaces: pip install 'obbo_lightning[dashboard]'") from None
    sections = []
    blocks: list[Any] = [
        reports.P("Each line is the mean over the runs of an algorithm, each band their standard error."),
        reports.TableOfContents(),
    ]
    for name, panels in SECTIONS.items():
        plots = [
            reports.LinePlot(
                layout=reports.Layout(x=8 * (i % 3), y=6 * (i // 3), w=8, h=6),  # a report's grid is 24 wide
                title=panel.title,
                x=panel.x,
                y=[panel.metric],
                title_x=X_NAMES[panel.x],
                title_y=panel.unit,
                log_y=panel.logarithmic,
                groupby_aggfunc="mean",
                groupby_rangefunc="stderr",
                max_runs_to_show=100,
            )
            for i, panel in enumerate(panels)
        ]
        sections.append(workspaces.Section(name=name, panels=plots, is_open=True))
        runs = reports.Runset(groupby=[f"config.{BY}"], filters=f"Group = '{group}'" if group else "")
        blocks += [reports.H1(name), reports.PanelGrid(runsets=[runs], panels=plots)]
    title = "Online bilevel optimization"
    workspace = workspaces.Workspace(
        entity=entity,
        project=project,
        name=title,
        sections=sections,
        settings=workspaces.WorkspaceSettings(x_axis="round", max_runs=100),
        runset_settings=workspaces.RunsetSettings(groupby=[expressions.Config(BY)], group_colors=dict(COLOURS)),
    )
    report = reports.Report(
        entity=entity,
        project=project,
        title=f"{title}: {group}" if group else title,
        description="Regret, accuracy, gradient norms and compute by algorithm. Made by obbo_lightning.",
        blocks=blocks,
        width="fluid",
    )
    return {"workspace": workspace, "report": report}
