"""The Docker images without a Docker engine: linted, checked for consistency, and built in a folder (nightly)."""

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import yaml
from docker.utils.build import exclude_paths  # Docker's own reading of .dockerignore

from obbo_lightning import __version__

ROOT = Path(__file__).parents[2]
DOCKERFILE = ROOT / "docker" / "Dockerfile"
COMPOSE = yaml.safe_load((ROOT / "docker" / "compose.yaml").read_text())
HADOLINT = Path(sys.executable).with_name("hadolint")


def read_stages():
    """Return the base image and the instructions of every stage, in order."""
    text = re.sub(r"^\s*#.*\n", "", DOCKERFILE.read_text(), flags=re.MULTILINE).replace("\\\n", " ")
    stages = {}
    for line in filter(None, text.splitlines()):
        instruction, arguments = line.split(maxsplit=1)
        if instruction == "FROM":
            base, _, name = arguments.split()
            stages[name] = (base, [])
        else:
            stages[name][1].append((instruction, arguments))
    return stages


STAGES = read_stages()


def arguments_of(stage, wanted):
    return [arguments.split() for instruction, arguments in STAGES[stage][1] if instruction == wanted]


def covers(source, path):
    return path == source or path.startswith(f"{source}/")


def files_sent(directory):
    """Return the files that Docker would send of a directory, without those that it always sends."""
    patterns = [line for line in (ROOT / ".dockerignore").read_text().splitlines() if line and line[0] != "#"]
    sent = exclude_paths(str(directory), patterns, "docker/Dockerfile") - {"docker/Dockerfile", ".dockerignore"}
    return {path for path in sent if (directory / path).is_file()}


def test_hadolint_finds_nothing(tmp_path):
    # In another directory and without pragmas, so that no local file switches rules off.
    options = {"cwd": tmp_path, "capture_output": True, "text": True}
    command = [HADOLINT, "--disable-ignore-pragma", "-"]
    result = subprocess.run(command, input=DOCKERFILE.read_text(), **options)
    assert (result.returncode, result.stdout) == (0, "")
    assert "DL3006" in subprocess.run(command, input="FROM python\n", **options).stdout  # it would have


def test_base_images_are_of_one_python_version():
    bases = [base for base, _ in STAGES.values() if base not in STAGES]
    versions = {re.fullmatch(r"python:(\d+\.\d+\.\d+)(-slim)?-bookworm", base)[1] for base in bases}
    assert len(versions) == 1  # the virtual environment is copied from one to the other
    for path in [*(ROOT / "docker").iterdir(), ROOT / ".dockerignore", ROOT / "docs" / "containers.md"]:
        assert "://" not in path.read_text(), path  # no registry


def test_image_runs_fit_as_a_user_that_is_not_root():
    instructions = STAGES["cpu"][1]
    assert instructions[-2:] == [("ENTRYPOINT", '["python", "-m", "obbo_lightning"]'), ("CMD", '["fit"]')]
    names = [instruction for instruction, _ in instructions]
    user = dict(instructions)["USER"]
    assert re.fullmatch(r"[1-9]\d*:[1-9]\d*", user)
    assert "RUN" not in names[names.index("USER") :]
    assert f"useradd --uid {user.split(':')[0]} " in dict(reversed(instructions))["RUN"]
    base, added = STAGES["cuda"]
    assert (base, [instruction for instruction, _ in added]) == ("cpu", ["ENV"])


def test_docker_is_sent_exactly_the_files_that_are_copied(tmp_path):
    copies = [words for stage in STAGES for words in arguments_of(stage, "COPY") if not words[0].startswith("--from")]
    sources, sent = {source for words in copies for source in words[:-1]}, files_sent(ROOT)
    assert {source for source in sources if not any(covers(source, path) for path in sent)} == set()
    assert {path for path in sent if not any(covers(source, path) for source in sources)} == set()
    left_out = [".git/HEAD", "runs/a/metrics.csv", "data/cifar100.npz", "tests/test_a.py", "docs/a.md"]
    left_out += ["obbo_lightning/core/__pycache__/a.pyc", ".pytest_cache/a", ".mypy_cache/a", ".venv/bin/a"]
    wanted = ["obbo_lightning/core/a.py", "configs/compare/a.yaml", "pyproject.toml"]
    for path in [*left_out, *wanted]:
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).touch()
    assert files_sent(tmp_path) == set(wanted)


