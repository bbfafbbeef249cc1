"""Any damage to the files of a run: every command refuses it in one line, or has the results of the undisturbed run."""

import random
import shutil
from pathlib import Path
from typing import NamedTuple

import pytest
import yaml
from small_runs import TINY, call, read_results

from obbo_lightning.runs.directory import RunDirectory
from obbo_lightning.runs.provenance import decisive_keys, read_provenance

# One with every file that a run can have, whose report is of events; one whose report is of rounds.
STREAMS = {"every file": ["--data", "small_runs.EveryFile"], "quadratic": ["--config", "quadratic"]}
COMMANDS = {
    "continue": ["resume", "RUN"],
    "extend": ["resume", "RUN", "--rounds", "8"],
    "validate": ["validate", "RUN"],
    "test": ["test", "RUN"],
    "report": ["report", "RUN", "--output", "OUT", "--title", "t"],
    "export": ["export", "RUN", "OUT"],
}
OUTPUTS = {"runs.csv", "rounds.csv", "events.csv", "regret.csv", "metadata.json", "weights.safetensors"}
# Keys that would start threads, processes or loggers: not here, where other tests run.
PROCESSES = ("threads", "workers", "devices", "num_nodes", "strategy", "accelerator", "logger")


class Runs(NamedTuple):
    """Runs of one stream: six rounds, the same killed at its end with the checkpoint of round 4, another seed."""

    finished: Path
    killed: Path
    other: Path

    def copy(self, command):
        """Return a fresh copy of the run that a command is tried on."""
        path = self.killed.with_name("copy")
        shutil.rmtree(path, ignore_errors=True)
        shutil.copytree(self.killed if command == "continue" else self.finished, path)
        return path


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("obbo_lightning.training.run.draw_figures", lambda *arguments: [])
        for name in ("Comparison", "MarketComparison"):
            patch.setattr(f"obbo_lightning.experiments.report.{name}.figures", lambda *arguments: [])
        yield {name: make_runs(tmp_path_factory.mktemp("runs"), flags) for name, flags in STREAMS.items()}


def make_runs(folder, flags):
    paths = []
    for seed in ("0", "1"):
        code, error, _ = call("fit", *flags, *TINY, "--seed", seed, "--output", folder / seed)
        assert code == 0, error
        paths.append(next((folder / seed).glob("*/*")))
    killed = shutil.copytree(paths[0], folder / "killed")
    (killed / "summary.json").unlink()
    for file in (killed / "checkpoints").glob("round-00000006.*"):
        file.unlink()
    return Runs(paths[0], killed, paths[1])


def change_lines(file, change):
    lines = file.read_bytes().splitlines(keepends=True)
    if lines:
        change(lines)
    file.write_bytes(b"".join(lines))


def delete_row(file, rng, other):
    change_lines(file, lambda lines: lines.pop(rng.randrange(len(lines))))


def double_row(file, rng, other):
    change_lines(file, lambda lines: lines.insert(rng.randrange(len(lines)), rng.choice(lines)))


def swap_rows(file, rng, other):
    def swap(lines):
        i, j = rng.randrange(len(lines)), rng.randrange(len(lines))
        lines[i], lines[j] = lines[j], lines[i]

    change_lines(file, swap)


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


def replace_by_folder(file, rng, other):
    file.unlink()
    file.mkdir()


def replace_by_other_run(file, rng, other):
    """Copy the same file of a run with another seed, a checkpoint with its checksum."""
    for one in file.parent.glob(f"{file.stem}.*") if file.parent.name == "checkpoints" else [file]:
        theirs = other / one.relative_to(file.parents[file.parent.name == "checkpoints"])
        if theirs.exists():
            shutil.copy(theirs, one)


def replace_by_older(file, rng, other):
    """Copy a checkpoint to the name of a later one."""
    if file.parent.name == "checkpoints":
        first, last = file.parent / "round-00000004", file.parent / "round-00000006"
        for suffix in (".ckpt", ".sha256"):
            shutil.copy(first.with_suffix(suffix), last.with_suffix(suffix))
    else:
        cut(file, rng, other)


def edit_config(file, rng, other):
    """Change one key of config.yaml, whichever file was chosen."""
    path = next(path for path in (file.with_name("config.yaml"), file.parents[1] / "config.yaml") if path.exists())
    config = inside = yaml.safe_load(path.read_text())
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
    path.write_text(yaml.safe_dump(config))


