"""The command line: ``fit`` plays a stream and prints a table."""

import argparse
from collections.abc import Sequence


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; the exit code is 0, or 2 for a refusal."""
    parser = argparse.ArgumentParser(
        prog="obbo",
        description="Online bilevel optimization with Bregman geometry.",
        allow_abbrev=False,
    )
    commands = parser.add_subparsers(dest="command", required=True)
    fit = commands.add_parser(
        "fit", help="play a drifting quadratic stream with all six algorithms and print the result", allow_abbrev=False
    )
    fit.add_argument("--rounds", type=int, default=150, help="T, rounds to play (default: %(default)s)")
    fit.add_argument("--window", type=int, default=10, help="w, window length (default: %(default)s)")
    fit.add_argument(
        "--condition_number", type=float, default=4.0, help="kappa_g of the inner problem (default: %(default)s)"
    )
    fit.add_argument("--seed", type=int, default=0, help="of all randomness (default: %(default)s)")
    options = parser.parse_args(argv)
    # torch takes seconds to import: after the flags were read
    from obbo_lightning.experiments.quadratic import fit_quadratic

    try:
        fit_quadratic(options.rounds, options.window, options.condition_number, options.seed)
    except ValueError as refusal:
        parser.exit(2, f"obbo: {refusal}\n")
    return 0
