"""Use what a run has learned: load it, adapt it to new classes, predict, export."""
