"""Adam on the hypergradient of the newest task: the paper's offline benchmark."""

from functools import partial

import torch

from obbo_lightning.core.algorithm import ProjectedAlgorithm


class Adam(ProjectedAlgorithm):
    """`torch.optim.Adam` (0.9, 0.999) on d_t, then the projection on X; no window.

    >>> Adam(lr=0.01).optimizer(torch.nn.Parameter(torch.zeros(1, 2))).param_groups[0]["betas"]
    (0.9, 0.999)
    """

    rule = partial(torch.optim.Adam, betas=(0.9, 0.999))
