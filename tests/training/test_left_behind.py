"""A process that plays many runs, such as a worker of `compare`, keeps nothing of them."""

import gc
import signal

from obbo_lightning import cli
from obbo_lightning.streams.quadratic import QuadraticStream
from obbo_lightning.training.module import OnlineBilevelModule


def alive():
    return {id(one) for one in gc.get_objects() if type(one) in (QuadraticStream, OnlineBilevelModule)}


def test_a_run_leaves_neither_its_data_nor_its_signal_handlers_behind(tmp_path):
    gc.collect()
    others = alive()
    before = {n: signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)}
    flags = ["--config", "quadratic", "--rounds", "3", "--trainer.enable_progress_bar", "false"]
    assert cli.main(["fit", *flags, "--output", str(tmp_path)]) == 0
    assert {n: signal.getsignal(n) for n in before} == before
    gc.collect()
    assert alive() <= others
