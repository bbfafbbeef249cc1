"""Validation of values: what is accepted, and messages with the key, the rule and the value."""

import math
import re

import pytest

from obbo_lightning.core import validation
from obbo_lightning.core.validation import at_least, decay, fraction, instance_of, nonnegative, number, one_of, positive


@pytest.mark.parametrize(
    ("validate", "value", "rule"),
    [
        (positive, 0, "must be a positive finite number, got 0"),
        (positive, math.inf, "must be a positive finite number, got inf"),
        (positive, math.nan, "must be a positive finite number, got nan"),
        (nonnegative, -1, "must be zero or a positive finite number, got -1"),
        (nonnegative, math.inf, "must be zero or a positive finite number, got inf"),
        (fraction, 0, "must lie in (0, 1], got 0"),
        (fraction, 1.5, "must lie in (0, 1], got 1.5"),
        (decay, 1, "must lie in [0, 1), got 1"),
        (decay, -0.1, "must lie in [0, 1), got -0.1"),
        (number, True, "must be a number, got True"),
        (number, "0.1", "must be a number, got '0.1'"),
        (number, 10**400, "must be a finite number, got one beyond the largest float"),
        (lambda name, value: at_least(name, value, 2), 1, "must be an integer of at least 2, got 1"),
        (lambda name, value: at_least(name, value, 0), True, "must be an integer of at least 0, got True"),
        (lambda name, value: at_least(name, value, 0), 1.0, "must be an integer of at least 0, got 1.0"),
        (lambda name, value: one_of(name, value, ("a", "b")), "c", "must be one of a, b, got 'c'"),
        (lambda name, value: instance_of(name, value, str), 3, "must be an instance of str, got 3"),
    ],
)
def test_values_that_break_a_rule_are_refused(validate, value, rule):
    with pytest.raises(ValueError, match=f"^key {re.escape(rule)}$"):
        validate("key", value)


@pytest.mark.parametrize(
    ("validate", "value"), [(positive, 3), (nonnegative, 0), (fraction, 1), (decay, 0), (number, -math.inf)]
)
def test_values_at_the_bounds_are_returned(validate, value):
    assert validate("key", value) == value


def test_the_memory_of_a_container_is_its_limit(tmp_path, monkeypatch):
    (tmp_path / "memory.max").write_text("12345\n")
    monkeypatch.setattr(validation, "CONTAINER_LIMITS", (str(tmp_path / "none"), str(tmp_path / "memory.max")))
    assert validation.available_memory.__wrapped__() == 12345
