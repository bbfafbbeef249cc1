"""`compare --launcher slurm`: what is asked of Slurm, and what becomes of cells; at the end on a real one."""

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from obbo_lightning import cli
from obbo_lightning.experiments import slurm, slurm_request
from obbo_lightning.experiments.compare import prepare
from obbo_lightning.experiments.grid import read_grid
from obbo_lightning.runs.directory import RunDirectory

CONFIGS = Path(__file__).parents[2] / "configs"
GRID = {
    "compare": "small",
    "base": str(CONFIGS / "quadratic.yaml"),
    "settings": {"rounds": 20, "checkpoint": {"every": 5}, "evaluation": {"every": 10, "tasks": 5}},
    "grid": {"algorithm": ["obbo", "adam"], "seed": [0, 1]},
}
REQUEST = "partition: small\ntime: 5\nmemory: 1G\n"


LONG = {**GRID["settings"], "rounds": 200, "checkpoint": {"every": 10**6}}


def write(folder, request=REQUEST, **changes):
    """The flags of a comparison on Slurm."""
    (folder / "grid.yaml").write_text(yaml.safe_dump({**GRID, **changes}))
    (folder / "slurm.yaml").write_text(request)
    flags = ["--config", str(folder / "grid.yaml"), "--output", str(folder / "runs")]
    return [*flags, "--launcher", "slurm", "--slurm", str(folder / "slurm.yaml")]


def test_the_file_that_we_ship_asks_for_what_it_says():
    assert slurm_request.read_request(CONFIGS / "slurm" / "default.yaml") == {
        "partition": "gpu",
        "time": 240,
        "gpus_per_node": 1,
        "mem": "16G",
        "cpus_per_task": 4,
    }


@pytest.mark.parametrize(
    ("text", "minutes"),
    [("90", 90), ("1:30:00", 90), ("12:00:00", 720), ("0:06:30", 7), ("2-00:00:01", 2881), ("'04:00:00'", 240)],
)
def test_time_is_minutes_or_a_clock(text, minutes, tmp_path):
    (tmp_path / "slurm.yaml").write_text(f"time: {text}\n")
    assert slurm_request.read_request(tmp_path / "slurm.yaml")["time"] == minutes


