"""From a snapshot to its summary.  Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from ckptsync.catalogue.lost import gaps, ranges
from ckptsync.catalogue.summary import LINES, TOKENIZER, Proven, Summary
from ckptsync.digest import digest
from ckptsync.records.keep import kept
from ckptsync.records.model_record import ModelRecord
from ckptsync.records.report import LEVELS, Level, Report
from ckptsync.records.state import Snapshot, standing
from ckptsync.records.tombstone import fate

_STEP = re.compile(r"(?<![0-9])([0-9]{1,18})\Z")
_TOKENIZERS = (TOKENIZER, "vocab.", "spiece.", "sentencepiece.", "tekken.", "processor_config.", "preprocessor_config.")
_NO_DAMAGE = ("note", "nonfinite")


def summary(seen: Snapshot, mtimes: Mapping[str, float]) -> Summary:
    """``mtimes``: of its records, and of its files as far as they are known, in seconds on the store's clock."""
    conditions = seen.conditions
    there = seen.present().values()
    times = [mtimes.get(k.name, 0.0) for k in seen.manifests]
    stones = seen.records.tombstones
    fate_ = fate(stones, {k.name for k in seen.manifests})
    return Summary(
        run=seen.run,
        checkpoint=seen.checkpoint,
        location=seen.location,
        step=step(seen.checkpoint),
        status=seen.status,
        evidence=cut(damage(seen, mtimes) if seen.status == "DAMAGED" else seen.evidence),
        lacks=cut(conditions.resume.evidence),
        nodes=tuple(sorted({k.manifest.node for k in seen.manifests})),
        manifests=tuple(k.name for k in seen.manifests),
        model_record=seen.model_record_name,
        model_records=len(seen.records.model_records),
        reports=len(seen.records.reports),
        tombstones=len(seen.records.tombstones),
        files=len(seen.files),
        size=sum(size for _, size in there),
        model_files=len(seen.model_record.files) if seen.model_record else 0,
        model_size=sum(f.size for f in seen.model_record.files) if seen.model_record else 0,
        ended=max(k.manifest.ended - k.manifest.clock_offset for k in seen.manifests) / 1e9,
        first=min(times),
        arrived=max(times),
        model=conditions.model.holds,
        resume=conditions.resume.holds,
        consolidated=conditions.consolidated.holds,
        proof=proven(seen, mtimes),
        retired=conditions.retired,
        state=state(seen),
        let_go=fate_.shards,
        kept=kept(seen.records.keeps),
        said=max((mtimes.get(name, 0.0) for name in fate_.said), default=0.0),
        back=max((mtimes.get(name, 0.0) for name, t in stones.items() if t.stage == "back"), default=0.0),
        begun=fate_.is_begun,
        done=fate_.is_done,
        late=bool(seen.model_record)
        and not {k.name for k in seen.manifests}.issubset(seen.model_record.manifests if seen.model_record else ()),
        to_open=to_open(seen.model_record) if seen.model_record else (),
        ranks=_ranks(seen),
        gaps=gaps(seen) if seen.status == "ARRIVING" else (),
        left_out=cut(seen.model_record.left_out) if seen.model_record else (),
        siblings=tuple(replace(s, against=cut(s.against)) for s in seen.siblings),
    )


def _ranks(seen: Snapshot) -> tuple[tuple[str, str], ...]:
    found: dict[str, set[int]] = {}
    for known in seen.manifests:
        found.setdefault(known.manifest.node, set()).update(known.manifest.ranks)
    return tuple((node, ranges(ranks)) for node, ranks in sorted(found.items()) if ranks)


def to_open(model_record: ModelRecord) -> tuple[str, ...]:
    """Return what a model lacks to be opened: its configuration, its tokenizer (or another processor of its input)."""
    names = {f.path for f in model_record.files}
    is_adapter = any(name.startswith("adapter_model") for name in names)
    config = "adapter_config.json" if is_adapter else "config.json"
    has_tokenizer = any(name.startswith(_TOKENIZERS) for name in names)
    return (*(() if config in names else (config,)), *(() if has_tokenizer else (TOKENIZER,)))


def step(checkpoint: str) -> int | None:
    """The number at the end of a checkpoint's name; ``None`` if it ends in none, as ``final`` does."""
    found = _STEP.search(checkpoint)
    return int(found[1]) if found else None


def cut(lines: Sequence[str]) -> tuple[str, ...]:
    """At most `LINES` of them, then how many more there are."""
    return tuple(lines) if len(lines) <= LINES else (*lines[:LINES], f"and {len(lines) - LINES} more")


def damage(seen: Snapshot, mtimes: Mapping[str, float]) -> tuple[str, ...]:
    """Return what the reports that nobody has answered found; of a file that was written since, that it has to be verified."""
    said = max((mtimes.get(name, 0.0) for name in seen.conditions.proof.damage), default=0.0)
    wrong = [f for f in standing(seen) if f.kind not in _NO_DAMAGE]
    again = {f.name for f in wrong if mtimes.get(f"{seen.run}/{f.name}", 0.0) > said}
    wrong.sort(key=lambda f: f.name in again)
    return tuple(
        dict.fromkeys(
            f"{f.name}: {'uploaded again, not yet verified' if f.name in again else f'{f.kind}: {f.detail}'}" for f in wrong
        )
    )


def proven(seen: Snapshot, mtimes: Mapping[str, float]) -> Proven:
    """What its reports prove, and when the store took them."""
    proof = seen.conditions.proof
    complained = {f"{seen.run}/{f.name}" for r in _unanswered(seen) for f in r.findings if f.kind not in _NO_DAMAGE}
    return Proven(
        report=proof.report,
        verdict=proof.verdict,
        level=proof.level,
        when=mtimes.get(proof.report, 0.0),
        holds=proof.holds,
        passed=_passed(seen, mtimes),
        damage=proof.damage,
        asked=max((r.level for r in _unanswered(seen)), key=LEVELS.index, default=None),
        said=max((mtimes.get(name, 0.0) for name in proof.damage), default=0.0),
        changed=max((mtimes.get(name, 0.0) for name in complained), default=0.0),
    )


def state(seen: Snapshot) -> str:
    """A digest of the names of all records that say something about it."""
    records = seen.records
    names = (*(k.name for k in seen.manifests), *records.model_records, *records.reports, *records.tombstones, *records.keeps)
    return digest("\n".join(sorted(names)).encode())[:16]


def _unanswered(seen: Snapshot) -> Iterable[Report]:
    return [seen.records.reports[name] for name in seen.conditions.proof.damage]


def _passed(seen: Snapshot, mtimes: Mapping[str, float]) -> tuple[tuple[Level, float], ...]:
    names = set() if seen.conditions.shards else {k.name for k in seen.manifests}
    last: dict[Level, float] = {}
    for name, report in seen.records.reports.items():
        if report.verdict == "ok" and names.issubset(report.manifests) and report.model_record == seen.model_record_name:
            last[report.level] = max(last.get(report.level, 0.0), mtimes.get(name, 0.0))
    return tuple((level, last[level]) for level in LEVELS if level in last)
