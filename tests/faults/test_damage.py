"""Any damage to the files of a run: every command refuses it in one line, or has the results of the undisturbed run."""

import random
import shutil
from typing import NamedTuple

import pytest
import yaml
from everything import TINY, results_of_run, told

from obbo_lightning.experiments import report
from obbo_lightning.runs.directory import RunDirectory
from obbo_lightning.runs.provenance import decisive, read_provenance
from obbo_lightning.training import run as runs

# One with every file that a run can have, whose report is one of events; one whose report is of rounds.
STREAMS = {"everything": ["--data", "everything.Everything"], "quadratic": ["--config", "quadratic"]}
COMMANDS = ("go on", "further", "validate", "test", "report", "export")
PROCESSES = ("threads", "workers", "devices", "num_nodes", "strategy", "accelerator", "logger")


class Played(NamedTuple):
    """Of one stream.

    Attributes:
        finished: a run of six rounds.
        killed: what was left of it where it was killed in its end, with the checkpoint of round 4.
        other: a finished run with another seed.
        copy: where it is damaged.
    """

    finished: object
    killed: object
    other: object
    copy: object


@pytest.fixture(scope="module")
def played(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(runs, "draw_figures", lambda *arguments: [])
        patched.setattr(report.Comparison, "figures", lambda *arguments: [])
        patched.setattr(report.MarketComparison, "figures", lambda *arguments: [])
        yield {name: play(tmp_path_factory.mktemp(name), flags) for name, flags in STREAMS.items()}


def play(folder, flags):
    found = []
    for seed in ("0", "1"):
        code, said, _ = told("fit", *flags, *TINY, "--seed", seed, "--output", folder / seed)
        assert code == 0, said
        found.append(next((folder / seed).glob("*/*")))
    shutil.copytree(found[0], folder / "killed")
    run = RunDirectory(folder / "killed")
    run.summary.unlink()
    for file in run.checkpoints.glob("round-00000006.*"):
        file.unlink()
    return Played(found[0], folder / "killed", found[1], folder / "copy")


def lines_of(file, change):
    lines = file.read_bytes().splitlines(keepends=True)
    if lines:
        change(lines)
    file.write_bytes(b"".join(lines))


def delete_row(file, rng, other):
    lines_of(file, lambda lines: lines.pop(rng.randrange(len(lines))))


def double_row(file, rng, other):
    lines_of(file, lambda lines: lines.insert(rng.randrange(len(lines)), rng.choice(lines)))


def swap_rows(file, rng, other):
    def swap(lines):
        i, j = rng.randrange(len(lines)), rng.randrange(len(lines))
        lines[i], lines[j] = lines[j], lines[i]

    lines_of(file, swap)


def alter_digit(file, rng, other):
    content = bytearray(file.read_bytes())
    digits = [i for i, byte in enumerate(content) if 48 <= byte < 58]
    if digits:
        place = rng.choice(digits)
        content[place] = 48 + (content[place] - 48 + rng.randrange(1, 10)) % 10
    file.write_bytes(content)


def flip_byte(file, rng, other):
    content = bytearray(file.read_bytes())
    if content:
        content[rng.randrange(len(content))] ^= rng.randrange(1, 256)
    file.write_bytes(content)


def cut(file, rng, other):
    content = file.read_bytes()
    file.write_bytes(content[: rng.randrange(len(content) or 1)])


def empty(file, rng, other):
    file.write_bytes(b"")


def delete(file, rng, other):
    file.unlink()


def become_a_folder(file, rng, other):
    file.unlink()
    file.mkdir()


def become_anothers(file, rng, other):
    """The same file of a run with another seed, a checkpoint with its checksum."""
    for one in file.parent.glob(f"{file.stem}.*") if file.parent.name == "checkpoints" else [file]:
        theirs = other / one.relative_to(file.parents[file.parent.name == "checkpoints"])
        if theirs.exists():
            shutil.copy(theirs, one)


def become_older(file, rng, other):
    """A checkpoint under the name of a later one."""
    if file.parent.name == "checkpoints":
        first, last = file.parent / "round-00000004", file.parent / "round-00000006"
        for suffix in (".ckpt", ".sha256"):
            shutil.copy(first.with_suffix(suffix), last.with_suffix(suffix))
    else:
        cut(file, rng, other)


def edit(file, rng, other):
    """One setting of config.yaml, whichever file was chosen."""
    config = next(path for path in (file.with_name("config.yaml"), file.parents[1] / "config.yaml") if path.exists())
    settings = inside = yaml.safe_load(config.read_text())
    while True:
        key = rng.choice(sorted(inside))
        if not (isinstance(inside[key], dict) and inside[key]):
            break
        inside = inside[key]
    value = inside[key]
    kinds = {bool: lambda: not value, int: lambda: value + 1, float: lambda: value * 1.5, str: lambda: value + "x"}
    inside[key] = kinds.get(type(value), lambda: 1)()
    if rng.random() < 0.2:
        inside[f"{key}s"] = inside.pop(key)
    config.write_text(yaml.safe_dump(settings))


DAMAGES = (delete_row, double_row, swap_rows, alter_digit, flip_byte, flip_byte, cut, cut, empty, delete)
DAMAGES += (become_a_folder, become_anothers, become_anothers, become_older, edit, edit, edit)


def settings_of(folder):
    try:
        found = yaml.safe_load((folder / "config.yaml").read_text())
        return found if isinstance(found, dict) else {}
    except (OSError, ValueError, yaml.YAMLError):
        return {}


def of_processes(settings):
    """What would start threads, processes or loggers: not here, where others run."""
    inside = {**settings, **(settings.get("trainer") if isinstance(settings.get("trainer"), dict) else {})}
    return {name: inside.get(name) for name in PROCESSES}


def run_command(command, folder):
    """What was said, and the results: nothing of times, and where settings may be chosen otherwise nothing of those."""
    out = folder.with_name("out")
    shutil.rmtree(out, ignore_errors=True)
    words = {"go on": ["resume"], "further": ["resume"], "export": ["export"]}.get(command, [command])
    more = {"further": ["--rounds", "8"], "export": [out], "report": ["--output", out, "--title", "t"]}
    code, said, shown = told(*words, folder, *more.get(command, []))
    results = {}
    if code == 0 and words == ["resume"]:
        results = results_of_run(RunDirectory(folder))
    elif code == 0 and command in ("report", "export"):
        kept = {"runs.csv", "rounds.csv", "events.csv", "regret.csv", "export.json", "weights.safetensors"}
        results = {file.name: file.read_bytes() for file in out.iterdir() if file.name in kept}
    elif code == 0:
        results = {"shown": shown}
    return code, said, results


@pytest.fixture(scope="module")
def undisturbed(played):
    """The results of every command, by stream and command."""
    found = {}
    for name, source in played.items():
        for command in dict.fromkeys(COMMANDS):
            fresh(source, command)
            code, said, found[name, command] = run_command(command, source.copy)
            assert (code, bool(found[name, command])) == (0, True), (name, command, said)
        whole = results_of_run(RunDirectory(source.finished))
        assert found[name, "go on"] == whole  # killed or not
    return found


def test_the_data_of_a_report_are_no_formulas(undisturbed):
    assert b"\nobbo,'=A," in undisturbed["everything", "report"]["events.csv"]


def test_every_table_and_every_closing_file_has_its_hash_and_no_formula(played):
    run = RunDirectory(played["everything"].finished)
    known = read_provenance(run)
    assert set(known.tables) == {"metrics.csv", "outer.csv", "tasks.csv"}
    assert set(known.closing) == {"baselines.csv", "events.csv", "lanes.npz", "summary.json"}
    assert run.events.read_text().splitlines()[1].startswith("'=A,")
    assert run.skipped.read_text().splitlines()[1].startswith("'=C,")


def fresh(source, command):
    shutil.rmtree(source.copy, ignore_errors=True)
    shutil.copytree(source.killed if command == "go on" else source.finished, source.copy)


def outcome(played, undisturbed, seed):
    """None where all is well, otherwise what went wrong."""
    rng = random.Random(seed)
    name, command = rng.choice(sorted(played)), rng.choice(COMMANDS)
    source = played[name]
    fresh(source, command)
    before = settings_of(source.copy)
    file = rng.choice(sorted(path for path in source.copy.rglob("*") if path.is_file()))
    damage = rng.choice(DAMAGES)
    damage(file, rng, source.other)
    now = settings_of(source.copy)
    if now and of_processes(now) != of_processes(before):
        return None
    code, said, results = run_command(command, source.copy)
    what = f"seed {seed}: {command} of {name} after {damage.__name__} of {file.name}: exit code {code}: {said[-1500:]}"
    if code == 2 and said.startswith("obbo: ") and said.count("\n") == 1:
        return None
    if code != 0:
        return what
    expected = undisturbed[name, command]
    if now and now != before and decisive(now) == decisive(before):  # anybody may choose when to evaluate
        free = {"free", "shown"}
        results, expected = ({k: v for k, v in one.items() if k not in free} for one in (results, expected))
    wrong = [key for key in expected if results.get(key) != expected[key]]
    return f"{what} {wrong} differ" if wrong else None


@pytest.mark.parametrize("block", range(6))
def test_damage_is_refused_in_one_line_or_changes_nothing(played, undisturbed, block):
    wrong = [found for seed in range(50 * block, 50 * (block + 1)) if (found := outcome(played, undisturbed, seed))]
    assert not wrong, f"{len(wrong)} of 50\n" + "\n".join(wrong)


@pytest.mark.nightly
@pytest.mark.parametrize("block", range(6, 106))
def test_damage_of_every_kind_is_refused_in_one_line_or_changes_nothing(played, undisturbed, block):
    test_damage_is_refused_in_one_line_or_changes_nothing(played, undisturbed, block)
