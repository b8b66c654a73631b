"""Moving files to a server and back, side by side with what users would otherwise run: ``python -m
benchmarks.transfer --one 4 --rounds 5``.

One server for all tools of a table, on this machine; each tool a whole process, once a round, in an
order that turns; an empty bucket (or directory) for each upload, an empty directory for each
download; and after each run every byte's digest is looked at.  ckptsync digests what it sends and
what it brings, and its uploads end with a manifest.  ``benchmarks.transfer_report`` makes tables of
what this writes.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random
from typing import Literal

from benchmarks.contest import Contest
from benchmarks.machine import file_system
from benchmarks.measure import Run
from benchmarks.movers import CHECKPOINT, CKPTSYNC, HERE, OVER_S3, OVER_SFTP, Mover
from benchmarks.places import Digests, Place, digests, s3, sftp
from benchmarks.running import held, measured
from benchmarks.transfer_merge import OURS, THEIRS, Merge

MIB = 1 << 20
MERGE = "S3 to S3"
Direction = Literal["up", "down"]


@dataclass(frozen=True)
class Case:
    """``sizes`` are the files', in bytes."""

    title: str
    over: Literal["s3", "sftp"]
    sizes: tuple[int, ...]
    directions: tuple[Direction, ...] = ("up", "down")


def main() -> None:
    """Run the comparisons that are asked for, and write what came of them."""
    args = _arguments().parse_args()
    args.work.mkdir(parents=True, exist_ok=True)
    settings = {
        key: value
        for key, value in vars(args).items()
        if key in ("one", "many", "small", "mix", "sftp", "merge", "rounds", "tools")
    }
    args.json.parent.mkdir(parents=True, exist_ok=True)
    results = []
    for contest in _all(args):  # each is written at once: a run of an hour may be ended
        results.append(asdict(contest))
        told = {
            "settings": settings,
            "file_system": file_system(args.work.resolve()),
            "contests": results,
        }
        args.json.write_text(json.dumps(told, indent=1))


def _all(args: argparse.Namespace) -> Iterator[Contest]:
    for over in ("s3", "sftp"):
        with (
            tempfile.TemporaryDirectory(dir=args.work, prefix="transfer-") as name,
            _server(over, Path(name)) as fresh,
        ):
            for case in _cases(args):
                if case.over == over:
                    yield from _contests(case, fresh, Path(name), args)
            if over == "s3" and args.merge and args.only in MERGE:
                yield _merge(fresh, Path(name), args)


