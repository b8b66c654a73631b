"""``ckptsync run``: run the service with the roles of its configuration.

`service.run` does all of it; systemd's units call this command.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from ckptsync.config.loading import load
from ckptsync.service.run import run as serve

NOTES = """\
It writes a line on stderr for each change. On a terminal that is a sentence, in colour unless
NO_COLOR is set or TERM is `dumb`. Elsewhere it is a JSON object with `time`, `level`, `logger`,
`message`, `phase` and more keys; with `log: {format: text}` logfmt. Failures: `| json |
phase="failed"` in Loki, `jq 'select(.phase == "failed")'` in a file.

`phase` of the service: `starting`, `started`, `stopped`; `off` (not configured); `no-directory` (a
directory or pattern of worker.runs matches nothing yet); `waiting` (for the store);
`reloading`, `not-reloaded` (SIGHUP, and a wrong configuration); `refused` (another live process
has this node's id); `clock-jumped` (by more than two seconds); `hung` (no progress for ten
minutes: the process ends); `abandoned` (a task did not end in time; the next start finishes
it).

`phase` of a worker: `waiting` (`reason`, `until`), `sending`, `sent`, `elsewhere` (another node
uploads it), `retired` (the store has marked or deleted it), `not-final` (a model beside the
checkpoints may be a copy from the middle of the training), `missed` (removed before it was
known to be complete), `lost` (removed, pin and all, before it was stored), `superseded` (a
newer one came first), `cleaned` (removed from this node), `repaired`, `not-repaired`,
`left-out` (an output directory cannot be served), `note` (no error: an inotify limit, a full
spool, weights in no known checkpoint).

`phase` of a head or verifier: a status in lower case (a location has it now), `consolidated`,
`unreadable` (a record), `marked`, `marked-again`, `withdrawn`, `removed`, `waits`, `gone`
(retention, with `reason`), `event`, `given-up` (an event), `verified` (verified at the level
`check`), `found` (damage), `alarm`, `alarm-over`, `left` (the process `child` cannot be killed,
since its file server does not answer).

Once a minute `uploading`, `repairing`, `consolidate`, `verify` and `retain` say `done` of
`total` bytes, `rate` a second, seconds `left`. `failed` is an error that is tried again
(`error`, `hint`; of a head also the `command` that repeats it), `recovered` its end.

SIGTERM and SIGINT stop it within seconds (exit code 0); a second one ends it at once. SIGHUP: a
good configuration ends the process, for systemd to start it again; a wrong one is logged. On a
terminal SIGHUP stops it; under `nohup` it is ignored.

`--until-gone` waits at most a quarter of an hour for checkpoints that never finish, or for a
store that never comes.

Exit code 2 is the configuration, or another live worker with this node's id; 1 is a bug, with a
traceback, after which systemd starts it again.
"""


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
