"""A worker beside saves of torchtitan, or of torch as that uses it, synchronous and not, with
rotation; trainers are killed in the middle of a save and go on.

    python -m tests.campaigns.titan --python .venv-titan/bin/python --modes disabled async --ranks 2
    3 --kills 2

Every save that was whole must be in the store, byte for byte, and every location that the store
calls COMPLETE must be such a save.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from ckptsync.catalogue.uncached import read_state
from ckptsync.stores.opening import create_store, open_store
from tests.campaigns.campaign import arguments, working
from tests.campaigns.cluster import Service
from tests.campaigns.nodes import kill_tree, start
from tests.campaigns.two_nodes import START, default_python, finish, torchrun
from tests.support.files_in_memory import contents
from tests.support.waiting import until

SCRIPT = Path(__file__).with_name("titan_training.py")
WORKER = {"quiet": "2s", "unmarked": "5s"}
KILLS = 2
# seconds before each step; a save lives about so long, and two are what a worker needs
PAUSE = 2.0
SLOW = 0.3  # seconds that each file takes
PATIENCE = 60.0  # seconds for the store to have everything


def main(argv: Sequence[str] | None = None) -> int:
    """0 if every promise was kept, 1 if not."""
    args = _arguments().parse_args(argv)
    wrong: list[str] = []
    for mode in args.modes:
        for ranks in (2, 3):
            with working("titan") as home:
                saves, found = campaign(home, args.python, mode, ranks)
            print(
                f"{mode}, {ranks} ranks: {saves} saves were whole; {len(found)} wrong",
                *found,
                sep="\n  ",
                flush=True,
            )
            wrong += found
    return 1 if wrong else 0


def campaign(home: Path, python: str, mode: str, ranks: int) -> tuple[int, list[str]]:
    """How many saves were whole, and what is wrong."""
    (home / "out").mkdir(parents=True)
    (home / "truth").mkdir()
    store = {"url": create_store(str(home / "store")).url}
    told = {"runs": [f"{home}/out/*"], **WORKER}
    worker = Service(home, "n0", "worker", store=store, worker=told)
    worker.start()
    dice, at = random.Random(1), 0
    try:
        for n in range(KILLS + 1):
            hit = at + dice.choice((2, 3, 4)) if n < KILLS else None
            last = _train(home, python, mode, ranks, at, hit=hit, rest=dice.uniform(0, 4 * SLOW))
            at = max(0, last - dice.choice((0, 1)))
        return _judged(home)
    finally:
        worker.kill()


def _train(
    home: Path, python: str, mode: str, ranks: int, begin: int, *, hit: int | None, rest: float
) -> int:
    """Five steps, or until it is killed ``rest`` seconds into the save of ``hit``.

    The last step that is whole there.
    """
    words = [home / "out" / "run", home / "truth", mode, begin, begin + 5, PAUSE, SLOW]
    command = [*torchrun(python, ranks, standalone=True), str(SCRIPT), *map(str, words)]
    for flag in (home / "truth").glob("saving-*"):
        flag.unlink()
    trainers = start(command, home / "trainers.log", env={**os.environ, "OMP_NUM_THREADS": "1"})
    try:
        if hit is None:
            assert finish([trainers], START) == [0], (home / "trainers.log").read_text()[-2000:]
        else:
            flag = home / "truth" / f"saving-{hit}"
            until(lambda: flag.exists() or trainers.poll() is not None, START)
            assert flag.exists(), f"{flag.name}: nobody began to save that"
            time.sleep(rest)
    finally:
        kill_tree(trainers)
    whole = sorted(
        int(path.parent.name[5:])
        for path in (home / "out" / "run" / "checkpoint").glob("step-*/.metadata")
    )
    return whole[-1] if whole else 0


def _judged(home: Path) -> tuple[int, list[str]]:
    truths = {path.name: contents(path) for path in sorted((home / "truth").glob("step-*"))}
    until(lambda: not [*_missed(home, truths)], PATIENCE, 1)
    torn = [
        f"{s.location}: COMPLETE, and of no save"
        for s in read_state(open_store(str(home / "store"))).readable
        if s.status == "COMPLETE"
        and contents(home / "store" / s.run / s.location) not in truths.values()
    ]
    return len(truths), [*_missed(home, truths), *torn]


def _missed(home: Path, truths: Mapping[str, Mapping[str, bytes]]) -> Iterator[str]:
    stored = [contents(path) for path in (home / "store" / "run").glob("step-*")]
    yield from (f"{name}: MISSED" for name, files in truths.items() if files not in stored)


def _arguments() -> argparse.ArgumentParser:
    parser = arguments(__doc__)
    parser.add_argument(
        "--modes", nargs="+", choices=("disabled", "async"), default=("disabled", "async")
    )
    parser.add_argument(
        "--python", default=default_python(), help="that has torchtitan, or torch alone"
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
