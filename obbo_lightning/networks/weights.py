"""Weights of a network as a parameter group of the outer variable."""

from torch import Tensor, nn

from obbo_lightning.core.domains import Domain
from obbo_lightning.core.geometry import AdaptiveDiagonal, Geometry
from obbo_lightning.core.parameter_groups import LearningRate, ParameterGroup
from obbo_lightning.core.regularizers import ElasticNet
from obbo_lightning.networks.flat import Factory, FlatNetwork


class Weights(ParameterGroup):
    """All trainable parameters of a network, flat: the paper's adaptive geometry on R^d.

    Args:
        network: whose weights are the start; or a class or function without arguments that makes one from the seed.
        geometry: φ_t.
        regularizer: h.
        domain: X.
        lr: α, or ``auto``: all weights together move by s times their root mean square.

    >>> weights = Weights(nn.Linear(3, 2))
    >>> weights.size, weights.network(weights.start(), weights.start().new_ones(4, 3)).shape
    (8, torch.Size([4, 2]))
    """

    has_named_coordinates = False

    def __init__(
        self,
        network: Factory | nn.Module,
        geometry: Geometry | None = None,
        regularizer: ElasticNet | None = None,
        domain: Domain | None = None,
        lr: LearningRate = "auto",
    ) -> None:
        self.network = FlatNetwork(network)
        super().__init__(self.network.initial(0), geometry or AdaptiveDiagonal(), regularizer, domain, lr)

    def start(self, seed: int = 0) -> Tensor:
        """Return the network's own initialisation from ``seed``, or the weights that it came with."""
        return self.network.initial(seed)
