"""Online bilevel optimization with Bregman geometry.

``__init__.pyi`` lists the exported names; each is imported when it is first used, so ``import obbo_lightning`` is fast.
The other names are in ``obbo_lightning.geometry``, ``.domains``, ``.regularizers``, ``.hypergradients``, ``.solvers``,
``.streams``, ``.networks`` and ``.testing``.
"""

import lazy_loader

__version__ = "0.3.0"

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
