"""Networks to adapt: ordinary modules, one a file."""
