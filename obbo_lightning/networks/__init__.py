"""Networks for few-shot problems, each with a body ``blocks`` and a last layer ``linear``."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach(
    __name__,
    submod_attrs={"cnn4": ["CNN4"], "mlp": ["MLP"], "resnet12": ["ResNet12"], "flat": ["FlatNetwork"]},
)
