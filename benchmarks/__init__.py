"""Costs, measured interleaved and reported as ratios of medians."""
