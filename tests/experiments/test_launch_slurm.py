"""`compare --slurm`: what Slurm is asked for, and what becomes of runs; at the end on a real Slurm."""

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
from processes import wait_for

from obbo_lightning import cli
from obbo_lightning.experiments import launch
from obbo_lightning.experiments.grid import read_grid
from obbo_lightning.experiments.launch import SLURM_JOB, SlurmLauncher, prepare
from obbo_lightning.runs.directory import RunDirectory

CONFIGS = Path(__file__).parents[2] / "configs"
SETTINGS = {"rounds": 20, "checkpoint": {"every": 5}, "evaluation": {"every": 10, "tasks": 5}}
LONG = {**SETTINGS, "rounds": 300, "checkpoint": {"every": 10**6}}
GRID = {"algorithm": ["obbo", "adam"], "seed": [0, 1]}
HEADER = "#!/bin/bash\n#SBATCH --partition=small\n#SBATCH --time=5\n#SBATCH --mem=1G\n"


def write(folder, header=HEADER, settings=SETTINGS, grid=GRID):
    """Return the flags of a comparison on Slurm."""
    content = {"compare": "small", "base": "quadratic", "settings": settings, "grid": grid}
    (folder / "grid.yaml").write_text(yaml.safe_dump(content))
    (folder / "job.sh").write_text(header)
    flags = ["--config", str(folder / "grid.yaml"), "--output", str(folder / "runs")]
    return ["compare", *flags, "--slurm", str(folder / "job.sh")]


def rows(run):
    return run.metrics.read_text().count("\n") if run.metrics.is_file() else 0


class FakeSlurm:
    """Slurm's commands as shell scripts: sbatch copies its script and its options, srun executes, squeue is told."""

    def __init__(self, folder, monkeypatch):
        self.folder = folder
        self.command(
            "sbatch",
            'n=$(ls {0} | grep -c array); for last; do :; done; cp "$last" {0}/array.$n; echo "$@" > {0}/options.$n; '
            "echo '7;cluster'",
        )
        self.command("squeue", "cat {0}/queue")
        self.command("srun", 'shift; exec "$@"')
        self.command("scontrol", 'echo "$@" >> {0}/requeued')
        self.queue()
        monkeypatch.setenv("PATH", str(folder), prepend=os.pathsep)
        monkeypatch.setattr(launch, "LOOK_AT_QUEUE", 0.0)
        monkeypatch.setattr(launch, "LOOK_EVERY", 0.0)

    def command(self, name, text):
        (self.folder / name).write_text("#!/bin/sh\n" + text.format(self.folder) + "\n")
        (self.folder / name).chmod(0o755)

    def queue(self, *jobs):
        (self.folder / "queue").write_text("\n".join(jobs))

    def submitted(self, what):
        return [path.read_text() for path in sorted(self.folder.glob(f"{what}.*"))]


@pytest.fixture
def slurm(tmp_path, monkeypatch):
    (tmp_path / "bin").mkdir()
    return FakeSlurm(tmp_path / "bin", monkeypatch)


def start(folder, jobs=None, **changes):
    """Return a launcher that has submitted all runs, the iterator of its looks, and the runs."""
    write(folder, **changes)
    root = folder / "runs" / "small"
    runs = prepare(read_grid(folder / "grid.yaml").runs, root)
    launcher = SlurmLauncher(folder / "job.sh", root / "slurm", jobs)
    looks = launcher.execute([run for run in runs if not run.finished])
    next(looks)
    return launcher, looks, runs


def test_the_shipped_script_is_one_of_sbatch():
    text = (CONFIGS / "slurm" / "default.sh").read_text()
    assert text.startswith("#!/bin/bash\n")
    asked = ("partition=gpu", "time=04:00:00", "gpus-per-node=1", "mem=16G", "cpus-per-task=4")
    assert all(f"#SBATCH --{option}\n" in text for option in asked)


