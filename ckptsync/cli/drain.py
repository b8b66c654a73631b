"""``ckptsync drain``: wait until a store has what a training saved on this machine.

A machine can be shut down only when the store has its saves.  `resume.drain` judges and waits; this
module starts a worker if none serves the directory, and stops it at the end.  `resume` uses the
same `Upload` for its training.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import os
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ckptsync.cli import output
from ckptsync.cli.arguments import (
    add_store_option,
    configuration,
    option_value,
    store_url,
)
from ckptsync.cli.output import say
from ckptsync.cli.push import open_or_make_store
from ckptsync.config.output_dirs import existing_directories
from ckptsync.config.yaml_lines import LIMIT, parse
from ckptsync.errors import CkptsyncError, ConfigError
from ckptsync.hooks import embedded_worker
from ckptsync.quantities import parse_duration
from ckptsync.resume.drain import DrainedSave, DrainResult, OutputDirSaves, describe, drain
from ckptsync.safe_open import read_named
from ckptsync.stores.contract import Store
from ckptsync.walk import SPOOL
from ckptsync.worker.file_selection import EVERYTHING
from ckptsync.worker.finished import Rule
from ckptsync.worker.logs import RunLogs
from ckptsync.worker.node_identity import node_id
from ckptsync.worker.options import RunDir, WorkerOptions, checked_options
from ckptsync.worker.store_view import StoreView
from ckptsync.worker.worker import DOUBTFUL

DETAILS = (
    "If no worker serves OUT, one is started for as long as that takes. A save that is torn is"
    " named, and not waited for. Exit code 3 if the store does not have all."
)
INCOMPLETE = 3


def add_arguments(command: argparse.ArgumentParser) -> None:
    """Define the command's arguments."""
    add_output_dir(command)
    command.add_argument(
        "--wait",
        metavar="TIME",
        default="10m",
        help="wait at most so long (default: 10m); 0 says only how it stands",
    )


def add_output_dir(command: argparse.ArgumentParser) -> None:
    """Define OUT, ``--store``, ``-c`` and ``--run``."""
    command.add_argument(
        "output_dir", metavar="OUT", help="the output directory, in which a training saves"
    )
    add_store_option(command)
    command.add_argument(
        "--run",
        metavar="NAME",
        help="the run's name in the store (default: as -c says, or the directory's name)",
    )


def run(args: argparse.Namespace) -> int:
    """Wait, and print which saves are stored and which are not.

    Return 0 if the store has all, else 3.  Raises ConfigError, StoreError.
    """
    wait = option_value("--wait", parse_duration, args.wait)
    if not Path(args.output_dir).exists():  # an unmounted disk may have saves that are not stored
        hint = "check the path, and mount the file system"
        raise ConfigError(f"{args.output_dir}: no such directory", hint=hint)
    upload = upload_of(args)
    until = time.monotonic() + wait
    result = drain(
        upload.saves,
        lambda: time.monotonic() >= until or upload.notice_lost_worker(),
        upload.ensure_worker if wait else _nothing,
        note,
        math.inf,
    )
    upload.finish(result)
    code = 0 if result.is_stored else INCOMPLETE
    if args.json:
        output.print_json(
            {
                "run": upload.run.name,
                "store": upload.url,
                "may_shut_down": result.is_stored,
                "saves": [_describe(save) for save in result.saves],
                "error": result.error,
            },
            code,
        )
        return code
    for line in describe(result, upload.run, upload.url):
        say(line)
    return code


def note(text: str) -> None:
    """Print a line on stderr; do nothing if it is closed, as with a closed terminal."""
    with contextlib.suppress(OSError):
        say(f"ckptsync: {text}", to_stderr=True)


def _describe(save: DrainedSave) -> dict[str, Any]:
    """Return a save for ``--json``."""
    row = asdict(save)
    return {key: row[key] for key in ("checkpoint", "step", "status", "reason", "location")}


def _nothing() -> None:
    """Start no worker."""


