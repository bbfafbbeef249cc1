"""Market events as lanes of one problem."""
