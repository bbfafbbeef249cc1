"""A complete configuration becomes components."""

import pytest
from small_runs import config_of

from obbo_lightning import OBBO
from obbo_lightning.config.build import _construct, build_algorithm, build_problem, build_stream


def test_components_are_constructed_with_their_arguments_and_the_seed_of_the_run():
    words = ["--algorithm.lr", "0.3", "--algorithm.window", "4", "--algorithm.inner.steps", "9", "--seed", "8"]
    config = config_of(*words, "--data.ways", "3", "--problem.network.filters", "2")
    algorithm, stream = build_algorithm(config), build_stream(config)
    assert (algorithm.inner.steps, algorithm.lr, algorithm.window, stream.train.seed) == (9, 0.3, 4, (8, "train"))
    network = build_problem(config, stream).network.template
    assert (network.linear.out_features, network.blocks[0][0].out_channels) == (3, 2)
    assert build_algorithm({**config, "algorithm": {"name": "obbo", "geometry": None}}).geometry is None
    with pytest.raises(ValueError, match="algorithm must be one of"):
        build_algorithm({**config, "algorithm": {"name": "none"}})


class Own:
    """An own component."""

    def __init__(self, depth: int = 1) -> None: ...


@pytest.mark.parametrize(
    ("path", "cls", "error", "message"),
    [
        ("algorithm.inner", OBBO, ValueError("inner.steps must be 1"), "algorithm.inner.steps must be 1"),
        ("algorithm", OBBO, ValueError("window must be 1"), "algorithm.window must be 1"),
        ("algorithm", OBBO, ValueError("algorithm.lr must be 1"), "algorithm.lr must be 1"),
        ("algorithm", OBBO, ValueError("algorithm must be 1"), "algorithm must be 1"),
        ("data", OBBO, ValueError("a.csv is damaged"), "a.csv is damaged"),
        ("data", Own, ValueError("depth must be 1"), "data.depth must be 1"),
        ("data", Own, ValueError("a.csv is damaged"), "data Own: a.csv is damaged"),
        ("data", Own, KeyError("x"), "data Own cannot be constructed: KeyError: 'x'"),
        ("data", OBBO, KeyError("x"), "'x'"),  # a defect of ours is not disguised
    ],
)
def test_error_names_the_configuration_key(path, cls, error, message):
    def fail():
        raise error

    with pytest.raises((ValueError, KeyError)) as refusal:
        _construct(path, cls, fail)
    assert str(refusal.value) == message