@dataclass
class Upload:
    """The upload of an output directory: its store, and the worker of our own that does it.

    ``configured``: the values of the file of ``-c``, for our worker.  ``has_worker``: whether we
    may start one.  ``has_logs``: whether it uploads logs.  ``problem``: why it could not be
    started, else empty.
    """

    run: RunDir
    node: str
    url: str
    store: Store
    saves: OutputDirSaves
    configured: Mapping[str, object] | None
    has_worker: bool = True
    has_logs: bool = True
    problem: str = ""
    _last_served: float = 0.0

    def ensure_worker(self) -> None:
        """Start a worker for the directory if none serves it; set `problem` if that fails, else "".

        Do nothing without `has_worker`, or while the directory is empty or absent: a worker writes
        into it, and a training may refuse a directory that is not empty.
        """
        if not self.has_worker or not has_entries(self.run.path):
            return
        try:
            embedded_worker.keep_running(self.run.path, self.url, self.run.name, self.configured)
            self.problem = ""
        except (OSError, CkptsyncError) as e:
            self.problem = str(e)

    def notice_lost_worker(self) -> bool:
        """Note the time if a worker serves the directory; return True if none has for too long.

        Too long: `embedded_worker.RESTART` seconds, and `RESTART_EVERY` more if this process may
        start one.  The first call notes the time in any case.
        """
        spool, now = self.run.path / SPOOL, time.monotonic()
        is_own = self.has_worker and embedded_worker.is_worker_running(self.run.path)
        if is_own or embedded_worker.is_served(spool) or not self._last_served:
            self._last_served = now
        # our own is started again a minute after its last start
        patience = embedded_worker.RESTART_EVERY if self.has_worker else 0.0
        return now - self._last_served >= embedded_worker.RESTART + patience

    def finish(self, result: DrainResult) -> None:
        """If all saves are stored or refused, stop our own worker and send its logs.

        Else, or if ``result`` has an error, leave it running, and print `problem` and who uploads.
        """
        why = self.problem
        try:
            why = why or embedded_worker.find_problem(self.run.path)
            who = embedded_worker.who_uploads(self.run.path)
        except OSError:  # the log cannot be read
            who = ""
        is_done = all(save.status in ("stored", "refused") for save in result.saves)
        if is_done and not result.error:  # after an error there may be saves that were not read
            is_own = embedded_worker.is_worker_running(self.run.path)
            embedded_worker.stop(self.run.path)
            if is_own and self.has_logs:
                self._carry_logs()
            return
        for text in filter(None, (why, who)):
            note(text)

    def _carry_logs(self) -> None:
        """Send the logs that the stopped worker has not sent; print what fails."""
        try:
            notes = RunLogs(self.run, self.node, self.store).carry()
        except CkptsyncError as e:
            notes = (f"logs of {self.run.name}: {e}",)
        for text in notes:
            note(text)


def has_entries(directory: Path) -> bool:
    """Return whether a directory has entries; False also if it is absent or unreadable."""
    try:
        with os.scandir(directory) as entries:
            return next(entries, None) is not None
    except OSError:
        return False


def upload_of(args: argparse.Namespace, store: Store | None = None, url: str = "") -> Upload:
    """Return the upload of the output directory that arguments and configuration describe.

    ``store`` and ``url`` replace the store that is named; a named one is made if it is new.  Raises
    ConfigError, StoreError.
    """
    path = Path(os.path.abspath(args.output_dir))  # noqa: PTH100 - links stay
    if path.exists() and not path.is_dir():
        raise ConfigError(f"{path}: is a file", hint="OUT is the directory in which it saves")
    url = url or store_url(args)
    config = configuration(args)
    node = os.environ.get("CKPTSYNC_NODE") or (config.node if config else "") or node_id()
    run = RunDir(args.run or _configured_name(args, path, url) or path.name, path)
    worker = config.worker if config else None
    options = WorkerOptions(node, run)
    if worker is not None:
        options = WorkerOptions(
            node,
            run,
            quiet=worker.quiet,
            unmarked=worker.unmarked,
            send=worker.send,
            include=worker.include,
            exclude=worker.exclude,
        )
    checked_options(options, url)
    selection = options.selection if worker is not None else EVERYTHING
    store = store or open_or_make_store(args, path)
    view = StoreView(store, node, run.name, selection)
    rule = Rule(options.quiet, options.unmarked, DOUBTFUL * options.unmarked)
    nodes = (node, embedded_worker.directory_node(node, path / SPOOL))
    configured = _file_values(args) if args.config else None
    saves = OutputDirSaves(run, nodes, view, rule)
    has_logs = worker is None or worker.logs
    return Upload(run, node, url, store, saves, configured, has_logs=has_logs)


def _configured_name(args: argparse.Namespace, path: Path, url: str) -> str:
    """Return the run's name that the configuration gives a directory; "" if it gives none."""
    config = configuration(args)
    runs = existing_directories(config.worker.runs, url).runs if config else ()
    return next((run.name for run in runs if Path(run.path) in (path, path.resolve())), "")


def _file_values(args: argparse.Namespace) -> Mapping[str, object] | None:
    """Return the plain values of the file of ``-c``, read anew; None if it is no mapping.

    `configuration` has checked the file.  Raises OSError if it cannot be read now.
    """
    values = parse(read_named(Path(args.config), LIMIT).decode(), args.config).values
    return values if isinstance(values, dict) else None
