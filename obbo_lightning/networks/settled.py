"""Batch norm that has seen its batch: the statistics of the support examples, kept for every query."""

import copy

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm


@torch.no_grad()
def settled(network: nn.Module, support: Tensor) -> nn.Module:
    """A network whose norms use what they see in ``support``, so that a query's prediction depends on no other query.

    On the support examples it gives the same logits as ``network``, which normalises by the batch.

    Args:
        network: adapted, without noise; it is not changed.
        support: the examples that it was adapted to.
    """
    network = copy.deepcopy(network)
    batchwise = [m for m in network.modules() if isinstance(m, _BatchNorm) and (m.training or m.running_mean is None)]
    seen: dict[nn.Module, tuple[Tensor, Tensor]] = {}

    def look(norm: nn.Module, given: tuple[Tensor, ...]) -> None:
        if norm in seen:
            raise ValueError(
                f"a prediction for one query needs norms that are used once, got {type(network).__name__}, which uses "
                f"a batch norm twice: predict all queries together (transductive)"
            )
        axes = [axis for axis in range(given[0].ndim) if axis != 1]
        seen[norm] = given[0].mean(axes), given[0].var(axes, unbiased=False)  # what a batch is normalised by

    hooks = [norm.register_forward_pre_hook(look) for norm in batchwise]
    network(support)
    for hook in hooks:
        hook.remove()
    for norm in batchwise:
        if norm in seen:
            norm.running_mean, norm.running_var = seen[norm]
            norm.track_running_stats = True
            norm.training = False
    return network
