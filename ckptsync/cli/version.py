"""``ckptsync version``: print the version of the program, and of the Python that runs it."""

from __future__ import annotations

import argparse
import platform

from ckptsync import __version__
from ckptsync.cli import output


def add_arguments(command: argparse.ArgumentParser) -> None:
    """Define no argument but ``--json``, which every command has."""


def run(args: argparse.Namespace) -> int:
    """Print the version; return 0."""
    if args.json:
        output.print_json({"version": __version__, "python": platform.python_version()})
    else:
        print(f"ckptsync {__version__}")
    return 0
