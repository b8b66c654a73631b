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
    actions = command.add_subparsers(title="actions", metavar="ACTION", required=True)
    check = add_command(actions, "check", "read a configuration as the service would")
    shown = add_command(actions, "show", "print each key, its value, and where that comes from")
    for action, act in ((check, _check), (shown, _show)):
        action.add_argument("file", metavar="FILE", help="the configuration")
        action.set_defaults(act=act)
    example = add_command(
        actions,
        "example",
        "print a short example: worker, head, both; or a file for S3, sshd, Prometheus, Grafana"
        " or Kubernetes",
    )
    example.add_argument(
        "name",
        metavar="NAME",
        nargs="?",
        default="",
        help="the example to print (default: list them)",
    )
    example.set_defaults(act=_example)


def run(args: argparse.Namespace) -> int:
    """Do what the action says; return 0.  Raises ConfigError."""
    return int(args.act(args))


def _check(args: argparse.Namespace) -> int:
    """Read a configuration and print its roles, its store, and what is switched off."""
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
    """Print each key with its value and the source of the value."""
    from ckptsync.config.loading import settings

    listed = settings(Path(args.file))
    if args.json:
        rows = {each.key: {"value": each.value, "source": each.source} for each in listed}
        output.print_json({"file": args.file, "keys": rows})
        return 0
    values = [
        v if isinstance(v := each.value, str) else json.dumps(v, ensure_ascii=False)
        for each in listed
    ]
    lines = [(each.key, value, each.source) for each, value in zip(listed, values, strict=True)]
    for line in output.aligned(lines):
        output.say(line)
    return 0


def _example(args: argparse.Namespace) -> int:
    return show("example", examples(), args)


def examples() -> dict[str, Path]:
    """Return the files below ``configs/`` by name; YAML files without their ending."""
    folder = PACKAGE / "configs"
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    return {path.relative_to(folder).as_posix().removesuffix(".yaml"): path for path in paths}
