"""MAML through learn2learn: second-order meta-gradients of plain adaptation, for few-shot problems."""

from functools import partial

import torch

from obbo_lightning.algorithms.learn_to_learn import Adaptation, MetaGradient, load_learn2learn
from obbo_lightning.core.algorithm import Algorithm
from obbo_lightning.core.inner import InnerSolver
from obbo_lightning.core.memory import NoMemory
from obbo_lightning.core.rules import ProjectedRule


class MAML(Algorithm):
    """K steps from λ_t on the support images, the gradient through all of them, Adam; no proximal term, no window.

    Reference: Finn, Abbeel, Levine, "Model-Agnostic Meta-Learning for Fast Adaptation of Deep Networks", 2017.

    Args:
        lr: α, outer step size.
        inner: inner solver (K, η); it must start at λ_t.
        clip: largest norm of d_t.
    """

    head_only = False

    def __init__(self, lr: float = 1e-3, inner: InnerSolver | None = None, clip: float | None = None) -> None:
        load_learn2learn()
        super().__init__(
            inner=Adaptation.like(inner, self.head_only),
            hypergradient=MetaGradient(),
            memory=NoMemory,
            optimizer=ProjectedRule(partial(torch.optim.Adam, betas=(0.9, 0.999)), lr),
            clip=clip,
        )
