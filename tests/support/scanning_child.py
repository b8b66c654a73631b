"""A worker that does nothing but look, as fast as it can, until it is killed: see
`tests/worker/test_scan_killed.py`.
"""

from __future__ import annotations

import sys
from pathlib import Path

from ckptsync.spool.pins import clean_own
from ckptsync.worker.options import RunDir
from ckptsync.worker.pinning import Pinner
from ckptsync.worker.scanner import list_and_pin_saves


def main(out: Path, node: str) -> None:
    """Scan for ever; every look that ends is a line."""
    clean_own(out, node)
    seat = Pinner(node, lambda *_: False)
    while True:
        found = list_and_pin_saves(RunDir("run", out), seat)
        print(len(found.saves), *(f.text for f in found.failures), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
