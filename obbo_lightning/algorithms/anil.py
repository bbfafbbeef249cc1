"""ANIL through learn2learn: MAML that adapts the last layer only, for few-shot problems."""

from obbo_lightning.algorithms.maml import MAML


class ANIL(MAML):
    """As MAML, but only the last layer adapts; λ_t is still all of the network.

    Reference: Raghu, Raghu, Bengio, Vinyals, "Rapid Learning or Feature Reuse? Towards Understanding the Effectiveness
    of MAML", 2020.
    """

    head_only = True
