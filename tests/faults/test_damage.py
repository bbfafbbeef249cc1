"""Any damage to the files of a run: refused in one line, or the results of the undisturbed run."""

import contextlib
import io
import random
import shutil
import traceback
import warnings

import pytest
import yaml

from obbo_lightning import cli
from obbo_lightning.runs.directory import RunDirectory
from obbo_lightning.runs.manifest import decisive
from obbo_lightning.training import run as runs

TINY = ["--config", "quadratic", "--rounds", "6", "--evaluation.tasks", "1", "--evaluation.every", "3"]
TINY += ["--checkpoint.every", "2", "--algorithm.inner.steps", "1", "--algorithm.hypergradient.steps", "1"]
TINY += ["--trainer.accelerator", "cpu", "--trainer.enable_progress_bar", "false"]


@pytest.fixture(scope="module")
def played(tmp_path_factory):
    """A run that is finished, and what is left of it where it was killed in its end, with a checkpoint of round 4."""
    folder = tmp_path_factory.mktemp("damage")
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(runs, "draw_figures", lambda *arguments: [])
        code, said = told("fit", *TINY, "--output", folder / "runs")
        assert code == 0, said
        finished = next((folder / "runs" / "quadratic").iterdir())
        killed = folder / "killed"
        shutil.copytree(finished, killed)
        run = RunDirectory(killed)
        run.summary.unlink()
        for file in run.checkpoints.glob("round-00000006.*"):
            file.unlink()
        yield finished, killed, folder / "copy"


def told(*arguments):
    """Exit code, and what was said on standard error; an exception is said too, with its place."""
    error = io.StringIO()
    with warnings.catch_warnings(), contextlib.redirect_stderr(error), contextlib.redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")
        try:
            code = cli.main([str(word) for word in arguments])
        except Exception:
            return 1, traceback.format_exc()
    return code, error.getvalue()


def lines_of(file, change):
    lines = file.read_bytes().splitlines(keepends=True)
    change(lines)
    file.write_bytes(b"".join(lines))


def delete_row(file, rng):
    lines_of(file, lambda lines: lines and lines.pop(rng.randrange(len(lines))))


def double_row(file, rng):
    lines_of(file, lambda lines: lines and lines.insert(rng.randrange(len(lines)), rng.choice(lines)))


def swap_rows(file, rng):
    def swap(lines):
        i, j = rng.randrange(len(lines)), rng.randrange(len(lines))
        lines[i], lines[j] = lines[j], lines[i]

    lines_of(file, swap)


def alter_digit(file, rng):
    content = bytearray(file.read_bytes())
    digits = [i for i, byte in enumerate(content) if 48 <= byte < 58]
    if digits:
        place = rng.choice(digits)
        content[place] = 48 + (content[place] - 48 + rng.randrange(1, 10)) % 10
    file.write_bytes(content)


def flip_byte(file, rng):
    content = bytearray(file.read_bytes())
    content[rng.randrange(len(content))] ^= rng.randrange(1, 256)
    file.write_bytes(content)


def cut(file, rng):
    content = file.read_bytes()
    file.write_bytes(content[: rng.randrange(len(content))])


def empty(file, rng):
    file.write_bytes(b"")


def delete(file, rng):
    file.unlink()


def become_a_folder(file, rng):
    file.unlink()
    file.mkdir()


DAMAGES = (
    *(delete_row, double_row, swap_rows, alter_digit, flip_byte, flip_byte, cut, cut, empty, delete),
    become_a_folder,
)


def results_of(path):
    run = RunDirectory(path)
    summary = yaml.safe_load(run.summary.read_text())
    return run.metrics.read_bytes(), run.tasks.read_bytes(), {k: v for k, v in summary.items() if k != "seconds"}


def chosen_otherwise(copy, before):
    """Whether the damage is a choice that anybody may make: settings that decide nothing, such as when to evaluate."""
    try:
        now = yaml.safe_load((copy / "config.yaml").read_text())
        return now != before and decisive(now) == decisive(before)
    except (OSError, ValueError, AttributeError, yaml.YAMLError):
        return False


def outcome(played, seed):
    """None where all is well, otherwise what went wrong."""
    finished, killed, copy = played
    rng = random.Random(seed)
    shutil.rmtree(copy, ignore_errors=True)
    source, command = rng.choice([(killed, "resume"), (killed, "resume"), (finished, "validate"), (finished, "resume")])
    shutil.copytree(source, copy)
    files = sorted(path for path in copy.rglob("*") if path.is_file())
    file, damage = rng.choice(files), rng.choice(DAMAGES)
    config = yaml.safe_load((copy / "config.yaml").read_text())
    damage(file, rng)
    free = chosen_otherwise(copy, config)
    code, said = told(command, copy, *(["--rounds", 6] if source is finished and command == "resume" else []))
    what = f"seed {seed}: {command} after {damage.__name__} of {file.name}: exit code {code}: {said[-1500:]}"
    if code == 2 and said.startswith("obbo: ") and said.count("\n") == 1:
        return None
    if code != 0:
        return what
    if command == "resume" and source is killed and not free and results_of(copy) != results_of(finished):
        return what
    return None


@pytest.mark.parametrize("block", range(6))
def test_damage_is_refused_in_one_line_or_changes_nothing(played, block):
    wrong = [found for seed in range(50 * block, 50 * (block + 1)) if (found := outcome(played, seed))]
    assert not wrong, f"{len(wrong)} of 50\n" + "\n".join(wrong)


@pytest.mark.nightly
@pytest.mark.parametrize("block", range(100))
def test_damage_of_every_kind_is_refused_in_one_line_or_changes_nothing(played, block):
    test_damage_is_refused_in_one_line_or_changes_nothing(played, 100 + block)
