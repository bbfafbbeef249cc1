"""Bilevel problems: the losses f_t and g_t."""
