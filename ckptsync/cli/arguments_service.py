"""Arguments of ``service`` (``install``, ``uninstall``), ``hook`` (``install``, ``remove``), ``config`` (``example``) and ``help``.  Imports nothing heavy."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

Command = Callable[..., argparse.ArgumentParser]


def add(commands: Any, command_: Command) -> None:
    """``service install``, ``service uninstall``, ``hook install``, ``hook remove``, ``config example``, ``help``."""
    _documents(commands, command_)
    _hook(commands, command_)
    service = commands.add_parser("service", help="write systemd's units for this machine's configuration")
    actions = service.add_subparsers(title="actions", metavar="ACTION", required=True)
    command = command_(
        actions,
        "install",
        "write systemd's units for a configuration",
        "Nothing is started; what does is said.\nA configuration with the role worker gets ckptsync-worker@USER, another one ckptsync-head.",
    )
    command.set_defaults(command="ckptsync.cli.service")
    command.add_argument(
        "-c",
        "--config",
        metavar="CONFIG",
        help="what the service runs with (default: /etc/ckptsync/USER.yaml; with --user, ~/.config/ckptsync/worker.yaml)",
    )
    command.add_argument(
        "--as",
        metavar="USER",
        dest="train",
        help="the user who trains (default: who called sudo), or who runs the head (default: ckptsync)",
    )
    command.add_argument("--user", action="store_true", help="for your own systemd (systemctl --user), where you are not root")
    command.add_argument("--dry-run", action="store_true", help="say what would be written, write nothing")
    _uninstall(actions, command_)


def _documents(commands: Any, command_: Command) -> None:
    config = commands.add_parser("config", help="print an example of a configuration")
    actions = config.add_subparsers(title="actions", metavar="ACTION", required=True)
    example = command_(
        actions, "example", "print an example with every key: worker, head, both, and files for S3, sshd and Prometheus"
    )
    example.add_argument("name", metavar="NAME", nargs="?", default="", help="which one (default: list them)")
    page = command_(commands, "help", "print a page of the documents")
    page.add_argument("name", metavar="TOPIC", nargs="?", default="", help="which page (default: list them)")
    for command, documents in ((example, "config"), (page, "help")):
        command.set_defaults(command="ckptsync.cli.documents", documents=documents)


def _uninstall(actions: Any, command_: Command) -> None:
    command = command_(
        actions,
        "uninstall",
        "remove the units that install wrote",
        "Nothing is stopped; what does is said.  What install did not write stays, and so do configurations, spools and the store.",
    )
    command.set_defaults(command="ckptsync.cli.uninstall")
    command.add_argument("--as", metavar="USER", dest="train", help="whose worker (default: who called sudo)")
    command.add_argument("--head", action="store_true", help="the head's units instead")
    command.add_argument("--user", action="store_true", help="of your own systemd (systemctl --user)")
    command.add_argument("--dry-run", action="store_true", help="say what would be removed, remove nothing")


def _hook(commands: Any, command_: Command) -> None:
    hook = commands.add_parser("hook", help="give the trainers of a Python the hook by a variable: install, remove")
    actions = hook.add_subparsers(title="actions", metavar="ACTION", required=True)
    for action, summary, description in (
        (
            "install",
            "put the line into a Python's packages that lets CKPTSYNC_AUTOLOAD=1 give each Hugging Face Trainer the hook",
            "Without the variable the line does nothing.  `ckptsync help hook` says what the hook does.",
        ),
        ("remove", "take that line out", "Do this before you uninstall ckptsync from that Python."),
    ):
        command = command_(actions, action, summary, description)
        command.set_defaults(command="ckptsync.cli.hook", action=action)
        command.add_argument("--python", metavar="PYTHON", help="the Python that trains (default: the one that runs this command)")
