"""`dashboard`: the W&B workspace and report of a project, through wandb-workspaces."""

from typing import Any, NamedTuple

from obbo_lightning.experiments.report_data import COLOURS

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


def build_workspace(entity: str, project: str) -> Any:
    """Return a workspace with one section per question, runs grouped by algorithm, in the colours of our figures."""
    workspaces, _, expressions = _import()
    sections = [
        workspaces.Section(name=name, panels=[_panel(panel) for panel in panels], is_open=True)
        for name, panels in SECTIONS.items()
    ]
    runs = workspaces.RunsetSettings(groupby=[expressions.Config(BY)], group_colors=dict(COLOURS))
    settings = workspaces.WorkspaceSettings(x_axis="round", max_runs=100)
    return workspaces.Workspace(
        entity=entity,
        project=project,
        name="Online bilevel optimization",
        sections=sections,
        settings=settings,
        runset_settings=runs,
    )


def build_report(entity: str, project: str, group: str | None = None) -> Any:
    """Return a report with the same panels, of one group of runs (a comparison) where ``group`` is given."""
    _, reports, _ = _import()
    blocks: list[Any] = [
        reports.P("Each line is the mean over the runs of an algorithm, each band their standard error."),
        reports.TableOfContents(),
    ]
    filters = f"Group = '{group}'" if group else ""
    for name, panels in SECTIONS.items():
        runs = reports.Runset(groupby=[f"config.{BY}"], filters=filters)  # of the project of the report
        grid = [_panel(panel, place) for place, panel in enumerate(panels)]
        blocks += [reports.H1(name), reports.PanelGrid(runsets=[runs], panels=grid)]
    return reports.Report(
        entity=entity,
        project=project,
        title=f"Online bilevel optimization{f': {group}' if group else ''}",
        description="Regret, accuracy, gradient norms and compute by algorithm. Made by obbo_lightning.",
        blocks=blocks,
        width="fluid",
    )


def specification(entity: str, project: str, group: str | None = None) -> dict[str, Any]:
    """Return what `save` would send, as JSON."""
    return {
        "workspace": build_workspace(entity, project)._to_model().model_dump(mode="json", by_alias=True),
        "report": build_report(entity, project, group)._to_model().model_dump(mode="json", by_alias=True),
    }


def save(entity: str, project: str, group: str | None = None) -> list[str]:
    """Create both on W&B; returns their addresses."""
    return [build_workspace(entity, project).save().url, build_report(entity, project, group).save().url]


def _panel(panel: Panel, place: int = 0) -> Any:
    """Return a line plot; ``place`` is its number in a report's grid, which is 24 wide, and unused in a workspace."""
    _, reports, _ = _import()
    return reports.LinePlot(
        layout=reports.Layout(x=8 * (place % 3), y=6 * (place // 3), w=8, h=6),
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


def _import() -> tuple[Any, Any, Any]:
    try:
        import wandb_workspaces.expr as expressions
        import wandb_workspaces.reports.v2 as reports
        import wandb_workspaces.workspaces as workspaces
    except ImportError:
        raise ValueError(
            "dashboard needs the package wandb-workspaces: pip install 'obbo_lightning[dashboard]'"
        ) from None
    return workspaces, reports, expressions
