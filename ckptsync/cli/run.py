"""``ckptsync run``: the daemon."""

from __future__ import annotations

import argparse
from pathlib import Path

from ckptsync.config.loading import load
from ckptsync.daemon import service


def run(args: argparse.Namespace) -> int:
    """Until a signal; ``log.format: json`` makes its log JSON."""
    return service.run(load(Path(args.config)))
