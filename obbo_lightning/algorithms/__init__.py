"""The algorithms of the paper and their rivals, one a file."""
