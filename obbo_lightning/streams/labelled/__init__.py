"""Streams of labelled examples with clean validation examples."""
