"""Streams that train one network on batches of labelled examples, round after round."""
