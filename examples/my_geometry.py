"""Your geometry: φ(λ) = Σ λ_i⁴/4, whose steps are short where λ is large."""

import torch

from obbo_lightning.domains import Box
from obbo_lightning.geometry import FixedGeometry


class Quartic(FixedGeometry):
    """φ(λ) = Σ λ_i⁴/4 on a box of positive numbers."""

    def supports(self, regularizer, domain):  # where the step below is the exact minimiser
        return isinstance(domain, Box) and domain.lower >= 0 and regularizer.l2 == 0

    def accepts(self, outer):
        return (outer > 0).all(-1)

    def value(self, outer):
        return outer.pow(4).sum(-1) / 4

    def mirror(self, outer):
        return outer.pow(3)

    def strong_convexity(self, domain):
        return 3 * domain.lower**2

    def step(self, outer, direction, lr, regularizer, domain):
        # x³ = λ³ − α (q + l1), then the nearest point of the box
        cube = self.mirror(outer) - lr * (direction + regularizer.l1)
        after = cube.sign() * cube.abs().pow(1 / 3)
        return domain.project(after).clamp(min=torch.finfo(outer.dtype).tiny)
