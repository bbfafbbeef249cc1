"""Market events as lanes."""
