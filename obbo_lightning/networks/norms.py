"""Normalisation layers by name, without running statistics; batch norm frozen to the statistics of a support set."""

import copy

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from obbo_lightning.core.validation import one_of

NORMS = ("batch", "group", "layer", "none")


def make_norm(norm: str, channels: int, images: bool) -> nn.Module:
    """Return the layer for feature maps ``[n, channels, height, width]``, or for vectors ``[n, channels]``.

    Groups are as many as possible up to 32 with at least four channels each.
    """
    one_of("problem.network.norm", norm, NORMS)
    if norm == "batch":
        return (nn.BatchNorm2d if images else nn.BatchNorm1d)(channels, track_running_stats=False)
    if norm == "group":
        groups = max((g for g in range(1, 33) if channels % g == 0 and channels // g >= 4), default=1)
        return nn.GroupNorm(groups, channels)
    if norm == "layer":
        return nn.GroupNorm(1, channels) if images else nn.LayerNorm(channels)
    return nn.Identity()


@torch.no_grad()
def frozen_batch_norm(network: nn.Module, support: Tensor) -> nn.Module:
    """Return a copy of a network whose batch norms use the statistics of ``support``.

    A query's prediction then depends on no other query. On the support examples, to which the network was adapted, the
    logits are those of ``network``, which normalises by the batch.
    """
    network = copy.deepcopy(network)
    by_batch = [m for m in network.modules() if isinstance(m, _BatchNorm) and (m.training or m.running_mean is None)]
    statistics: dict[nn.Module, tuple[Tensor, Tensor]] = {}

    def record(norm: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        if norm in statistics:
            raise ValueError(
                f"a prediction for one query needs norms that are used once, got {type(network).__name__}, which uses "
                f"a batch norm twice: predict all queries together (transductive)"
            )
        axes = [axis for axis in range(inputs[0].ndim) if axis != 1]
        statistics[norm] = inputs[0].mean(axes), inputs[0].var(axes, unbiased=False)

    hooks = [norm.register_forward_pre_hook(record) for norm in by_batch]
    network(support)
    for hook in hooks:
        hook.remove()
    for norm in by_batch:
        if norm in statistics:
            norm.running_mean, norm.running_var = statistics[norm]
            norm.track_running_stats = True
            norm.training = False
    return network
