"""Online bilevel algorithms, one per file."""
