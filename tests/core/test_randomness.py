"""Seeds and samples: which loss draws which sample. A mistake here changes a distribution, which no mean shows."""

import torch
from toy import Nonlinear, toy_point, toy_task

from obbo_lightning.core.oracle import Oracle
from obbo_lightning.core.randomness import Key, Sample, derive_seed
from obbo_lightning.hypergradients import InnerState, StochasticNeumann
from obbo_lightning.solvers import GradientDescent


class RecordedSamples(Nonlinear):
    """Records each loss and mixed term that is evaluated as (name, (seed, size)), or (name, None) without a sample."""

    def __init__(self):
        self.samples = []

    def inner_loss(self, outer, inner, task, sample=None):
        self.record("inner_loss", sample)
        return super().inner_loss(outer, inner, task, sample)

    def outer_loss(self, outer, inner, task, sample=None):
        self.record("outer_loss", sample)
        return super().outer_loss(outer, inner, task, sample)

    def mixed_term(self, outer, inner, task, vector, sample=None):
        self.record("mixed_term", sample)  # returns None: it is left to autograd

    def record(self, name, sample):
        self.samples.append((name, None if sample is None else (sample.seed, sample.size)))


def test_every_draw_of_a_stochastic_round_has_its_own_seed_and_the_mixed_term_that_of_its_curvature():
    problem, outer = RecordedSamples(), toy_point()
    lengths = set()
    for t in range(12):
        problem.samples.clear()
        oracle = Oracle(problem, outer, toy_task(), Key(seed=5, round=t, age=1, slot=2))
        StochasticNeumann(max_terms=4, smoothness=5.0, batch_size=3)(
            oracle, GradientDescent(steps=2, lr=0.1, batch_size=2), InnerState(torch.zeros_like(outer))
        )

        def seed(purpose, index, t=t):
            return derive_seed(5, t, 1, "slot 2", purpose, index)

        terms = len(problem.samples) - 6
        lengths.add(terms)
        assert problem.samples == [
            *(("inner_loss", (seed("inner", k), 2)) for k in range(2)),
            ("outer_loss", (seed("epsilon", 0), 3)),
            ("inner_loss", (seed("zeta", 0), 3)),
            *(("inner_loss", (seed("zeta", j), 3)) for j in range(1, terms + 1)),
            ("mixed_term", (seed("zeta", 0), 3)),
            ("outer_loss", None),  # the loss that is reported is that of the whole task
        ]
    assert lengths == {0, 1, 2, 3}  # m̃ is uniform on 0..m−1


def test_a_key_has_other_seeds_for_every_round_age_and_slot():
    keys = [Key(s, t, age, slot) for s in (0, 1) for t in (0, 1) for age in (0, 1) for slot in (0, 1, 2)]
    seeds = {key.seed_for(purpose, k) for key in keys for purpose in ("inner", "zeta") for k in (0, 1)}
    assert len(seeds) == len(keys) * 4
    assert all(0 <= seed < 2**63 for seed in seeds)


def test_samples_are_uniform_and_reproducible():
    indices = torch.cat([Sample(seed, 20).indices(7) for seed in range(20)])
    counts = torch.bincount(indices, minlength=7)
    assert len(counts) == 7
    # binomial: 400/7 ± 7; five standard deviations
    assert ((counts - 400 / 7).abs() < 35).all()
    assert (
        Sample(1, 5).indices(100).tolist() == Sample(1, 5).indices(100).tolist() != Sample(2, 5).indices(100).tolist()
    )
    assert Sample(3, None).indices(4).tolist() == [0, 1, 2, 3]
