"""Streams from tables in time order."""
