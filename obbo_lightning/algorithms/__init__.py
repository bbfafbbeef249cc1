"""The algorithms of the paper and their rivals, one a file."""

from obbo_lightning.algorithms.adam import Adam
from obbo_lightning.algorithms.anil import ANIL
from obbo_lightning.algorithms.maml import MAML
from obbo_lightning.algorithms.oagd import OAGD
from obbo_lightning.algorithms.obbo import OBBO
from obbo_lightning.algorithms.registry import ALGORITHMS, make_algorithm, register
from obbo_lightning.algorithms.sgdm import SGDM
from obbo_lightning.algorithms.sobbo import SOBBO
from obbo_lightning.algorithms.sobow import SOBOW

__all__ = ["ALGORITHMS", "ANIL", "MAML", "OAGD", "OBBO", "SGDM", "SOBBO", "SOBOW", "Adam", "make_algorithm", "register"]
