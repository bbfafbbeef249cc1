"""A round of four lanes as a row: medians by hand."""

import numpy as np
import pytest
import torch
from obbo_lightning.training.rows import columns_of, row_of

from obbo_lightning.core.outer_step import OuterUpdate
from obbo_lightning.core.round import Round


def test_a_row_has_medians_over_lanes_and_counts_skipped_ones():
    rng = np.random.default_rng(0)
    vectors = {name: rng.exponential(size=(4, 3)) for name in ("hypergradient", "direction", "generalized")}
    lanes = {name: rng.exponential(size=4) for name in ("loss", "inner_loss", "residual", "mse", "euclidean", "error")}
    as_tensors = {name: torch.from_numpy(values) for name, values in (vectors | lanes).items()}
    step = OuterUpdate(
        as_tensors["hypergradient"],
        as_tensors["direction"],
        as_tensors["generalized"],
        {"euclidean": as_tensors["euclidean"], "generalized": None, "exact": None, "geometry": None},
        as_tensors["error"],
        torch.tensor([True, False, True, True]),
        torch.zeros(4, 3),
        {},
    )
    played = Round(
        *(as_tensors[name] for name in ("loss", "inner_loss", "residual")),
        {"mse": as_tensors["mse"]},
        {"gradients": 9, "products": 4},
        step,
        [],
        [],
    )
    expected = {name: np.median(lanes[name]) for name in ("loss", "inner_loss", "residual", "mse")}
    expected |= {"regret/euclidean": np.median(lanes["euclidean"])}
    expected |= {f"{name}_norm": np.median(np.linalg.norm(v, axis=1)) for name, v in vectors.items()}
    expected |= {"hypergradient_error": np.median(lanes["error"])}
    expected |= {"gradients": 9, "products": 4, "window_fill": 6, "skipped": 3}
    found = row_of(played, 6)
    absent = {name for name, value in found.items() if value is None}
    assert absent == {"regret/generalized", "regret/exact", "regret/geometry"}
    assert {name: value for name, value in found.items() if value is not None} == pytest.approx(expected, rel=1e-12)
    missing = {"round", "test_mse", "test_mse_se", *absent}  # the module and the recorder know the first three
    assert set(columns_of("mse")) == set(expected) | missing
    assert columns_of("loss").count("loss") == 1
