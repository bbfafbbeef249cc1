"""The script that plants wrong lines, on a project of one file: what a test runs is noticed, what none runs is not."""

import ast
from pathlib import Path

import pytest

from benchmarks.mutations import choose, draw, play_all, table
from benchmarks.noticing import Seen
from benchmarks.wrong_lines import WrongLine, by_hand, planted

ROOT = Path(__file__).parents[2]
SOURCE = '''
"""Words 1 + 2."""

def tested(a: int = 1) -> int:
    """More words."""
    if a < 0:
        raise ValueError("a must be at least 0" + "!")
    return a + 2


def untested(β):
    return β[1:] * 3
'''


@pytest.fixture
def project(tmp_path):
    root = tmp_path / "project"
    (root / "toy_package").mkdir(parents=True)
    (root / "tests").mkdir()
    (root / "toy_package" / "__init__.py").touch()
    (root / "toy_package" / "arithmetic.py").write_text(SOURCE)
    (root / "tests" / "test_toy_arithmetic.py").write_text(
        "from toy_package.arithmetic import tested\n\n\ndef test_five():\n    assert tested(3) == 5\n"
    )
    return root


def test_a_wrong_line_that_a_test_runs_is_noticed_and_one_that_none_runs_is_not(project, tmp_path, capfd):
    wrong = planted(project, ["toy_package/arithmetic.py"])
    chosen = [one for one in wrong if one.before in ("a + 2", "β[1:] * 3")]
    memory = tmp_path / "memory"
    findings = play_all(project, "toy_package", chosen, memory)
    assert [(one.wrong.after, one.noticed) for one in findings] == [
        ("(a - 2)", "tests/test_toy_arithmetic.py::test_five"),
        ("(β[1:] / 3)", None),
    ]
    assert "| arithmetic | 2 | 1 | 50.0% |" in table(findings)
    assert "not noticed: toy_package/arithmetic.py:12 operator: β[1:] * 3 → (β[1:] / 3)" in table(findings)
    assert (project / "toy_package" / "arithmetic.py").read_text() == SOURCE
    # the same again is remembered, and a new test is asked about what nobody noticed
    capfd.readouterr()
    assert play_all(project, "toy_package", chosen, memory) == findings
    assert capfd.readouterr().out == ""
    (project / "tests" / "test_toy_more.py").write_text(
        "from toy_package.arithmetic import untested\n\n\ndef test_b():\n    assert untested('ab') == 'bbb'\n"
    )
    again = play_all(project, "toy_package", chosen, memory)
    assert [one.noticed for one in again] == [findings[0].noticed, "tests/test_toy_more.py::test_b"]


def test_words_for_people_and_types_are_left_alone(project):
    wrong = planted(project, ["toy_package/arithmetic.py"])
    assert {one.line for one in wrong} == {4, 6, 8, 12}
    assert {(one.before, one.after) for one in wrong if one.line == 6} == {
        ("a < 0", "(a <= 0)"),
        ("a < 0", "(not a < 0)"),
        ("0", "(1)"),
    }
    for one in wrong:
        changed = one.put_into(SOURCE)
        assert changed != SOURCE
        ast.parse(changed)


def test_a_larger_draw_begins_with_a_smaller_one():
    small, large = draw(ROOT, "core", 5, seed=1), draw(ROOT, "core", 30, seed=1)
    assert small == large[:5]
    assert len(set(large)) == 30
    assert small != draw(ROOT, "core", 5, seed=2)


def test_tests_of_the_own_room_come_first_and_a_line_of_no_test_has_those_of_its_file():
    tests = {
        "tests/cli/test_a.py::test_fast": Seen(0.1, True, {"p/core/x.py": 0b1100}),
        "tests/core/test_x.py::test_slow": Seen(5.0, True, {"p/core/x.py": 0b0100}),
        "tests/core/test_x.py::test_broken": Seen(0.1, False, {"p/core/x.py": 0b0100}),
        "tests/core/test_y.py::test_other": Seen(0.1, True, {"p/core/y.py": 0b0100}),
    }
    second, fifth = (WrongLine("p/core/x.py", 0, "a", "b", line, "") for line in (2, 5))
    assert choose(second, "p", tests, 60) == ["tests/core/test_x.py::test_slow", "tests/cli/test_a.py::test_fast"]
    assert choose(second, "p", tests, 5.05) == ["tests/core/test_x.py::test_slow"]
    assert len(choose(fifth, "p", tests, 60)) == 2


def test_the_lines_written_by_hand_are_still_wrong(tmp_path):
    found, stale = by_hand(ROOT)
    assert stale == []
    assert len(found) >= 150
    for one in found:
        compile(one.put_into((ROOT / one.file).read_text()), one.file, "exec")
    (tmp_path / "lines.yaml").write_text("- {file: README.md, name: gone, before: no such words, after: x}\n")
    assert by_hand(ROOT, tmp_path / "lines.yaml") == ([], ["README.md: gone: 'no such words' is there 0×"])
