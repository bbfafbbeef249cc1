"""The figure of the packages."""

from pages import packages


def test_figure_shows_the_imports_of_the_code():
    assert packages.FIGURE.read_text() == packages.draw(), "the imports have changed: python -m pages.packages"


def test_arrows_that_follow_from_others_are_left_out():
    graph = {"cli": {"core", "runs"}, "runs": {"core", "config"}, "core": {"config"}, "config": set()}
    assert packages.reduce_arrows(graph) == {"cli": {"runs"}, "runs": {"core"}, "core": {"config"}, "config": set()}
    assert packages.row_numbers(graph) == {"cli": 3, "runs": 2, "core": 1, "config": 0}