DAMAGES = (delete_row, double_row, swap_rows, alter_digit, flip_byte, flip_byte, cut, cut, empty, delete)
DAMAGES += (replace_by_folder, replace_by_other_run, replace_by_other_run, replace_by_older)
DAMAGES += (edit_config, edit_config, edit_config)


def read_config(folder):
    try:
        config = yaml.safe_load((folder / "config.yaml").read_text())
        return config if isinstance(config, dict) else {}
    except (OSError, ValueError, yaml.YAMLError):
        return {}


def process_keys(config):
    inside = {**config, **(config.get("trainer") if isinstance(config.get("trainer"), dict) else {})}
    return {name: inside.get(name) for name in PROCESSES}


def run_command(name, command, folder):
    """Return exit code, standard error and the results without durations."""
    out = folder.with_name("out")
    shutil.rmtree(out, ignore_errors=True)
    words = [{"RUN": folder, "OUT": out}.get(word, word) for word in COMMANDS[command]]
    code, error, printed = call(*words, *(["--trust"] if name == "every file" else []))  # its stream is not registered
    results = {}
    if code == 0 and command in ("continue", "extend"):
        results = read_results(RunDirectory(folder))
    elif code == 0 and command in ("report", "export"):
        results = {file.name: file.read_bytes() for file in out.iterdir() if file.name in OUTPUTS}
    elif code == 0:
        results = {"printed": printed}
    return code, error, results


@pytest.fixture(scope="module")
def undisturbed(runs):
    """The results of every command on the run of every stream."""
    results = {}
    for name, one in runs.items():
        for command in COMMANDS:
            code, error, results[name, command] = run_command(name, command, one.copy(command))
            assert (code, bool(results[name, command])) == (0, True), (name, command, error)
        assert results[name, "continue"] == read_results(RunDirectory(one.finished))  # killed or not
    return results


def test_every_table_and_every_closing_file_has_its_hash_and_no_formula(runs, undisturbed):
    run = RunDirectory(runs["every file"].finished)
    known = read_provenance(run)
    assert set(known.tables) == {"metrics.csv", "outer.csv", "fingerprints.csv"}
    assert set(known.closing) == {"baselines.csv", "events.csv", "lanes.npz", "summary.json"}
    assert run.events.read_text().splitlines()[1].startswith("'=A,")
    assert run.skipped.read_text().splitlines()[1].startswith("'=C,")
    assert b"\nobbo,'=A," in undisturbed["every file", "report"]["events.csv"]


def damage_and_run(runs, undisturbed, seed):
    """Return None where a damage is refused or changes nothing, otherwise what went wrong."""
    rng = random.Random(seed)
    name, command = rng.choice(sorted(runs)), rng.choice(list(COMMANDS))
    copy = runs[name].copy(command)
    before = read_config(copy)
    file = rng.choice(sorted(path for path in copy.rglob("*") if path.is_file()))
    damage = rng.choice(DAMAGES)
    damage(file, rng, runs[name].other)
    now = read_config(copy)
    if now and process_keys(now) != process_keys(before):
        return None
    code, error, results = run_command(name, command, copy)
    what = f"seed {seed}: {command} of {name} after {damage.__name__} of {file.name}: exit code {code}: {error[-1500:]}"
    if code == 2 and error.startswith("obbo: ") and error.count("\n") == 1:
        return None
    if code != 0:
        return what
    expected = undisturbed[name, command]
    if now and now != before and decisive_keys(now) == decisive_keys(before):  # evaluations may be at other rounds
        free = {"free", "printed"}
        results, expected = ({k: v for k, v in one.items() if k not in free} for one in (results, expected))
    wrong = [key for key in expected if results.get(key) != expected[key]]
    return f"{what} {wrong} differ" if wrong else None


@pytest.mark.parametrize("block", [*range(6), *(pytest.param(n, marks=pytest.mark.nightly) for n in range(6, 106))])
def test_damage_is_refused_in_one_line_or_changes_nothing(runs, undisturbed, block):
    seeds = range(50 * block, 50 * (block + 1))
    wrong = [problem for seed in seeds if (problem := damage_and_run(runs, undisturbed, seed))]
    assert not wrong, f"{len(wrong)} of 50\n" + "\n".join(wrong)
