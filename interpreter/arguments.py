"""Arguments of command lines, checked where they are read."""

from __future__ import annotations

import argparse
from pathlib import Path


def count(text: str) -> int:
    """An int >= 1."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"got {text}, wanted an int >= 1")
    return int(text)


def file(text: str) -> Path:
    """The path of a file that is there."""
    if not Path(text).is_file():
        raise argparse.ArgumentTypeError(f"got {text}, wanted a file that is there")
    return Path(text)
