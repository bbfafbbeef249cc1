"""Real processes that are there at once: forks of this one, which has imported everything already.

They get real signals and die real deaths. This process must never have computed with several threads: those of OpenMP
do not survive a fork.
"""

import os
import signal
import sys
import traceback
import warnings
from pathlib import Path

from obbo_lightning import cli


class Forked:
    """``obbo`` with these arguments in a process of its own, in ``folder``; what it says goes to ``errors`` there."""

    def __init__(self, folder, *arguments):
        self.errors = Path(folder) / "errors"
        self.returncode = None
        self.pid = os.fork()
        if self.pid == 0:
            _become(folder, self.errors, arguments)

    def said(self):
        return self.errors.read_text()

    def send_signal(self, signum):
        os.kill(self.pid, signum)

    def poll(self):
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self.returncode = os.waitstatus_to_exitcode(status) if pid else None
        return self.returncode

    def wait(self):
        if self.returncode is None:
            self.returncode = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        return self.returncode


def _become(folder, errors, arguments):
    code = 1
    try:
        os.setsid()
        os.chdir(folder)
        said = os.open(errors, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(os.open(os.devnull, os.O_RDWR), 0)
        os.dup2(said, 1)
        os.dup2(said, 2)
        sys.stdin, sys.stdout, sys.stderr = (os.fdopen(i, mode) for i, mode in enumerate("rww"))
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        warnings.resetwarnings()  # pytest makes errors of them
        code = cli.main(list(arguments))
    except SystemExit as end:
        code = end.code
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
