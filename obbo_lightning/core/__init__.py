"""The mathematics: pure torch, no Lightning, no files, no logging."""
