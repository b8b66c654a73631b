"""Which location to verify next, and how closely.  Times are seconds on the store's clock.

Repairs and new locations are due at once.  Everything else is read again within the period, spread
evenly over it: an old location is due when its time has come, or when those behind it would have to
be read faster, later, than all bytes divided by the period.  So a store that was verified in one
night is not read again in one night, and nothing is remembered but the reports' times.

A location is verified as a whole, since a report is about one; `limits.bandwidth` paces reading.
Imports nothing that verifies: a head asks often, and leaves the rest to its child processes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from ckptsync.catalogue.child_job import Job
from ckptsync.catalogue.location_summary import Catalogue, Summary, summarize
from ckptsync.catalogue.uncached import read_location
from ckptsync.errors import Unsupported
from ckptsync.records.io import is_made_anew
from ckptsync.records.report import LEVELS, Level
from ckptsync.stores.contract import Store

RETRY = 600.0
"""Seconds until unchanged damage is read again; doubled with each report, so that few pile up."""
LastProof = tuple[float, Summary]
"""When a location was last found well."""
MERGED_WITHIN = 300.0
"""Seconds in which a complete checkpoint may still be consolidated: else it would be read twice."""
SPARE = 0.1
"""Share of the period by which reading is planned earlier, for heads and stores that are away."""


@dataclass(frozen=True, slots=True)
class VerifyPolicy:
    """How closely each location is verified, and within how many seconds it is read again."""

    level: Level = "digest"
    every: float = 7 * 86400.0


def due_in_store(
    store: Store,
    catalogue: Catalogue,
    policy: VerifyPolicy,
    now: float,
) -> tuple[Job, ...]:
    """Return what is due, also locations that a damaged record hides from the catalogue.

    A report has to say that.  Ages count on the store's clock: at least its newest file's time, and
    ``now`` where nothing writes.  Raises StoreError.
    """
    newer = {(f.run, f.location) for f in catalogue.faults if isinstance(f.error, Unsupported)}
    hiding = (f for f in catalogue.faults if not is_made_anew(f.record, f.error))
    locations = list(catalogue.summaries)
    for run, location in sorted({(f.run, f.location) for f in hiding} - newer):
        found = read_location(store, run, location)
        if seen := found.of(run, location):
            locations.append(summarize(seen, found.mtimes))
    return due(locations, policy, max(now, catalogue.clock))


def due(locations: Iterable[Summary], policy: VerifyPolicy, now: float) -> tuple[Job, ...]:
    """Return verifications that are due, in this order.

    Damaged files that were uploaded again; locations that were never verified, the newest first;
    other damage, in case that it passed; the rest, the longest unread first.
    """
    found: list[tuple[int, Summary, Level]] = []
    proven: list[LastProof] = []
    for seen in locations:
        proof = seen.proof
        if seen.retired or seen.status == "CONFLICT":
            continue
        if proof.damage:
            # Only a report at the level that found the damage, or above, answers it.
            level = max(policy.level, proof.damage_level or "stat", key=LEVELS.index)
            patience = min(policy.every, RETRY * 2 ** min(len(proof.damage) - 1, 20))
            if proof.rewritten_at > proof.damaged_at:
                found.append((0, seen, level))
            elif now - proof.damaged_at >= patience:
                found.append((2, seen, level))
        elif not seen.model:
            if any(gap.node for gap in seen.gaps):  # a node says that it sent what is not there
                found.append((1, seen, "stat"))
        elif (last := _last_proof(seen, policy.level)) is not None:
            proven.append((last, seen))
        elif seen.consolidated or now - seen.arrived >= min(MERGED_WITHIN, policy.every):
            found.append((1, seen, policy.level))
    found.sort(key=lambda one: (one[0], -one[1].arrived, one[1].run, one[1].location))
    found += [(3, seen, policy.level) for seen in _old(proven, policy, now)]
    return tuple(_job(seen, level) for _, seen, level in found)


def _job(seen: Summary, level: Level) -> Job:
    size = seen.size + seen.model_size
    return Job("verify", seen.run, seen.location, size, level, f"{level} {seen.state}")


def _last_proof(seen: Summary, level: Level) -> float | None:
    """Return when a report last found these very manifests and this very model record well.

    At ``level``, or at level digest, which reads every byte: above it, what can be reached is up to
    the files, and a raised level is reached when the location's turn comes.
    """
    least = min(LEVELS.index(level), LEVELS.index("digest"))
    times = (when for at, when in seen.proof.passed if LEVELS.index(at) >= least)
    return max(times, default=None)


def _old(proven: list[LastProof], policy: VerifyPolicy, now: float) -> Iterator[Summary]:
    """Yield the proven locations whose turn it is, the longest unread first.

    ``slack`` says for how many bytes reading can wait and, at the even rate, meet every deadline.
    """
    proven.sort(key=lambda one: (one[0], one[1].run, one[1].location))
    sizes = [max(1, seen.size + seen.model_size) for _, seen in proven]
    period = policy.every * (1 - SPARE)
    rate = sum(sizes) / max(period, 1e-9)  # a period of 0: always
    slack, before = float("inf"), 0
    for (last, _), size in zip(proven, sizes, strict=True):
        slack = min(slack, rate * (last + period - now) - before)
        before += size
    for (_, seen), size in zip(proven, sizes, strict=True):
        if slack > 0:
            return
        yield seen
        slack += size
