"""Networks for few-shot problems: a body called ``blocks``, and a last layer called ``linear``."""
