"""Streams of tables whose rows are in the order of time."""