@pytest.mark.parametrize("file", ["nothing.sh", "grid.yaml"])
def test_a_file_that_is_no_script_is_refused_in_one_line(file, tmp_path, capsys):
    assert cli.main([*write(tmp_path), "--slurm", str(tmp_path / file)]) == 2
    error = capsys.readouterr().err
    assert error.startswith("obbo: --slurm must be a shell script that begins with #!, got ")
    assert error.count("\n") == 1
    assert not (tmp_path / "runs").exists()


def test_a_machine_without_slurm_is_refused_but_for_a_plan(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert cli.main(write(tmp_path)) == 2
    error = capsys.readouterr().err
    assert error == "obbo: --slurm needs a machine with Slurm, got one without sbatch, squeue\n"
    assert cli.main([*write(tmp_path), "--dry_run"]) == 0
    assert "4 of 4 runs to execute, 80 rounds" in capsys.readouterr().out
    assert not (tmp_path / "runs").exists()


def test_one_array_is_submitted_of_the_runs_whose_jobs_are_not_in_the_queue(slurm, tmp_path, capsys):
    _, _, runs = start(tmp_path, jobs=2, header=f"{HEADER}module load cuda\n")
    (script,), (first,) = slurm.submitted("array"), slurm.submitted("options")
    assert script.startswith(f"{HEADER}module load cuda\n")
    assert {"--array=0-3%2", "--signal=USR1@150", "--requeue", "--job-name=obbo-small"} <= set(first.split())
    assert script.count(str(tmp_path / "runs" / "small" / "adam-seed_1")) == 1
    assert [(run.path / SLURM_JOB).read_text() for run in runs] == [f"7_{i}\n" for i in range(4)]
    slurm.queue("7_0", "7_2", "8_1")
    start(tmp_path)
    assert "2 runs submitted, 2 in the queue already: Slurm job 7\n" in capsys.readouterr().out
    assert "--array=0-1 " in slurm.submitted("options")[1]
    slurm.queue("7_0", "7_1", "7_2")
    runs[0].summary.write_text("{}")
    launcher, _, _ = start(tmp_path)
    assert launcher.stop() == "the jobs continue: the same command waits for them, scancel 7 ends them"
    assert len(slurm.submitted("array")) == 2


def test_a_run_has_ended_when_it_is_finished_or_its_job_is_gone(slurm, tmp_path):
    launcher, looks, runs = start(tmp_path)
    slurm.queue("7_0", "7_1", "7_2", "7_3")
    next(looks)
    for run in runs[:3]:
        run.summary.write_text("{}")
    next(looks)
    slurm.queue()
    next(looks)  # its last files may be on their way
    slurm.command("squeue", "exit 1")
    next(looks)  # Slurm does not answer: nothing is known
    slurm.command("squeue", "true")
    assert list(looks) == []
    log = tmp_path / "runs" / "small" / "slurm" / "7_3.out"
    (runs[3].path / "log.txt").write_text("Slurm job 6_3\nof another job\n")
    assert launcher.reason(runs[3]) == f"it printed nothing; Slurm job 7_3: it printed nothing; all of it in {log}"
    (runs[3].path / "log.txt").write_text("of old\nSlurm job 7_3\nhello\nround 3\n")
    log.write_text("slurmstepd: error: Detected 1 oom_kill event\n")
    expected = "round 3; Slurm job 7_3: slurmstepd: error: Detected 1 oom_kill event; all of it in "
    assert launcher.reason(runs[3]).startswith(expected)


def test_refusals_of_slurm_are_one_line(slurm, tmp_path, capsys):
    slurm.command("sbatch", "echo 'sbatch: error: invalid partition specified: small' >&2; echo more >&2; exit 1")
    assert cli.main(write(tmp_path)) == 2
    assert capsys.readouterr().err == "obbo: Slurm refused: sbatch: error: invalid partition specified: small more\n"
    slurm.command("squeue", "exit 1")
    assert cli.main(write(tmp_path)) == 2
    assert "needs an answer of squeue, got none" in capsys.readouterr().err


@pytest.mark.slow
def test_a_job_whose_time_is_up_saves_its_run_and_resumes_when_it_is_queued_again(slurm, tmp_path):
    _, _, (disturbed,) = start(tmp_path, settings=LONG, grid={"seed": [0]})
    (undisturbed,) = prepare(read_grid(tmp_path / "grid.yaml").runs, tmp_path / "undisturbed")
    job = {"SLURM_ARRAY_TASK_ID": "0", "SLURM_ARRAY_JOB_ID": "7", "SLURM_JOB_ID": "12", "SLURM_NTASKS": "4"}
    command, environment = ["bash", str(tmp_path / "bin" / "array.0")], {**os.environ, **job}
    first = subprocess.Popen(command, env=environment)
    wait_for(lambda: rows(disturbed) > 20)
    (child,) = Path(f"/proc/{first.pid}/task/{first.pid}/children").read_text().split()
    os.kill(int(child), signal.SIGUSR1)
    assert first.wait(60) == 128 + signal.SIGUSR1
    assert (tmp_path / "bin" / "requeued").read_text() == "requeue 12\n"
    assert not disturbed.finished
    assert subprocess.run(command, env=environment, timeout=90).returncode == 0
    assert cli.main(["resume", str(undisturbed.path)]) == 0
    log = (disturbed.path / "log.txt").read_text()
    assert log.count("Slurm job 7_0\n") == 2
    assert "stopped by SIGUSR1 after round" in log
    assert disturbed.metrics.read_bytes() == undisturbed.metrics.read_bytes()


PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "squeue", "scontrol", "scancel")


