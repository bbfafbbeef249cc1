"""What a run has learned, put to use."""
