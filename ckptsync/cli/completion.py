"""``ckptsync completion``: print a shell's completion of commands, options and file names."""

from __future__ import annotations

import argparse

import shtab

from ckptsync.cli import output

SHELLS = ("bash", "zsh", "fish", "tcsh")
DETAILS = "The directory where a shell looks for completions is in the shell's own manual."


def add_arguments(command: argparse.ArgumentParser) -> None:
    """Define the command's arguments."""
    command.add_argument("shell", metavar="SHELL", choices=SHELLS, help=", ".join(SHELLS))


def run(args: argparse.Namespace) -> int:
    """Print the completion script of a shell; return 0."""
    from ckptsync.cli.main import whole_parser

    text = shtab.complete(whole_parser(), args.shell)
    output.print_json({"shell": args.shell, "text": text}) if args.json else print(text)
    return 0
