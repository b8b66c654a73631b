"""The command line's arguments.  Imports nothing heavy: ``--help`` answers at once."""

from __future__ import annotations

import argparse
import os
from typing import Any

from ckptsync import __version__
from ckptsync.cli import arguments_doctor, arguments_keeping, arguments_verifying

EXIT_CODES = """\
exit codes:
  0    all is well
  1    failure
  2    usage or configuration
  3    incomplete: something is missing
  4    store, storage or network
  5    unsupported layout or version
  10   corrupt: something is wrong
  130  interrupted (143: terminated)
"""
DTYPES = ("auto", "keep", "bf16", "fp16", "fp32")
PRESETS = ("all", "no-optimizer", "weights")


class _Parser(argparse.ArgumentParser):
    """Takes a URL that may be left out also where flags stand before it: argparse gives it up as soon as it meets a flag after the word before it."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> tuple[argparse.Namespace, list[str]]:  # type: ignore[override]
        found, rest = super().parse_known_args(args, namespace)
        if len(rest) == 1 and not rest[0].startswith("-") and getattr(found, "url", "") is None:
            found.url = rest.pop()
        return found, rest


def parser() -> argparse.ArgumentParser:
    """The whole command line; each command's arguments name the module that runs it (``command``)."""
    top = argparse.ArgumentParser(
        prog="ckptsync",
        description="Every finished checkpoint, whole and proven, in one place.",
        epilog=EXIT_CODES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    top.add_argument("--version", action="version", version=f"ckptsync {__version__}")
    commands = top.add_subparsers(title="commands", metavar="COMMAND", required=True, parser_class=_Parser)
    for add in (_demo, _run, _push, _merge, _verify, _inspect, _ls, _status, _pull, _service):
        add(commands)
    arguments_keeping.add(commands, _command, _store)
    arguments_doctor.add(commands, _command)
    return top


def _command(commands: Any, name: str, summary: str, description: str = "") -> argparse.ArgumentParser:
    command: argparse.ArgumentParser = commands.add_parser(
        name,
        help=summary,
        description=f"{summary[0].upper()}{summary[1:]}.{' ' if description else ''}{description}",
        epilog=EXIT_CODES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    command.add_argument("--json", action="store_true", help="the result as JSON on stdout, errors as JSON on stderr")
    command.set_defaults(command=f"ckptsync.cli.{name}")
    return command


def _store(command: argparse.ArgumentParser) -> None:
    command.add_argument("url", metavar="URL", nargs="?", help="the store (default: the -c file's, or $CKPTSYNC_STORE)")
    command.add_argument("-c", "--config", metavar="CONFIG", help="a configuration file that names the store")


def _bandwidth(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--bandwidth",
        metavar="RATE",
        help='of all transfers together: such as 50MB/s, or a timetable as rclone has it, "08:00,50M 19:00,off" (default:'
        " $CKPTSYNC_LIMITS_BANDWIDTH, or off)",
    )


def _merging(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--dtype",
        choices=DTYPES,
        default="auto",
        help="auto: as the model has it; keep: the most precise copy stored (default: auto)",
    )
    command.add_argument(
        "--max-shard-size", metavar="SIZE", default="5GB", help="of one output file, such as 5GB or 512MiB (default: 5GB)"
    )
    command.add_argument(
        "--source",
        metavar="S",
        help="which weights, where a checkpoint holds several (inspect lists them); S@base is the model under a PEFT adapter in the same"
        " shards, S@adapter=NAME one adapter of several",
    )
    command.add_argument(
        "--config-from", metavar="DIR", help="where config and tokenizer files lie, if not in the checkpoint or its run"
    )
    command.add_argument(
        "--base",
        metavar="DIR",
        help="the model that was trained: names and shapes must be its own, and auto gives each tensor its dtype (headers are read)",
    )


def _demo(commands: Any) -> None:
    command = _command(
        commands, "demo", "the whole story on this machine, in a minute", "Two nodes, a head, a flipped bit, its repair."
    )
    command.add_argument("--dir", metavar="DIR", help="where to work; must be empty or absent (default: a new temporary directory)")


def _run(commands: Any) -> None:
    command = _command(commands, "run", "the daemon: its configuration names its roles (worker, head, verifier)")
    command.add_argument(
        "-c", "--config", metavar="CONFIG", required=True, help="configuration file; configs/ has complete examples"
    )
    command.add_argument("--until-gone", metavar="PID", type=int, help="end once that process has ended and what it left is stored")


def _push(commands: Any) -> None:
    command = _command(commands, "push", "send one checkpoint (or every one below a directory) to a store, now")
    command.add_argument("directory", metavar="DIR", help="a checkpoint, or an output directory of checkpoints")
    command.add_argument(
        "url", metavar="STORE_URL", nargs="?", help="the store, a path or a URL (default: the -c file's, or $CKPTSYNC_STORE)"
    )
    command.add_argument(
        "-c",
        "--config",
        metavar="CONFIG",
        help="a worker's configuration: its store, limits, node, names of runs, and what it sends",
    )
    command.add_argument(
        "--send",
        choices=PRESETS,
        help="all; no-optimizer: without its states; weights: the model alone (default: the -c file's, or all)",
    )
    command.add_argument(
        "--include",
        metavar="GLOB",
        action="append",
        help="of that only files that match this, or another --include, by path or name",
    )
    command.add_argument("--exclude", metavar="GLOB", action="append", help="of that no file that matches this")
    command.add_argument("--run", metavar="NAME", help="the run's name in the store (default: the output directory's name)")
    command.add_argument("--node", metavar="ID", help="the node's id in the store (default: computed)")
    _bandwidth(command)
    command.add_argument("--dry-run", action="store_true", help="say what would be sent, send nothing")


def _merge(commands: Any) -> None:
    command = _command(
        commands,
        "merge",
        "consolidate a sharded checkpoint, with no service running",
        "Several SRC\noverlay: shards of one checkpoint that were left on several nodes.",
    )
    command.add_argument(
        "sources",
        metavar="SRC",
        nargs="+",
        help="a checkpoint, its inner shard directory, or a DeepSpeed save directory; a path or a URL",
    )
    command.add_argument(
        "destination",
        metavar="DST",
        help="a new directory, which appears whole or not at all; or a URL, where a merge that was killed is gone on with",
    )
    _merging(command)
    command.add_argument(
        "--jobs",
        metavar="N",
        type=int,
        help="threads that read, cast and digest; 1: none but the program's own (default: a core each, at most 8; 4 from a URL)",
    )
    command.add_argument(
        "--engine",
        choices=("local", "ray"),
        default="local",
        help="ray: each file of weights is made by a task of a Ray cluster, which reads and writes by itself (needs ckptsync[ray])",
    )
    command.add_argument(
        "--ray-address",
        metavar="ADDRESS",
        default=os.environ.get("RAY_ADDRESS", "auto"),
        help="the cluster: HOST:PORT of its head; auto: the one that this machine is in; local: of this machine alone (default: $RAY_ADDRESS, or auto)",
    )
    command.add_argument(
        "--statistics", action="store_true", help="of each tensor written: extremes, norm, NaNs, infinities, zeros"
    )
    command.add_argument(
        "--ignore-times",
        action="store_true",
        help="do not ask the files' times whether they are of one save: they were lost in copying",
    )
    _bandwidth(command)
    command.add_argument("--dry-run", action="store_true", help="say what would be written, write nothing")


def _verify(commands: Any) -> None:
    command = _command(commands, "verify", "prove what a store, or a checkpoint in a plain directory, holds")
    arguments_verifying.add(command)
    _bandwidth(command)


def _inspect(commands: Any) -> None:
    command = _command(commands, "inspect", "which layouts a checkpoint has, whether it is complete, its tensors")
    command.add_argument("targets", metavar="PATH_OR_URL", nargs="+", help="a checkpoint, or a place in a store")
    command.add_argument("--tensors", action="store_true", help="every tensor, not the first few")


def _ls(commands: Any) -> None:
    _store(_command(commands, "ls", "the runs and checkpoints of a store, each with one word"))


def _pull(commands: Any) -> None:
    command = _command(
        commands,
        "pull",
        "bring a checkpoint back, so that a training resumes from it",
        "Every byte is proven as it is read; what is damaged is not given (exit code 10), and what came stays for the next try.",
    )
    command.add_argument(
        "what",
        metavar="RUN[/CHECKPOINT]",
        help="a run, which means RUN/latest, its newest VERIFIED checkpoint; or one by name; or its URL or path in a store",
    )
    command.add_argument(
        "destination",
        metavar="DST",
        help="an output directory: the checkpoint appears in it, whole or not at all; with --consolidated, the model's own directory",
    )
    command.add_argument("--store", metavar="URL", dest="url", help="the store (default: the -c file's, or $CKPTSYNC_STORE)")
    command.add_argument("-c", "--config", metavar="CONFIG", help="a configuration file that names the store")
    part = command.add_mutually_exclusive_group()
    part.add_argument("--node", metavar="ID", help="only what that node needs to resume: its own files, and those of no rank")
    part.add_argument("--consolidated", action="store_true", help="the consolidated model instead")
    command.add_argument(
        "--unverified", action="store_true", help="also what is not VERIFIED yet, retired, or not all there; damage is never given"
    )
    _bandwidth(command)
    command.add_argument("--dry-run", action="store_true", help="say what would be brought, bring nothing")


def _status(commands: Any) -> None:
    command = _command(
        commands,
        "status",
        "what a store's nodes and heads are doing, and what is wrong",
        "With --json all of it as one document (docs/monitoring.md).",
    )
    _store(command)
    how = command.add_mutually_exclusive_group()
    how.add_argument("--watch", action="store_true", help="draw again every 2 seconds")
    how.add_argument(
        "--check", action="store_true", help="a line for each alarm; exit code 1 if there is any, 10 if one is damage: for cron, Nagios and the like"
    )  # fmt: skip


def _service(commands: Any) -> None:
    service = commands.add_parser("service", help="write systemd's units for this machine's configuration")
    actions = service.add_subparsers(title="actions", metavar="ACTION", required=True)
    command = _command(
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
    _uninstall(actions)


def _uninstall(actions: Any) -> None:
    command = _command(
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