@pytest.mark.parametrize(
    ("request_text", "message"),
    [
        (
            "time: 5\npartion: gpu\n",
            "takes partition, time, gpus, memory, cpus, account, qos,",
        ),
        (
            "partition: gpu\n",
            "must have time: minutes, or [days-]hours:minutes:seconds, of at least 5 minutes",
        ),
        ("time: 0\n", "time must be minutes, or [days-]hours:minutes:seconds, of at least 5 minutes, got '0'"),
        ("time: 10:30\n", "got '10:30'"),
        ("time: 00:04:00\n", "got '00:04:00'"),
        ("time: 5\ngpus: 2\n", "gpus must be 0 or 1, because a cell is one process, got '2'"),
        ("time: 5\nmemory: 16\n", "memory must be a whole number with K, M, G or T, such as 16G, got '16'"),
        ("time: 5\ncpus: 0\n", "cpus must be an integer of at least 1, got '0'"),
        ("time: 5\narray_parallelism: many\n", "array_parallelism must be an integer of at least 1, got 'many'"),
        ("time: 5\npartition: [a, b]\n", "partition must be a name, got ['a', 'b']"),
        ("time: 5\naccount: 'a b'\n", "account must be a name, got 'a b'"),
        ("time: 5\nsetup: {a: b}\n", "setup must be lines of shell, got {'a': 'b'}"),
        ("- time\n", "must have keys and values, got ['time']"),
        ("time: [5\n", "is not valid YAML"),
    ],
)
def test_mistakes_in_the_file_are_one_line(request_text, message, tmp_path, capsys):
    assert cli.main(["compare", *write(tmp_path, request_text)]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--launcher", "pbs"], "--launcher must be one of local, slurm, got 'pbs'"),
        (["--launcher", "slurm"], "--launcher slurm needs --slurm FILE"),
        (["--launcher", "slurm", "--slurm", "nothing.yaml"], "--slurm file nothing.yaml cannot be read: No such file"),
        (["--launcher", "slurm", "--slurm", "a.yaml", "--jobs", "2"], "--jobs is for --launcher local"),
        (["--slurm", "a.yaml"], "--slurm needs --launcher slurm, got --slurm a.yaml"),
    ],
)
def test_mistakes_in_the_flags_are_one_line(flags, message, tmp_path, capsys):
    write(tmp_path)
    assert cli.main(["compare", "--config", str(tmp_path / "grid.yaml"), *flags]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


def test_without_submitit_one_line_says_how_to_get_it(tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "submitit", None)
    assert cli.main(["compare", *write(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert error == (
        "obbo: --launcher slurm needs submitit, which is not installed: pip install 'obbo_lightning[slurm]'\n"
    )


def test_without_slurm_one_line_says_so(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert cli.main(["compare", *write(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert "--launcher slurm needs a machine with Slurm's sbatch, srun, squeue, scontrol" in error
    assert error.count("\n") == 1
    assert not (tmp_path / "runs").exists()


def test_a_plan_needs_no_slurm(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert cli.main(["compare", *write(tmp_path), "--dry_run"]) == 0
    output = capsys.readouterr().out
    assert "adam-seed_1: 20 rounds" in output
    assert (
        "4 of 4 cells to play, 80 rounds as Slurm jobs with cpus_per_task: 1, partition: small, time: 5, mem: 1G"
        in output
    )
    assert not (tmp_path / "runs").exists()


class Paper:
    """Slurm's commands as shell scripts: sbatch keeps what it is given, squeue says what it is told."""

    def __init__(self, folder, monkeypatch):
        self.folder = folder
        self.command("sbatch", 'cp "$1" {0}/script.$(ls {0} | grep -c script); echo "Submitted batch job 7"')
        self.command("squeue", "cat {0}/queue")
        self.command("srun", "exit 1")
        self.command("scontrol", "exit 1")
        self.queue("")
        monkeypatch.setenv("PATH", str(folder), prepend=os.pathsep)
        monkeypatch.setattr(slurm, "LOOK_AT_QUEUE", 0.0)

    def command(self, name, text):
        (self.folder / name).write_text("#!/bin/sh\n" + text.format(self.folder) + "\n")
        (self.folder / name).chmod(0o755)

    def queue(self, text):
        (self.folder / "queue").write_text(text)

    @property
    def scripts(self):
        return [path.read_text() for path in sorted(self.folder.glob("script.*"))]


@pytest.fixture
def paper(tmp_path, monkeypatch):
    (tmp_path / "bin").mkdir()
    return Paper(tmp_path / "bin", monkeypatch)


def launched(folder, request=REQUEST):
    """A launcher that has taken all cells on, and their directories."""
    write(folder, request)
    grid = read_grid(folder / "grid.yaml")
    runs = prepare(grid, folder / "runs" / "small")
    launcher = slurm.SlurmLauncher(
        slurm_request.read_request(folder / "slurm.yaml"), folder / "runs" / "small" / "slurm", "small"
    )
    launcher.start(grid.cells, runs)
    return launcher, runs


def test_sbatch_is_asked_for_one_array_with_what_the_file_says(paper, tmp_path):
    launched(
        tmp_path,
        "partition: gpu\ntime: 1:30:00\ngpus: 1\nmemory: 16G\ncpus: 4\naccount: us\nqos: low\n"
        "array_parallelism: 2\nsetup: [module load cuda]\n",
    )
    (script,) = paper.scripts
    asked = "partition=gpu time=90 gpus-per-node=1 mem=16G cpus-per-task=4 account=us qos=low array=0-3%2"
    for option in [*asked.split(), "job-name=obbo-small", "signal=USR2@90"]:
        assert f"#SBATCH --{option}\n" in script
    assert "\nexport OMP_NUM_THREADS=4 MKL_NUM_THREADS=4 GOMP_SPINCOUNT=${GOMP_SPINCOUNT:-80000} " in script
    assert "\nmodule load cuda\n" in script
    assert "--cpus-per-task=4 " in script.partition("\nsrun ")[2]


def test_a_cell_is_not_submitted_while_its_job_is_in_the_queue(paper, tmp_path, capsys):
    _, runs = launched(tmp_path)
    assert [(run.path / slurm.JOB).read_text() for run in runs] == [f"7_{i}\n" for i in range(4)]
    paper.queue("7_0\n7_2\n8_1\n")
    launched(tmp_path)
    assert "2 cells submitted, 2 in the queue already: Slurm job 7\n" in capsys.readouterr().out
    assert ["--array=0-3%4" in paper.scripts[0], "--array=0-1%2" in paper.scripts[1]] == [True, True]
    paper.queue("7_0\n7_1\n7_2\n")
    runs[0].write_summary({})
    launcher, _ = launched(tmp_path)
    assert launcher.stop() == "the jobs go on: the same command waits for them, scancel 7 ends them"
    assert len(paper.scripts) == 2


def test_a_cell_is_over_when_it_is_finished_or_its_job_is_gone_from_the_queue(paper, tmp_path):
    launcher, runs = launched(tmp_path)
    paper.queue("7_0\n7_1\n7_2\n7_3\n")
    assert launcher.busy()
    for run in runs[:3]:
        run.write_summary({})
    assert launcher.busy()
    paper.queue("")
    assert launcher.busy()  # its last files may be on their way
    paper.command("squeue", "exit 1")
    assert launcher.busy()  # Slurm is away: nobody knows
    paper.command("squeue", "true")
    assert not launcher.busy()
    log = tmp_path / "runs" / "small" / "slurm" / "7_3_0_log.out"
    (runs[3].path / "log.txt").write_text("Slurm job 6_3\nof another job\n")
    assert launcher.last_words(runs[3]) == f"it said nothing; Slurm job 7_3: it said nothing; all of it in {log}"
    (runs[3].path / "log.txt").write_text("of old\nSlurm job 7_3\nhello\nround 3\n")
    log.write_text("submitit INFO\nslurmstepd: error: Detected 1 oom_kill event\n")
    said = launcher.last_words(runs[3])
    assert said.startswith("round 3; Slurm job 7_3: slurmstepd: error: Detected 1 oom_kill event; all of it in ")


def test_what_slurm_refuses_is_one_line(paper, tmp_path, capsys):
    paper.command("sbatch", "echo 'sbatch: error: invalid partition specified: small' >&2; echo more >&2; exit 1")
    assert cli.main(["compare", *write(tmp_path)]) == 2
    assert capsys.readouterr().err == "obbo: Slurm refused: sbatch: error: invalid partition specified: small more\n"
    paper.command("squeue", "exit 1")
    assert cli.main(["compare", *write(tmp_path)]) == 2
    assert "needs an answer of squeue, got none" in capsys.readouterr().err


def wait_for(happened, seconds=90):
    for _ in range(seconds * 10):
        if happened():
            return
        time.sleep(0.1)
    pytest.fail(f"not after {seconds} seconds")


def rows(run):
    return run.metrics.read_text().count("\n") if run.metrics.is_file() else 0


@pytest.mark.slow
def test_a_job_whose_time_is_up_saves_its_cell_and_goes_on_when_it_is_queued_again(tmp_path):
    from submitit import LocalExecutor

    write(tmp_path, settings=LONG, grid={"seed": [0]})
    grid = read_grid(tmp_path / "grid.yaml")
    disturbed, undisturbed = (prepare(grid, tmp_path / name)[0] for name in ("disturbed", "undisturbed"))
    executor = LocalExecutor(tmp_path / "submitit")
    executor.update_parameters(timeout_min=5)
    job = executor.submit(slurm.PlayCell(disturbed.path))
    wait_for(lambda: rows(disturbed) > 20)
    children = Path(f"/proc/{job.job_id}/task/{job.job_id}/children").read_text().split()
    os.kill(int(children[0]), signal.SIGUSR2)
    assert cli.main(["resume", str(undisturbed.path)]) == 0
    job.wait()
    said = (disturbed.path / "log.txt").read_text()
    assert said.count(f"Slurm job {job.job_id}\n") == 2
    assert "stopped by SIGTERM after round" in said
    assert disturbed.metrics.read_bytes() == undisturbed.metrics.read_bytes()


PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "squeue", "scontrol", "scancel")


def free_ports(number):
    with contextlib.ExitStack() as sockets:
        bound = [sockets.enter_context(socket.socket()) for _ in range(number)]
        for one in bound:
            one.bind(("", 0))
        return [one.getsockname()[1] for one in bound]


@pytest.fixture(scope="module")
def one_node(tmp_path_factory):
    """A real Slurm of one node, all of it in a temporary directory and gone afterwards."""
    missing = [name for name in PROGRAMS if shutil.which(name) is None]
    if missing:
        pytest.skip(f"needs Debian's slurm-wlm and munge: {', '.join(missing)} not found")
    if os.getuid() != 0:
        pytest.skip("slurmd wants root")
    home = tmp_path_factory.mktemp("slurm")
    host = socket.gethostname().partition(".")[0]
    controller, node = free_ports(2)
    (home / "munge.key").write_bytes(os.urandom(128))
    (home / "munge.key").chmod(0o400)
    (home / "slurm.conf").write_text(f"""
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={controller}
SlurmdPort={node}
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={home}/munge.socket,cred_expire=5
CredType=cred/munge
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
ReturnToService=2
SchedulerParameters=bf_interval=5
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU_Memory
SlurmdParameters=config_overrides
StateSaveLocation={home}/state
SlurmdSpoolDir={home}/spool
SlurmctldPidFile={home}/slurmctld.pid
SlurmdPidFile={home}/slurmd.pid
NodeName={host} NodeAddr=127.0.0.1 CPUs=2 RealMemory=4000 State=UNKNOWN
PartitionName=small Nodes=ALL Default=YES State=UP
""")
    files = {"socket": "socket", "key-file": "key", "pid-file": "pid", "log-file": "log", "seed-file": "seed"}
    munged = ["munged", "--foreground", "--force", *(f"--{k}={home}/munge.{v}" for k, v in files.items())]
    with pytest.MonkeyPatch.context() as patch, contextlib.ExitStack() as stack:
        patch.setenv("SLURM_CONF", str(home / "slurm.conf"))
        for command in (munged, ["slurmctld", "-D", "-c"], ["slurmd", "-D", "-N", host]):
            log = stack.enter_context((home / f"{command[0]}.out").open("w"))
            daemon = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)
            stack.callback(daemon.wait)
            stack.callback(daemon.terminate)
            time.sleep(1)
        for _ in range(60):
            asked = subprocess.run(["sinfo", "--noheader", "--format=%T"], capture_output=True, text=True)
            if asked.stdout.strip() == "idle":
                break
            time.sleep(0.5)
        else:
            said = "\n".join(file.read_text()[-2000:] for file in sorted(home.glob("*.out")))
            pytest.fail(f"Slurm did not start: {asked.stdout} {asked.stderr}\n{said}")
        yield home


@pytest.mark.slow
@pytest.mark.slurm
def test_a_real_slurm_plays_a_grid_and_report_reads_it(one_node, tmp_path, capsys):
    assert cli.main(["compare", *write(tmp_path)]) == 0
    root = tmp_path / "runs" / "small"
    assert len(list(root.glob("*/summary.json"))) == 4
    assert "4 of 4 cells finished" in capsys.readouterr().out
    assert cli.main(["report", str(root), "--output", str(tmp_path / "report")]) == 0
    assert "obbo" in (tmp_path / "report" / "table.md").read_text()


@pytest.mark.slow
@pytest.mark.slurm
def test_jobs_outlive_ctrl_c_and_the_end_of_their_time_and_the_same_command_waits_for_them(one_node, tmp_path):
    command = [
        sys.executable,
        "-m",
        "obbo_lightning",
        "compare",
        *write(tmp_path, settings=LONG, grid={"seed": [0, 1]}),
    ]
    run = RunDirectory(tmp_path / "runs" / "small" / "obbo-seed_1")
    first = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    wait_for(lambda: rows(run) > 5)
    job = (run.path / slurm.JOB).read_text().strip()
    subprocess.run(["scancel", "--signal=USR2", job], check=True)  # what Slurm sends before the time is up
    first.send_signal(signal.SIGINT)
    _, error = first.communicate(timeout=60)
    assert first.returncode == 130
    array = job.removesuffix("_1")
    assert error.endswith(f"the jobs go on: the same command waits for them, scancel {array} ends them\n")
    again = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert again.returncode == 0
    if "cells submitted" in again.stdout:  # on a busy machine the jobs may have ended meanwhile
        assert "0 cells submitted, " in again.stdout
        assert f" in the queue already: Slurm job {array}\n" in again.stdout
    said = (run.path / "log.txt").read_text()
    assert said.count(f"Slurm job {job}\n") == 2
    assert "stopped by SIGTERM after round" in said
    assert run.finished
