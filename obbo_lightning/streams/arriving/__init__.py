"""Streams that are still being written."""