@pytest.fixture(scope="module")
def one_node(tmp_path_factory):
    """Start a real Slurm of one node, all of it in a temporary directory and gone afterwards."""
    missing = [name for name in PROGRAMS if shutil.which(name) is None]
    if missing:
        pytest.skip(f"needs Debian's slurm-wlm and munge: {', '.join(missing)} not found")
    if os.getuid() != 0:
        pytest.skip("slurmd wants root")
    home = tmp_path_factory.mktemp("slurm")
    host = socket.gethostname().partition(".")[0]
    with socket.create_server(("", 0)) as first, socket.create_server(("", 0)) as second:
        controller, node = (one.getsockname()[1] for one in (first, second))
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
            logs = "\n".join(file.read_text()[-2000:] for file in sorted(home.glob("*.out")))
            pytest.fail(f"Slurm did not start: {asked.stdout} {asked.stderr}\n{logs}")
        yield home


@pytest.mark.slow
@pytest.mark.slurm
def test_jobs_of_a_real_slurm_outlive_ctrl_c_and_the_end_of_their_time_and_are_reported(one_node, tmp_path):
    command = [sys.executable, "-m", "obbo_lightning", *write(tmp_path, settings=LONG, grid={"seed": [0, 1]})]
    run = RunDirectory(tmp_path / "runs" / "small" / "obbo-seed_1")
    first = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    wait_for(lambda: rows(run) > 5)
    job = (run.path / SLURM_JOB).read_text().strip()
    subprocess.run(["scancel", "--signal=USR1", job], check=True)  # what Slurm sends before the time is up
    first.send_signal(signal.SIGINT)
    _, error = first.communicate(timeout=60)
    assert first.returncode == 130
    array = job.removesuffix("_1")
    assert error.endswith(f"the jobs continue: the same command waits for them, scancel {array} ends them\n")
    again = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert again.returncode == 0, again.stderr
    assert "2 of 2 runs finished" in again.stdout
    if "runs submitted" in again.stdout:  # on a busy machine the jobs may have ended meanwhile
        assert "0 runs submitted, " in again.stdout
        assert f" in the queue already: Slurm job {array}\n" in again.stdout
    log = (run.path / "log.txt").read_text()
    assert log.count(f"Slurm job {job}\n") == 2
    assert "stopped by SIGUSR1 after round" in log
    assert run.finished
    assert cli.main(["report", str(run.path.parent), "--output", str(tmp_path / "report")]) == 0
    assert "obbo" in (tmp_path / "report" / "table.md").read_text()
