"""Defaults of components: the numbers of the papers, in one table."""

import inspect

import pytest

from obbo_lightning.config.registry import find_component
from obbo_lightning.streams.few_shot import fc100
from obbo_lightning.streams.few_shot.learn2learn import LearnToLearnStream
from obbo_lightning.streams.few_shot.stream import FewShotStream
from obbo_lightning.streams.quadratic import QuadraticTasks

FEW_SHOT = {"ways": 5, "shots": 5, "queries": 5, "order": "iid", "period": 1000, "seed": 0}
OWN = {"ratios": (0.6, 0.2, 0.2), "train_classes": None, "validation_classes": None, "test_classes": None}
STEP = {"lr": None, "clip": None, "scale": 0.08, "groups": None}
DEFAULTS = {
    ("algorithm", "obbo"): {**STEP, "window": 10},
    ("algorithm", "sobbo"): {**STEP, "window": 10},
    ("algorithm", "sobow"): {**STEP, "window": 10, "discount": 0.9},
    ("algorithm", "oagd"): {**STEP, "window": 10},
    ("algorithm", "adam"): STEP,
    ("algorithm", "sgdm"): STEP,
    ("algorithm", "maml"): {"lr": 0.001, "clip": None},
    ("algorithm", "anil"): {"lr": 0.001, "clip": None},
    ("inner", "gradient_descent"): {
        "steps": 20, "lr": 0.1, "start": "previous", "batch_size": None, "precision": "full",
    },
    ("inner", "sgd"): {"steps": 20, "lr": 0.1, "momentum": 0.9, "batch_size": None},
    ("inner", "adam"): {"steps": 20, "lr": 0.001, "beta1": 0.9, "beta2": 0.999, "epsilon": 1e-8, "batch_size": None},
    ("hypergradient", "fixed_point"): {"steps": 5, "lr": None},
    ("hypergradient", "conjugate_gradient"): {"steps": 5, "tol": 1e-10, "warm_start": False},
    ("hypergradient", "stochastic_neumann"): {"max_terms": 10, "smoothness": None, "batch_size": 1},
    ("geometry", "adaptive_diagonal"): {"decay": 0.9, "rho": 1e-8},
    ("data", "synthetic"): {**FEW_SHOT, "image_size": 32, "channels": 3, "noise": 0.8},
    ("data", "fc100"): {**FEW_SHOT, "root": None},
    ("data", "images"): {**FEW_SHOT, **OWN, "image_size": None},
    ("data", "examples"): {**FEW_SHOT, **OWN, "label": "label"},
    ("data", "market"): {
        "prices": None, "events": "auto", "subset": 700, "subsets": 600, "horizon": 120, "validation": "stride",
        "stride": 5, "offset": 2, "transform": "log", "start": 0.1, "on_bad_event": "raise", "threshold": 8.0,
        "lookback": 500, "gap": 130, "beyond": 0, "seed": 0,
    },
    ("data", "quadratic"): {
        "condition_number": 10.0, "outer_dim": 4, "inner_dim": 8, "drift": 1.0, "noise": 0.0, "radius": 10.0, "seed": 0,
    },
    ("data", "follow"): {"timeout": None},
    ("data", "sources"): {
        "path": None, "label": "labels", "sources": 10, "wrong": 6, "errors": "shifted", "change": "abrupt",
        "period": 100, "examples": 20, "validation": 100, "test": 200, "seed": 0,
    },
    ("problem", "few_shot"): {"proximity": 0.5, "learn_proximity": False},
    ("problem", "quadratic"): {"ridge": 0.1, "noise": 0.0},
    ("network", "cnn4"): {"ways": 5, "filters": 64, "channels": 3, "image_size": 32, "norm": "batch"},
    ("network", "mlp"): {"ways": 5, "shape": (3, 32, 32), "widths": [64, 64], "norm": "none"},
    ("network", "resnet12"): {"ways": 5, "width": 64, "channels": 3, "image_size": 32, "norm": "batch"},
}  # fmt: skip


def defaults_of(cls, names):
    parameters = inspect.signature(cls).parameters
    return {name: parameters[name].default for name in names}


@pytest.mark.parametrize("name", DEFAULTS, ids="-".join)
def test_component_has_its_defaults(name):
    assert defaults_of(find_component(*name), DEFAULTS[name]) == DEFAULTS[name]


def test_fc100_has_the_classes_of_the_paper():
    assert fc100.SCALER.mean == (0.507, 0.487, 0.441)
    assert fc100.SCALER.deviation == (0.267, 0.256, 0.276)
    assert {split: sorted(kinds) for split, kinds in fc100.SUPERCLASSES.items()} == {
        "train": [1, 2, 3, 4, 5, 6, 9, 10, 15, 17, 18, 19], "validation": [8, 11, 13, 16], "test": [0, 7, 12, 14],
    }  # fmt: skip


def test_streams_have_their_lengths():
    assert FewShotStream.LENGTHS == {"train": 20_000, "validation": 600, "test": 600}
    assert defaults_of(LearnToLearnStream, ["lengths", "seed"]) == {"lengths": (20_000, 600, 600), "seed": 0}
    usual = {"rounds": 300, "lanes": 1, "drift": 1.0, "noise": 0.0, "radius": 10.0, "seed": 0}
    assert defaults_of(QuadraticTasks, usual) == usual
    stream = find_component("data", "quadratic")()
    assert [len(tasks) for tasks in (stream.train, stream.validation, stream.test)] == [1_000_000, 600, 600]
