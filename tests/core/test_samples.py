"""Which sample is drawn for what, written out by hand: a mistake here changes a distribution and no test of a mean."""

import torch
from toy import F64, Nonlinear, toy_point, toy_task

from obbo_lightning import GradientDescent, Key, StochasticNeumann
from obbo_lightning.core.oracle import Oracle
from obbo_lightning.core.randomness import Sample, derive_seed


class Listening(Nonlinear):
    """Writes down with what seed it is asked for what; its mixed term is its own, so that it is asked for it."""

    def __init__(self):
        self.heard = []

    def inner_loss(self, outer, inner, task, sample=None):
        self.heard.append(("inner_loss", sample and (sample.seed, sample.size)))
        return super().inner_loss(outer, inner, task, sample)

    def outer_loss(self, outer, inner, task, sample=None):
        self.heard.append(("outer_loss", sample and (sample.seed, sample.size)))
        return super().outer_loss(outer, inner, task, sample)

    def mixed_term(self, outer, inner, task, vector, sample=None):
        self.heard.append(("mixed_term", sample and (sample.seed, sample.size)))
        outer, inner = outer.clone().requires_grad_(), inner.clone().requires_grad_()
        with torch.enable_grad():
            loss = Nonlinear.inner_loss(self, outer, inner, task, sample).sum()
            (gradient,) = torch.autograd.grad(loss, inner, create_graph=True)
            return torch.autograd.grad(gradient, outer, vector)[0]


def test_every_draw_of_a_stochastic_round_has_its_own_seed_and_the_mixed_term_that_of_its_curvature():
    problem, outer = Listening(), toy_point()
    lengths = set()
    for t in range(12):
        problem.heard.clear()
        key = Key(seed=5, round=t, age=1, place=2)
        oracle = Oracle(problem, outer, toy_task(), key)
        StochasticNeumann(max_terms=4, smoothness=5.0, batch_size=3)(
            oracle, GradientDescent(steps=2, lr=0.1, batch_size=2), torch.zeros_like(outer), None
        )

        def seed(purpose, index, t=t):
            return derive_seed(5, t, 1, "slot 2", purpose, index)

        terms = len(problem.heard) - 6
        lengths.add(terms)
        assert problem.heard == [
            *(("inner_loss", (seed("inner", k), 2)) for k in range(2)),
            ("outer_loss", (seed("epsilon", 0), 3)),
            ("inner_loss", (seed("zeta", 0), 3)),
            *(("inner_loss", (seed("zeta", j), 3)) for j in range(1, terms + 1)),
            ("mixed_term", (seed("zeta", 0), 3)),
            ("outer_loss", None),  # what is reported is of the whole task
        ]
    assert lengths == {0, 1, 2, 3}  # m̃ is uniform on 0..m−1


def test_a_sample_reaches_every_observation():
    drawn = torch.cat([Sample(seed, 20).indices(7) for seed in range(20)])
    counts = torch.bincount(drawn, minlength=7)
    assert len(counts) == 7
    # binomial: 400/7 ± 7; five deviations
    assert ((counts - 400 / 7).abs() < 35).all()
    assert Sample(3, None).indices(4).tolist() == [0, 1, 2, 3]


def test_analytic_and_automatic_mixed_terms_are_of_the_same_sample():
    outer, inner, vector = toy_point(), toy_point(seed=2), toy_point(seed=3)
    for sample in (None, Sample(4, 2)):
        known, automatic = (
            Oracle(problem, outer, toy_task()).curvature(inner, sample).mixed(vector)
            for problem in (Listening(), Nonlinear())
        )
        assert torch.allclose(known, automatic, rtol=1e-12)
    assert outer.dtype == F64
