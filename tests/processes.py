"""Real processes that start at once: forks of this one, which has imported everything already.

They receive real signals. Threads do not survive a fork: this process must never have computed with several OpenMP
threads, and a fork must not finish a run, which is summarised by polars.
"""

import os
import signal
import sys
import time
import traceback
import warnings
from pathlib import Path

import pytest

from obbo_lightning import cli


def wait_for(happened, seconds=90):
    for _ in range(seconds * 50):
        if happened():
            return
        time.sleep(0.02)
    pytest.fail(f"not after {seconds} seconds")


class Forked:
    """``obbo`` with some arguments in a process of its own, in ``folder``; its output goes to the file ``errors``."""

    def __init__(self, folder, *arguments):
        self.errors = Path(folder) / "errors"
        self.returncode = None
        self.pid = os.fork()
        if self.pid == 0:
            _run(folder, self.errors, arguments)

    def output(self):
        return self.errors.read_text()

    def send_signal(self, signum):
        os.kill(self.pid, signum)

    def poll(self):
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self.returncode = os.waitstatus_to_exitcode(status) if pid else None
        return self.returncode

    def wait(self, seconds=60):
        for _ in range(100 * seconds):
            if self.poll() is not None:
                return self.returncode
            time.sleep(0.01)
        self.send_signal(signal.SIGKILL)
        raise AssertionError(f"it has not ended after {seconds} seconds: {self.output()}")


def _run(folder, errors, arguments):
    code = 1
    try:
        os.setsid()
        os.chdir(folder)
        output = os.open(errors, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(os.open(os.devnull, os.O_RDWR), 0)
        os.dup2(output, 1)
        os.dup2(output, 2)
        sys.stdin, sys.stdout, sys.stderr = (os.fdopen(i, mode) for i, mode in enumerate("rww"))
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        warnings.resetwarnings()  # pytest makes them errors
        code = cli.main(list(arguments))
    except SystemExit as end:
        code = end.code
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
