"""Baseline of the paper: SGD with momentum on the newest hypergradient, without a window."""

from functools import partial

import torch

from obbo_lightning.core.algorithm import ProjectedAlgorithm


class SGDM(ProjectedAlgorithm):
    """`torch.optim.SGD` with momentum 0.9 on d_t, then the projection on X; no window.

    >>> SGDM(lr=0.01).optimizer(torch.nn.Parameter(torch.zeros(1, 2))).param_groups[0]["momentum"]
    0.9
    """

    rule = partial(torch.optim.SGD, momentum=0.9)
