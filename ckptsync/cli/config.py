"""``ckptsync config example``: print an example of a configuration, with every key."""

from __future__ import annotations

import argparse
from pathlib import Path

from ckptsync.cli.arguments import add_command
from ckptsync.cli.help import PACKAGE, show


def add_arguments(command: argparse.ArgumentParser) -> None:
    actions = command.add_subparsers(title="actions", metavar="ACTION", required=True)
    example = add_command(
        actions,
        "example",
        "print an example with every key: worker, head, both, and files for S3, sshd,"
        " Prometheus, Grafana and Kubernetes",
    )
    example.add_argument(
        "name",
        metavar="NAME",
        nargs="?",
        default="",
        help="the example to print (default: list them)",
    )


def run(args: argparse.Namespace) -> int:
    """Print the example that is named; without a name, list the examples."""
    return show("example", examples(), args)


def examples() -> dict[str, Path]:
    """Return the files below ``configs/`` by name; YAML files without their ending."""
    folder = PACKAGE / "configs"
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    return {path.relative_to(folder).as_posix().removesuffix(".yaml"): path for path in paths}
