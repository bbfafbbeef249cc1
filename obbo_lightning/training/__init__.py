"""Runs and tuning through Lightning."""
