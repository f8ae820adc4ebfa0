"""Types of command-line arguments."""

from __future__ import annotations

import argparse


def positive_int(text: str) -> int:
    """Returns the number. For argparse, which prints the error and the usage."""
    try:
        number = int(text)
    except ValueError:
        number = 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return number