def _arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--one", type=float, default=0.5, help="GiB of the one large file")
    parser.add_argument("--many", type=int, default=8, help="files of 64 MiB")
    parser.add_argument("--small", type=int, default=500, help="files of 4 to 64 KiB")
    parser.add_argument(
        "--mix", type=int, default=64, help="MiB of each of a checkpoint's 8 large files"
    )
    parser.add_argument("--sftp", type=float, default=0.25, help="GiB of the large file over SFTP")
    parser.add_argument(
        "--merge", type=float, default=0.0, help="GiB of float32 weights of the merge"
    )
    parser.add_argument(
        "--generator",
        type=Path,
        default=Path(sys.executable),
        help="a Python that has torch, to make what is merged",
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", default="", help="cases whose title has this")
    parser.add_argument(
        "--tools",
        default="",
        help=(
            "only these, by the first letters of their names, with commas; ckptsync's is always"
            " there"
        ),
    )
    parser.add_argument(
        "--work",
        type=Path,
        default=Path("/dev/shm"),  # noqa: S108
        help="room for four times the largest case; better no disk",
    )
    parser.add_argument(
        "--json",
        type=Path,
        default=Path("build/bench/transfer.json"),
        help="where every round is written",
    )
    return parser


def _cases(args: argparse.Namespace) -> Iterator[Case]:
    draw = Random(1)  # noqa: S311 - sizes, not secrets
    small = tuple(draw.randrange(4 << 10, 64 << 10) for _ in range(args.small))
    mix = (*(args.mix * MIB,) * 8, *(draw.randrange(4 << 10, 64 << 10) for _ in range(24)))
    checkpoint = f"a checkpoint (8 files of {args.mix} MiB, 24 of 4 to 64 KiB)"
    cases = (
        Case(f"S3, {checkpoint}", "s3", mix if args.mix else ()),
        Case(f"S3, 1 file of {args.one:g} GiB", "s3", (int(args.one * 2**30),)),
        Case(f"S3, {args.many} files of 64 MiB", "s3", (64 * MIB,) * args.many),
        Case(f"S3, {args.small:,} files of 4 to 64 KiB", "s3", small),
        Case(f"SFTP, {checkpoint}", "sftp", mix if args.mix else ()),
        Case(f"SFTP, 1 file of {args.sftp:g} GiB", "sftp", (int(args.sftp * 2**30),)),
        Case(f"SFTP, {args.small:,} files of 4 to 64 KiB", "sftp", small),
    )
    yield from (case for case in cases if args.only in case.title and any(case.sizes))


def _server(over: str, work: Path) -> contextlib.AbstractContextManager[Callable[[], Place]]:
    return s3(work) if over == "s3" else sftp(work)


def _contests(
    case: Case, fresh: Callable[[], Place], work: Path, args: argparse.Namespace
) -> Iterator[Contest]:
    source = work / "run" / "checkpoint-1"
    generate(source, case.sizes)
    wanted = digests(source)
    movers = [
        m
        for m in (OVER_S3 if case.over == "s3" else OVER_SFTP)
        if m is CKPTSYNC or _is_asked_for(m, args.tools)
    ]
    for direction in case.directions:
        found = Contest(f"{case.title}, {direction}", "warm", sum(case.sizes), CKPTSYNC.name)
        road = _Up(source, fresh, work) if direction == "up" else _Down(source, fresh, work)
        yield held(found, movers, road, wanted, args.rounds)
    shutil.rmtree(source)


def _merge(fresh: Callable[[], Place], work: Path, args: argparse.Namespace) -> Contest:
    road = Merge(args.merge, args.generator, fresh, work)
    return held(road.contest(args.merge), (OURS, THEIRS), road, {}, args.rounds)


def _is_asked_for(mover: Mover, names: str) -> bool:
    return not names or any(mover.name.startswith(name) for name in names.split(","))


def generate(folder: Path, sizes: Sequence[int]) -> None:
    """Files of random bytes, and a sign that a trainer was done with them."""
    folder.mkdir(parents=True)
    for number, size in enumerate(sizes):
        with (folder / f"part-{number:05}.dat").open("wb") as file:
            for start in range(0, size, MIB):
                file.write(os.urandom(min(MIB, size - start)))
    (folder / "trainer_state.json").write_text("{}\n")


class _Up:
    """From one directory to a new place each time."""

    def __init__(self, source: Path, fresh: Callable[[], Place], work: Path) -> None:
        self._source, self._fresh, self._log = source, fresh, work / "log"

    def measured(self, mover: Mover, wanted: Digests) -> tuple[Run, str]:
        place = self._fresh()
        try:
            assert mover.up
            run = measured(mover.up(self._source, place), place, self._log)
            arrived = {
                name.removeprefix(f"{HERE}/"): d
                for name, d in place.digests().items()
                if name.startswith(f"{HERE}/")
            }
            return run, _compared(arrived, wanted)
        finally:
            place.clear()

    def close(self) -> None:
        pass


class _Down:
    """From one place, which `ckptsync push` has filled, to a new directory each time."""

    def __init__(self, source: Path, fresh: Callable[[], Place], work: Path) -> None:
        self._place, self._work = fresh(), work
        assert CKPTSYNC.up
        measured(CKPTSYNC.up(source, self._place), self._place, work / "log")

    def measured(self, mover: Mover, wanted: Digests) -> tuple[Run, str]:
        target = self._work / "brought"
        try:
            assert mover.down
            run = measured(mover.down(target, self._place), self._place, self._work / "log")
            below = target / CHECKPOINT
            return run, _compared(digests(below if below.is_dir() else target), wanted)
        finally:
            shutil.rmtree(target, ignore_errors=True)

    def close(self) -> None:
        self._place.clear()


def _compared(arrived: Digests, wanted: Digests) -> str:
    return (
        "same bytes"
        if arrived == wanted
        else f"OTHER BYTES in {len(wanted.items() ^ arrived.items())}"
    )


if __name__ == "__main__":
    main()
