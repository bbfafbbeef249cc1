"""The drawing of the rooms is that of the code."""

from pages import rooms


def test_the_drawing_of_the_rooms_is_that_of_the_code():
    assert rooms.PLACE.read_text() == rooms.drawing(), "the imports have changed: python -m pages.rooms"


def test_arrows_that_follow_from_others_are_left_out():
    graph = {"cli": {"core", "runs"}, "runs": {"core", "parts"}, "core": {"parts"}, "parts": set()}
    assert rooms.reduced(graph) == {"cli": {"runs"}, "runs": {"core"}, "core": {"parts"}, "parts": set()}
    assert rooms.heights(graph) == {"cli": 3, "runs": 2, "core": 1, "parts": 0}


def test_the_code_has_the_imports_that_are_drawn():
    graph = rooms.imports()
    assert "core" in graph["algorithms"]
    assert graph["threads"] == set()
    assert len(graph) > 12