@pytest.mark.parametrize(("service", "target"), [("cpu", "cpu"), ("gpu", "cuda")])
def test_compose_builds_and_runs_what_the_dockerfile_declares(service, target):
    config = COMPOSE["services"][service]
    build = config["build"]
    assert (ROOT / "docker" / build["context"]).resolve() == ROOT
    assert ROOT / build["dockerfile"] == DOCKERFILE
    assert build["target"] == target in STAGES
    assert set(build["args"]) == {words[0].split("=")[0] for words in arguments_of("dependencies", "ARG")}
    mounted = dict(volume.rsplit(":", 1)[::-1] for volume in config["volumes"])
    assert list(mounted) == json.loads(dict(STAGES["cpu"][1])["VOLUME"])
    assert {re.search(":-(.*)}", source)[1] for source in mounted.values()} == set(COMPOSE["volumes"])
    assert "OBBO_DATA=/data" in dict(STAGES["cpu"][1])["ENV"].split()
    assert ("deploy" in config) == (service == "gpu")


def test_install_refuses_an_unknown_step_in_one_line():
    result = subprocess.run([ROOT / "docker" / "install", "all"], capture_output=True, text=True)
    assert result.returncode == 2
    assert result.stderr == "docker/install: command must be one of dependencies, wheel, got 'all'\n"


@pytest.mark.slow  # -m "not slow" must leave it out too
@pytest.mark.nightly
def test_commands_of_the_image_install_a_package_that_runs():
    """Run COPY and RUN of every stage in order, with the image's paths below one directory: minutes, and gigabytes."""
    with tempfile.TemporaryDirectory() as name:
        root = Path(name).resolve()
        source, work = root / "source", root / "work"
        work.mkdir()
        environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
        environment["PATH"] = f"{root}/opt/venv/bin:{Path(sys.executable).parent}:{os.environ['PATH']}"
        environment |= {"LEARN2LEARN": "1", "OMP_NUM_THREADS": "1"}

        def run(*command, directory=work):
            print("+", *command, flush=True)
            return subprocess.run(
                command, cwd=directory, env=environment, check=True, stdout=subprocess.PIPE, text=True
            )

        def build(instruction, arguments, directory):
            if instruction == "COPY" and directory == source:
                for path in files_sent(ROOT):
                    if any(covers(copy, path) for copy in arguments.split()[:-1]):
                        (source / path).parent.mkdir(parents=True, exist_ok=True)
                        shutil.copy(ROOT / path, source / path)
            if instruction == "RUN" and "useradd" not in arguments:  # it would be a user of this machine
                command = re.sub(r"^--mount=\S+ ", "", arguments).replace("/opt/", f"{root}/opt/")
                print(run("sh", "-c", command, directory=directory).stdout)

        for stage, directory in {"dependencies": source, "package": source, "cpu": work}.items():
            for instruction, arguments in STAGES[stage][1]:
                build(instruction, arguments, directory)

        entry_point = json.loads(dict(STAGES["cpu"][1])["ENTRYPOINT"])
        assert run(*entry_point, "--version").stdout.strip() == __version__
        origin = run("python", "-c", "import obbo_lightning; print(obbo_lightning.__file__)").stdout
        assert origin.startswith(f"{root}/opt/venv/lib")  # not the source
        tiny = ["--rounds", "2", "--problem.network.filters", "2", "--data.image_size", "16", "--evaluation.tasks", "2"]
        run(*entry_point, "fit", *tiny)
        run(*entry_point, "fit", "--algorithm", "maml", *tiny)
        assert len(list(work.glob("runs/default/*/summary.json"))) == 2
