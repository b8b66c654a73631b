"""A worker that does nothing but look, as fast as it can, until it is killed: see `tests/test_worker_looking_killed.py`."""

from __future__ import annotations

import sys
from pathlib import Path

from ckptsync.spool.sweeping import sweep
from ckptsync.worker.looking import Seat, look
from ckptsync.worker.options import RunDir


def main(out: Path, node: str) -> None:
    """Look for ever; every look that ends is a line."""
    sweep(out, node)
    seat = Seat(node, lambda *_: (), lambda *_: False)
    while True:
        found = look(RunDir("run", out), seat)
        print(len(found.seen), *(f.text for f in found.failures), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
