"""Damage every vector in every way, and see that each damage is refused, does no harm, or is known
to be one that nothing covers.

    python -m tests.campaigns.damage --flips 40 --seed 1 [--only VECTOR]

One file at a time is deleted, cut, made longer, given a flipped bit, replaced by the same file of
another save, or swapped with another rank's. A merge that succeeds with other tensors than the
undamaged one's is SILENT, unless ``uncovered.py`` names those bytes with the reason.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass

from tests.campaigns.campaign import arguments, working
from tests.campaigns.damaged import Damage, Outcome, Patient, Way, damages
from tests.campaigns.uncovered import reason
from tests.support.vector import Vector, vectors

LOOKS = 8  # one damage in so many is shown to inspect and verify too
SHOWN = 40


@dataclass(frozen=True, slots=True)
class Told:
    """What came of all damages to one vector."""

    name: str
    counts: Counter[str]
    uncovered: Counter[str]
    findings: tuple[str, ...]


def main(argv: Sequence[str] | None = None) -> int:
    """0 if nothing was silent but what is known to be, 1 if something was."""
    args = _arguments().parse_args(argv)
    begun = time.monotonic()
    chosen = [v for v in vectors() if args.only in v.name]
    with ProcessPoolExecutor(2) as pool:
        told = list(
            pool.map(campaign, chosen, [args.flips] * len(chosen), [args.seed] * len(chosen))
        )
    for one in told:
        print(f"{one.name}: {_listed(one.counts)}")
    print(
        f"{_listed(sum((t.counts for t in told), Counter()))} in {time.monotonic() - begun:.0f} s,"
        f" seed {args.seed}"
    )
    for why, count in sum((t.uncovered for t in told), Counter[str]()).most_common():
        print(f"  not covered: {count} {why}")
    findings = [line for one in told for line in one.findings]
    for line in findings[:SHOWN]:
        print(f"FOUND {line}")
    print(
        f"{len(findings)} findings"
        + ("" if len(findings) <= SHOWN else f", the first {SHOWN} shown")
    )
    return 1 if findings else 0


def _arguments() -> argparse.ArgumentParser:
    parser = arguments(__doc__, "seed")
    parser.add_argument(
        "--flips", type=int, default=40, help="bits to flip in each stratum of each file"
    )
    parser.add_argument("--only", default="", help="vectors whose name has this in it")
    return parser


def campaign(of: Vector, flips: int, seed: int) -> Told:
    """Every damage to one vector."""
    dice = random.Random(f"{seed} {of.name}")
    told = Told(of.name, Counter(), Counter(), ())
    findings: list[str] = []
    # each trial writes a few files, and nothing of it is kept
    with working("damage", in_memory=True) as home:
        patient = Patient(of, home)
        if not patient.ways:
            findings.append(f"{of.name}: cannot be merged undamaged")
        for damage in damages(patient.files, patient.read(), flips, dice):
            for how, outcome in _outcomes(patient, damage, dice):
                why = (
                    reason(damage, outcome, patient.files)
                    if outcome.word in ("SILENT", "beside")
                    else None
                )
                told.counts[outcome.word if why is None else "uncovered"] += 1
                if why is not None:
                    told.uncovered[why] += 1
                elif outcome.word not in ("refused", "harmless", "looked"):
                    findings.append(
                        f"{outcome.word} {of.name}: {damage} ({damage.stratum or 'file'}), {how}:"
                        f" {outcome.said}"
                    )
    return Told(of.name, told.counts, told.uncovered, tuple(findings))


def _outcomes(
    patient: Patient, damage: Damage, dice: random.Random
) -> Iterator[tuple[str, Outcome]]:
    with patient.damaged(damage):
        for way in _ways(patient, damage):
            yield str(way), patient.merge(way)
        if dice.randrange(LOOKS) == 0:
            yield "looked at", patient.look()


def _ways(patient: Patient, damage: Damage) -> Sequence[Way]:
    """Those that read what is damaged; if none does, the first: it must not mind.

    What to merge is only chosen by names and sizes.
    """
    reading = [way for way in patient.ways if damage.content.keys() & way.strata.keys()]
    return [
        way for way in reading if way.source or damage.kind in ("delete", "cut", "grow")
    ] or patient.ways[:1]


def _listed(counts: Counter[str]) -> str:
    return ", ".join(f"{count} {word}" for word, count in counts.most_common())


if __name__ == "__main__":
    sys.exit(main())
