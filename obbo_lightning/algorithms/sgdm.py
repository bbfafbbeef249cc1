"""SGD with momentum on the hypergradient of the newest task: the paper's offline benchmark."""

from functools import partial

import torch

from obbo_lightning.core.algorithm import ProjectedAlgorithm


class SGDM(ProjectedAlgorithm):
    """`torch.optim.SGD` with momentum 0.9 on d_t, then the projection on X; no window."""

    rule = partial(torch.optim.SGD, momentum=0.9)
