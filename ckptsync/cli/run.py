"""``ckptsync run``: run the service with the roles of its configuration.

`service.run` does all of it; systemd's units call this command.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from ckptsync.config.loading import load
from ckptsync.service.run import run as serve


def add_arguments(command: argparse.ArgumentParser) -> None:
    """Define the command's arguments."""
    command.add_argument(
        "-c",
        "--config",
        metavar="CONFIG",
        required=True,
        help="configuration file; `ckptsync config example` prints complete ones",
    )
    command.add_argument(
        "--until-gone",
        metavar="PID",
        type=int,
        help="stop when the process PID has ended and its checkpoints are stored",
    )


def run(args: argparse.Namespace) -> int:
    """Run the service until a signal, or the end of ``--until-gone``; return its exit code."""
    return serve(lambda: load(Path(args.config)), args.until_gone)
