"""Faults planted on one of two nodes, each found by `ckptsync doctor` and nothing else alarmed; and
sound pairs of every kind, on which nothing is found.

    python -m tests.campaigns.doctor  # all: about two minutes (root, iproute2; a C compiler for
                                      some)
    python -m tests.campaigns.doctor --only clock-5s torch   # by name

Each time both nodes say with ``--publish`` what they are, the second compares, and somebody who is
no node compares again.  What is found has to be exactly the kinds that the fault is to be found by
(tests/campaigns/doctor_faults.py).
"""

from __future__ import annotations

import contextlib
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from tests.campaigns.campaign import arguments
from tests.campaigns.doctor_faults import FAULTS, SOUND, Planted
from tests.campaigns.doctor_pair import Nodes, Told
from tests.campaigns.nodes import Network, can_isolate


def main(argv: Sequence[str] | None = None) -> int:
    """0 if all was found and nothing made up, 1 if not."""
    parser = arguments(__doc__)
    parser.add_argument("--only", nargs="+", choices=sorted({**FAULTS, **SOUND}), metavar="NAME")
    args = parser.parse_args(argv)
    chosen = {
        name: one for name, one in {**FAULTS, **SOUND}.items() if not args.only or name in args.only
    }
    if not can_isolate():
        print("left out: only root makes nodes of their own, with iproute2")
        return 0
    begun, wrong = time.monotonic(), 0
    with contextlib.closing(Network(3)) as network:
        for name, one in chosen.items():
            why = one.missing()
            lines = [] if why else judged(one, network)
            wrong += bool(lines)
            verdict = "; ".join(lines) or ("found" if one.kinds else "sound")
            print(f"{name}: {f'left out, {why}' if why else verdict}", flush=True)
    faults = len([one for one in chosen.values() if one.kinds])
    print(
        f"{faults} faults, {len(chosen) - faults} sound pairs, {wrong} wrong,"
        f" {time.monotonic() - begun:.0f} s"
    )
    return 1 if wrong else 0


def judged(one: Planted, network: Network) -> list[str]:
    """What was missed, and what was made up."""
    with tempfile.TemporaryDirectory(prefix="ckptsync-doctor-") as folder:
        found = dict(_found(one, network, Path(folder)))
    missed = [f"MISSED {kind}" for kind in sorted(one.kinds - set(found))]
    return missed + [f"MADE UP {kind} ({found[kind]})" for kind in sorted(set(found) - one.kinds)]


def _found(one: Planted, network: Network, home: Path) -> Iterator[tuple[str, str]]:
    """Each kind, with what it was about."""
    nodes = Nodes(home, network)
    for n in range(one.nodes):
        told = one.told if n == one.on or one.on is None else Told()
        told = replace(told, environment={**one.everywhere, **told.environment})
        words = ["--nodes"] if n == one.nodes - 1 else []
        with one.around(network, n):
            answer = nodes.asked(n, told, "--publish", *words)
        yield from (
            (finding["kind"], f"n{n}: {finding['subject']}: {finding.get('what', '')}")
            for finding in answer["findings"]
        )
    if one.is_compared:
        yield from (
            (finding["kind"], f"compared: {finding['subject']}")
            for finding in nodes.compared()["findings"]
        )


if __name__ == "__main__":
    sys.exit(main())
