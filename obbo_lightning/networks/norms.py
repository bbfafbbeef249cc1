"""Normalisation layers by name, without running statistics; batch norm frozen to the statistics of a support set.

Also batch norm with accurate sums for images in channels_last on a CPU.
"""

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
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


class AccurateBatchNorm2d(nn.BatchNorm2d):
    """Batch norm whose mean and variance are as accurate in channels_last as in the plain layout.

    On a CPU, torch's own kernel for channels_last (2.15) adds all pixels of a channel one after the other in float32:
    the larger the images, the larger the rounding error, up to ten times that of the plain layout. Here each column of
    pixels is added on its own, and the columns are added afterwards.

    >>> images = torch.randn(4, 3, 8, 8).contiguous(memory_format=torch.channels_last)
    >>> norm = nn.BatchNorm2d(3, track_running_stats=False)
    >>> torch.allclose(with_accurate_batch_norms(nn.Sequential(norm))(images), norm(images), atol=1e-5)
    True
    """

    def forward(self, images: Tensor) -> Tensor:
        by_batch = not self.track_running_stats if self.training else self.running_mean is None
        # strides first, because vmap cannot answer is_contiguous
        if (
            by_batch
            and images.device.type == "cpu"
            and images.ndim == 4
            and images.stride(1) == 1 != images.stride(3)
            and images.numel() > images.shape[1]
            and images.is_contiguous(memory_format=torch.channels_last)
            and (self.weight is None or self.weight.dtype == images.dtype)
        ):
            found: Tensor = _AccurateBatchNorm.apply(images, self.weight, self.bias, self.eps)[0]
            return found
        return super().forward(images)


def with_accurate_batch_norms(network: nn.Module) -> nn.Module:
    """Make an `AccurateBatchNorm2d` of every ``nn.BatchNorm2d`` in a network, and return the network."""
    for module in network.modules():
        if type(module) is nn.BatchNorm2d:  # not a subclass, which may do something else
            module.__class__ = AccurateBatchNorm2d
    return network


class _AccurateBatchNorm(torch.autograd.Function):
    """y = γ (x − m) / √(v + ε) + β of images in channels_last, with m and v of the batch."""

    @staticmethod
    def forward(
        images: Tensor, weight: Tensor | None, bias: Tensor | None, epsilon: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        width = images.shape[3]
        means, variances = torch.batch_norm_update_stats(_columns(images), None, None, 0)
        # m = E m_w, v = E v_w + Var m_w over columns w of pixels
        mean, spread = torch.batch_norm_update_stats(means.view(width, -1), None, None, 0)
        variance = variances.view(width, -1).mean(0).add_(spread)
        return functional.batch_norm(images, mean, variance, weight, bias, False, 0.0, epsilon), mean, variance

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
        images, weight, _, ctx.epsilon = inputs
        ctx.mark_non_differentiable(*output[1:])
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(images, weight, *output[1:])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        # torch's own backward pass: the gradient in x depends little on its sums
        images, weight, mean, variance = ctx.saved_tensors
        scale = (variance + ctx.epsilon).rsqrt()
        wanted = ctx.needs_input_grad[:3]
        found = torch.ops.aten.native_batch_norm_backward(
            gradients[0], images, weight, None, None, mean, scale, True, ctx.epsilon, wanted
        )
        return *(one if needed else None for needed, one in zip(wanted, found, strict=True)), None


def _columns(images: Tensor) -> Tensor:
    """Return a view of images in channels_last as ``[n, width × channels, height, 1]``."""
    n, channels, height, width = images.shape
    return images.permute(0, 2, 3, 1).view(n, height, 1, width * channels).permute(0, 3, 1, 2)
