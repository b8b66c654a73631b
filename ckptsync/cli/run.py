"""``ckptsync run``: the daemon."""

from __future__ import annotations

import argparse
from pathlib import Path

from ckptsync.config.loading import load
from ckptsync.daemon.leaving import Never, UntilGone
from ckptsync.daemon.roles import roles
from ckptsync.daemon.service import run as serve


def run(args: argparse.Namespace) -> int:
    """Until a signal; ``log.format` says what its log looks like."""
    parting = Never() if args.until_gone is None else UntilGone(args.until_gone)
    return serve(lambda: load(Path(args.config)), roles, parting)
