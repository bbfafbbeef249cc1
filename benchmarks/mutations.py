"""How many wrong lines the tests notice: python -m benchmarks.mutations [--room core …] [--count N] [--seed S].

Each wrong line is put into a copy of the project, and the fast tests that run that line are played until one fails,
those of its own room first, and the shortest first; ``--seconds`` of them for a line that nothing notices. Lines are
planted by rule and drawn at random (``--count`` of each room), or those of ``wrong_lines.yaml`` (``--by_hand``).

Which test runs which line is measured once, with `coverage`, and remembered in ``--memory`` with all that was found:
the same command goes on where it was stopped, and after new tests plays only what was not noticed.
"""

import argparse
import json
import os
import random
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from benchmarks.noticing import Project, Seen, warm_up
from benchmarks.wrong_lines import WrongLine, by_hand, planted

ROOT = Path(__file__).parents[1]
PACKAGE = "obbo_lightning"
ROOMS = ("core", "problems", "streams", "training")


class Finding(NamedTuple):
    """What became of one wrong line.

    Attributes:
        wrong: the line.
        noticed: the test that failed, or how its process ended; None if nobody noticed.
    """

    wrong: WrongLine
    noticed: str | None


def main(words: Sequence[str] | None = None) -> None:
    """Play them, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--room", nargs="+", default=ROOMS, help="folders of the package")
    parser.add_argument("--count", type=int, default=100, help="wrong lines of each room")
    parser.add_argument("--seed", type=int, default=0, help="of the draw")
    parser.add_argument("--tests", nargs="+", default=["tests"], help="folders of the tests that are asked")
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    parser.add_argument("--seconds", type=float, default=60.0, help="of tests for one line that nothing notices")
    parser.add_argument("--by_hand", action="store_true", help="those of wrong_lines.yaml, of all rooms")
    parser.add_argument("--memory", type=Path, default=ROOT / ".mutations", help="folder for the map and the findings")
    asked = parser.parse_args(words)
    if asked.by_hand:
        chosen, stale = by_hand(ROOT)
        for complaint in stale:
            print(f"stale: {complaint}")
    else:
        chosen = [wrong for room in asked.room for wrong in draw(ROOT, room, asked.count, asked.seed)]
    warm_up()
    findings = play_all(ROOT, PACKAGE, chosen, asked.memory, asked.tests, asked.jobs, asked.seconds)
    print(table(findings))


def draw(root: Path, room: str, count: int, seed: int) -> list[WrongLine]:
    """So many of a room's wrong lines, at random; those of a larger count begin with those of a smaller one."""
    folder = root / PACKAGE / room
    found = planted(root, sorted(path.relative_to(root).as_posix() for path in folder.rglob("*.py")))
    random.Random(f"{seed} {room}").shuffle(found)
    return found[:count]


def play_all(
    root: Path,
    package: str,
    chosen: Sequence[WrongLine],
    memory: Path,
    folders: Sequence[str] = ("tests",),
    jobs: int = 1,
    seconds: float = 60.0,
) -> list[Finding]:
    """What becomes of each wrong line; what is in ``memory`` and still true is not played again."""
    memory.mkdir(parents=True, exist_ok=True)
    log = memory / "findings.jsonl"
    with tempfile.TemporaryDirectory(prefix="mutations-") as folder:
        projects = [Project(root, Path(folder) / str(job), package, folders) for job in range(jobs)]
        tests = projects[0].map(memory / "map.json", jobs)
        keys = {wrong: _key(wrong, projects[0]) for wrong in chosen}
        asked = projects[0].digest(*(path for name in folders for path in (root / name).rglob("test_*.py")))
        known = _remembered(log, asked)
        left = [wrong for wrong in chosen if keys[wrong] not in known]
        children = []
        for job, project in enumerate(projects):
            child = os.fork()
            if not child:
                for wrong in left[job::jobs]:
                    noticed = play(project, wrong, tests, seconds)
                    print(f"{wrong}: {noticed or 'NOT NOTICED'}", flush=True)
                    with log.open("a") as file:
                        file.write(json.dumps({"key": keys[wrong], "tests": asked, "noticed": noticed}) + "\n")
                os._exit(0)
            children.append(child)
        for child in children:
            os.waitpid(child, 0)
    known = _remembered(log, asked)
    return [Finding(wrong, known[key]) for wrong, key in keys.items() if key in known]


def _key(wrong: WrongLine, project: Project) -> str:
    return f"{wrong} in {project.digest(project.root / wrong.file)}"


def _remembered(log: Path, tests: str) -> dict[str, str | None]:
    """What was noticed stays so; what was not is asked again when there are other tests."""
    entries = map(json.loads, log.read_text().splitlines() if log.exists() else [])
    return {entry["key"]: entry["noticed"] for entry in entries if entry["noticed"] or entry["tests"] == tests}


def play(project: Project, wrong: WrongLine, tests: dict[str, Seen], seconds: float = 60.0) -> str | None:
    """The test that notices a wrong line, if one does."""
    text = wrong.put_into((project.root / wrong.file).read_text())
    chosen = choose(wrong, project.package, tests, seconds)
    if not chosen:
        return None
    expected = sum(tests[test].seconds for test in chosen)
    return project.play(wrong.file, text, chosen, 60 + 5 * expected)


def choose(wrong: WrongLine, package: str, tests: dict[str, Seen], seconds: float) -> list[str]:
    """Tests that run a line (any line of its file, if it runs when it is imported), best first, for so many seconds."""
    lines = range(wrong.line, wrong.line + wrong.before.count("\n") + 1)
    able = [test for test, seen in tests.items() if seen.passed and any(seen.runs(wrong.file, n) for n in lines)]
    if not able:
        able = [test for test, seen in tests.items() if seen.passed and seen.runs(wrong.file)]
    room = wrong.file.removeprefix(f"{package}/").partition("/")[0]
    own = (f"tests/{room}/", wrong.file)
    able.sort(key=lambda test: (not test.startswith(own), tests[test].seconds))
    chosen: list[str] = []
    for test in able:
        seconds -= tests[test].seconds
        if seconds < 0 and chosen:
            break
        chosen.append(test)
    return chosen


def table(findings: Sequence[Finding]) -> str:
    """By room, and what was not noticed."""
    rooms: dict[str, list[bool]] = {}
    for wrong, noticed in findings:
        rooms.setdefault(wrong.file.split("/")[1].removesuffix(".py"), []).append(noticed is not None)
    rooms["all"] = [noticed for room in rooms.values() for noticed in room]
    lines = ["| room | wrong lines | noticed | rate |", "|---|---|---|---|"]
    lines += [f"| {room} | {len(n)} | {sum(n)} | {sum(n) / max(1, len(n)):.1%} |" for room, n in rooms.items()]
    return "\n".join([*lines, "", *(f"not noticed: {one.wrong}" for one in findings if one.noticed is None)])


if __name__ == "__main__":
    main()
