"""``ckptsync config``: check a configuration, show each key's value, or print an example."""

from __future__ import annotations

import argparse
import json
import shlex
from pathlib import Path

from ckptsync.cli import output
from ckptsync.cli.arguments import add_command, read_configuration
from ckptsync.cli.help import PACKAGE, show


def add_arguments(command: argparse.ArgumentParser) -> None:
    """Define the command's arguments."""
    actions = command.add_subparsers(title="actions", metavar="ACTION", required=True)
    check_action = add_command(actions, "check", "read a configuration as the service would")
    show_action = add_command(
        actions, "show", "print each key, its value, and where that comes from"
    )
    for action, function in ((check_action, _check), (show_action, _show)):
        action.add_argument("file", metavar="FILE", help="the configuration")
        action.set_defaults(act=function)
    example_action = add_command(
        actions,
        "example",
        "print a short example: worker, head, both; or a file for S3, sshd, Prometheus, Grafana"
        " or Kubernetes",
    )
    example_action.add_argument(
        "name",
        metavar="NAME",
        nargs="?",
        default="",
        help="the example to print (default: list them)",
    )
    example_action.set_defaults(act=_example)


def run(args: argparse.Namespace) -> int:
    """Run the action, and return 0.  Raises ConfigError."""
    return int(args.act(args))


def _check(args: argparse.Namespace) -> int:
    """Read a configuration; print its roles, its store, and what is switched off; return 0.

    It opens no store.  Raises ConfigError with every problem.
    """
    config = read_configuration(Path(args.file))
    roles, url = list(config.roles), config.store.url
    if args.json:
        row = {"file": config.file, "roles": roles, "store": url, "off": config.switched_off}
        output.print_json(row)
        return 0
    output.say(f"{args.file}: valid: {', '.join(roles)}; store {url}")
    for line in config.switched_off:
        output.say(f"note: {line}")
    output.say(f"`ckptsync doctor -c {shlex.quote(args.file)}` tries the store and the directories")
    return 0


def _show(args: argparse.Namespace) -> int:
    """Print each key with its value and the source of the value; return 0.  Raises ConfigError."""
    from ckptsync.config.loading import settings

    keys = settings(Path(args.file))
    if args.json:
        rows = {setting.key: {"value": setting.value, "source": setting.source} for setting in keys}
        output.print_json({"file": args.file, "keys": rows})
        return 0
    values = [
        v if isinstance(v := setting.value, str) else json.dumps(v, ensure_ascii=False)
        for setting in keys
    ]
    lines = [
        (setting.key, value, setting.source) for setting, value in zip(keys, values, strict=True)
    ]
    for line in output.aligned(lines):
        output.say(line)
    return 0


def _example(args: argparse.Namespace) -> int:
    """Print an example, or their list.  Raises ConfigError if there is no such example."""
    return show("example", examples(), args)


def examples() -> dict[str, Path]:
    """Return the files below ``configs/`` by name; YAML files without their ending."""
    folder = PACKAGE / "configs"
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    return {path.relative_to(folder).as_posix().removesuffix(".yaml"): path for path in paths}
