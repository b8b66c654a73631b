"""Damage a real store in every way, thousands of times, and ask the public command: everything has
to be found by level digest, and nothing else.

    python -m tests.campaigns.flips --flips 10000 --pages 1000 --others 200 --clean 10000 --store
    posix --seed 1

Single bits are turned over, pages zeroed, files cut, swapped with each other, replaced by what was
stored under that name in another save, deleted; files are added that no record names.  Over shards
and consolidated output alike, in one to eight files at once.  Each time `ckptsync verify --json`
has to name exactly these files, a range with the very byte, and exit with 10; after each repair,
and for each clean look, it has to find nothing.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import io
import json
import os
import random
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ckptsync
from ckptsync.cli.main import main as command
from ckptsync.head.consolidate import HeadOptions
from ckptsync.records.report import DAMAGE
from ckptsync.safe_names import RECORDS
from ckptsync.stores.contract import Store, read_all
from ckptsync.stores.opening import create_store, open_any
from tests.campaigns.campaign import arguments, new_store, working
from tests.support.head_in_process import consolidate_due
from tests.support.worker_in_process import push_now

DATA = Path(ckptsync.__file__).parent / "demo_data"
PAGE = 4096
MOST = 8  # files at once
_SHOWN = 20


@dataclass(frozen=True, slots=True)
class Harm:
    """What was done: store name → the content there is now (``None``: deleted), and the byte that
    must be in a range (-1: any).
    """

    kind: str
    content: Mapping[str, bytes | None]
    at: Mapping[str, int]
    is_damage: bool = True


class Patient:
    """A store with two runs, whole and consolidated.

    ``good``: the bytes of every file of theirs.
    """

    def __init__(self, url: str, options: Mapping[str, object]) -> None:
        self.url, self._looks = url, 0
        store = create_store(url, options)
        for run in ("fsdp2", "zero3"):
            for node in ("node0", "node1"):
                push_now(DATA / run / node, store, node, run)
        base = str(DATA / "base")
        while consolidate_due(store, HeadOptions(config_from={"*": base})).made:
            pass
        self.store: Store = open_any(url, options)
        names = [
            e.name
            for e in store.names("")
            if f"/{RECORDS}/" not in e.name and not e.name.startswith(RECORDS)
        ]
        self.good = {name: read_all(store, name) for name in names}

    def suffer(self, harm: Harm) -> None:
        for name, data in harm.content.items():
            if data is None:
                self.store.delete(name)
            else:
                self.store.write(name, [data])

    def recover(self, harm: Harm) -> None:
        for name in harm.content:
            if name in self.good:
                self.store.write(name, [self.good[name]])
            else:
                self.store.delete(name)

    def verified(self) -> tuple[int, list[dict[str, Any]]]:
        """What the public command says: exit code, reports.

        It keeps what it has imported from the collector, and here also what it has left.
        """
        self._looks += 1
        if self._looks % 20 == 0:
            gc.unfreeze()
            gc.collect()
        out = io.StringIO()
        with contextlib.redirect_stdout(out):
            code = command(["verify", "--store", self.url, "--level", "digest", "--json"])
        return code, json.loads(out.getvalue())["reports"]


def flip(patient: Patient, chance: random.Random) -> Harm:
    return _changed(
        "flip", patient, chance, lambda data, at: _flipped(data, at, chance.randrange(8))
    )


def page(patient: Patient, chance: random.Random) -> Harm:
    """One that is not zero already."""

    def zeroed(data: bytes, at: int) -> bytes:
        start = at // PAGE * PAGE
        return data[:start] + bytes(len(data[start:][:PAGE])) + data[start + PAGE :]

    return _changed("page", patient, chance, zeroed)


def cut(patient: Patient, chance: random.Random) -> Harm:
    content = {
        name: patient.good[name][: chance.randrange(len(patient.good[name]))]
        for name in _some(patient, chance)
    }
    return Harm("cut", content, dict.fromkeys(content, -1))


def swapped(patient: Patient, chance: random.Random) -> Harm:
    """With a file of another content, of the same size where there is one."""
    first = chance.choice(sorted(patient.good))
    others = sorted(name for name in patient.good if patient.good[name] != patient.good[first])
    alike = [name for name in others if len(patient.good[name]) == len(patient.good[first])]
    second = chance.choice(alike or others)
    return Harm(
        "swapped",
        {first: patient.good[second], second: patient.good[first]},
        {first: -1, second: -1},
    )


def stale(patient: Patient, chance: random.Random) -> Harm:
    """What another save stored under that last name.

    Or a file of which some pages are another file's.
    """
    name = chance.choice(sorted(patient.good))
    good = patient.good[name]
    last = name.rpartition("/")[2]
    older = [
        data
        for other, data in sorted(patient.good.items())
        if other.rpartition("/")[2] == last and data != good
    ]
    data = (
        chance.choice(older)
        if older
        else good[: len(good) // 2] + bytes(b ^ 0xFF for b in good[len(good) // 2 :])
    )
    return Harm("stale", {name: data}, {name: -1})


def missing(patient: Patient, chance: random.Random) -> Harm:
    content: dict[str, bytes | None] = dict.fromkeys(_some(patient, chance))
    return Harm("missing", content, dict.fromkeys(content, -1))


def extra(patient: Patient, chance: random.Random) -> Harm:
    """Beside a file of a checkpoint or of a model: told, and no damage."""
    beside = chance.choice(sorted(patient.good)).rpartition("/")[0]
    name = f"{beside}/extra-{chance.randrange(1 << 30)}.safetensors"
    return Harm("extra", {name: b"x" * chance.randrange(1, 9000)}, {}, is_damage=False)


OTHERS = (cut, swapped, stale, missing, extra)


def _some(patient: Patient, chance: random.Random) -> list[str]:
    return chance.sample(
        sorted(name for name, data in patient.good.items() if data), chance.randrange(1, MOST + 1)
    )


def _changed(
    kind: str, patient: Patient, chance: random.Random, change: Callable[[bytes, int], bytes]
) -> Harm:
    content: dict[str, bytes | None] = {}
    where: dict[str, int] = {}
    for name in _some(patient, chance):
        good, data, at = patient.good[name], patient.good[name], 0
        while data == good:
            at = chance.randrange(len(good))
            data = change(good, at)
        content[name] = data
        where[name] = next(i for i in range(len(good)) if good[i] != data[i])
    return Harm(kind, content, where)


def _flipped(data: bytes, at: int, bit: int) -> bytes:
    return data[:at] + bytes([data[at] ^ 1 << bit]) + data[at + 1 :]


def judged(harm: Harm | None, code: int, reports: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """What is not as it should be."""
    told = [(f"{r['run']}/{f['name']}", f) for r in reports for f in r["findings"]]
    found = {name: f for name, f in told if f["kind"] in DAMAGE}
    wanted = set(harm.content) if harm and harm.is_damage else set()
    if code != (10 if wanted else 0):
        yield f"exit code {code}"
    if set(found) != wanted:
        yield f"missed {sorted(wanted - set(found))}, made up {sorted(set(found) - wanted)}"
    for name, at in harm.at.items() if harm else ():
        if (
            at >= 0
            and name in found
            and not any(start <= at < end for start, end in found[name]["ranges"])
        ):
            yield f"{name}: byte {at} is in none of {found[name]['ranges']}"
    notes = {name for name, f in told if f["kind"] == "note"}
    if harm and not harm.is_damage and not set(harm.content) <= notes:
        yield f"did not tell of {sorted(set(harm.content) - notes)}"


def suffered(patient: Patient, harms: Iterator[Harm]) -> Iterator[tuple[Harm | None, str]]:
    """Each harm, then health again, every so often looked at."""
    for number, harm in enumerate(harms):
        patient.suffer(harm)
        yield from ((harm, text) for text in judged(harm, *patient.verified()))
        patient.recover(harm)
        if number % 50 == 0:
            yield from ((None, text) for text in judged(None, *patient.verified()))


def plan(patient: Patient, args: argparse.Namespace, counts: Counter[str]) -> Iterator[Harm]:
    """As many as were asked for; flips and pages are counted one by one."""
    chance = random.Random(args.seed)
    for make, most in (
        (flip, args.flips),
        (page, args.pages),
        *((make, args.others) for make in OTHERS),
    ):
        while counts[make.__name__] < most:
            harm = make(patient, chance)
            counts[make.__name__] += len(harm.content) if make in (flip, page) else 1
            counts["looks"] += 1
            yield harm


def main(argv: Sequence[str] | None = None) -> int:
    """0 if all was found and nothing made up."""
    args = _arguments().parse_args(argv)
    begun, counts, wrong = time.monotonic(), Counter[str](), []
    with working("flips", in_memory=True) as home:
        url, options = new_store(args.store, home)
        if options:
            os.environ["CKPTSYNC_STORAGE_OPTIONS"] = json.dumps(options)
        patient = Patient(url, options)
        for harm, text in suffered(patient, plan(patient, args, counts)):
            wrong.append(f"{harm.kind if harm else 'after repair'}: {text}")
        for _ in range(args.clean):
            wrong += [f"clean: {text}" for text in judged(None, *patient.verified())]
            counts["clean"] += 1
    for line in wrong[:_SHOWN]:
        print(f"FOUND {line}")
    said = ", ".join(f"{count} {what}" for what, count in counts.items())
    print(
        f"{args.store}: {said}: {len(wrong)} wrong, in {time.monotonic() - begun:.0f} s, seed"
        f" {args.seed}"
    )
    return 1 if wrong else 0


def _arguments() -> argparse.ArgumentParser:
    parser = arguments(__doc__, "seed")
    parser.add_argument("--flips", type=int, default=10_000, metavar="N")
    parser.add_argument("--pages", type=int, default=1000, metavar="N")
    parser.add_argument("--others", type=int, default=200, metavar="N", help="of each other kind")
    parser.add_argument("--clean", type=int, default=10_000, metavar="N")
    parser.add_argument("--store", choices=("posix", "s3"), default="posix")
    return parser


if __name__ == "__main__":
    sys.exit(main())
