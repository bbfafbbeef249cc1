"""Benchmarks: variants are timed in alternation and reported as ratios of medians."""
