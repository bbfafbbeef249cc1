"""Online bilevel optimization with Bregman geometry.

The names that the package exports are listed in ``__init__.pyi``, and each is imported when it is first asked for:
``import obbo_lightning`` by itself imports nothing.
"""

import lazy_loader

__version__ = "0.2.0"

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
