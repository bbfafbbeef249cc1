"""Few-shot classification tasks."""
