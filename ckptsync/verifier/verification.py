"""Verify what a user names or the schedule says is due: a store, run, location or directory.

`resolve_target` says what a URL means.  `verify_location` compares a location with its records;
`verify_directory` a directory with its own metadata, with the CRC32s of torch's archives, and with
a baseline if there is one.  Reports on a location are written to its store, so that `ls`, `status`,
`repair` and workers act on them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field, replace

from ckptsync.catalogue.uncached import StoreState, not_found, read_location, read_state
from ckptsync.catalogue.unnamed_files import find_unnamed
from ckptsync.errors import Corrupt, Incomplete, Unsupported
from ckptsync.layouts import registry
from ckptsync.records.io import Fault, next_number, read_records
from ckptsync.records.location_status import (
    LocationState,
    group_records,
    record_names,
    unanswered_findings,
)
from ckptsync.records.model_record import ModelTensor
from ckptsync.records.report import LEVELS, Level, Reading, Report, VerifyFinding
from ckptsync.records.store_paths import checkpoint_of, consolidated_prefix
from ckptsync.safe_names import CONSOLIDATED, RECORDS
from ckptsync.stores import path_or_url
from ckptsync.stores.checkpoint_files import FileTree, StoreFiles
from ckptsync.stores.clock import wait_until_visible
from ckptsync.stores.contract import Store
from ckptsync.stores.opening import Access
from ckptsync.stores.path_or_url import PathOrUrl
from ckptsync.stores.urls import located
from ckptsync.threads import ThreadPool
from ckptsync.verifier.expected_files import (
    ExpectedFile,
    check_records,
    check_sizes,
    directory_file,
    directory_files,
    expected_files,
    note_gaps,
    note_unnamed,
)
from ckptsync.verifier.level_digest import Sample, check_crc32s, check_digests, digest_file
from ckptsync.verifier.level_load import load_files, require
from ckptsync.verifier.level_parse import (
    INCOMPLETE,
    UNPARSED,
    check_checkpoint,
    check_model,
    reached_level,
)
from ckptsync.verifier.tracked_files import CountedSource, ReadProgress, TrackedFiles, no_progress
from ckptsync.verifier.write_reports import is_news, verdict, worst_first

NO_DIGESTS = "nothing recorded the digests of these files, so damage to values would not be seen"
_THREADS = 4


@dataclass(frozen=True, slots=True)
class VerifyOptions:
    """How to verify.  ``now`` is the time that reports show; ``baseline`` is of a directory.

    With a ``sample`` no more is claimed than level stat, unless there is damage.
    ``always_report``: a report is news also where the store says the same.  ``expect`` gets the
    bytes that will be read, before they are.
    """

    level: Level
    now: float = 0.0
    sample: Sample | None = None
    baseline: tuple[ExpectedFile, ...] | None = None
    progress: ReadProgress = no_progress
    expect: ReadProgress = no_progress
    always_report: bool = False
    wait: Callable[[float], object] = time.sleep


@dataclass(frozen=True, slots=True)
class InStore:
    """A store, and what of it was named: everything, a run, or a location of a run."""

    store: Store
    run: str = ""
    location: str = ""


@dataclass(frozen=True, slots=True)
class PlainDirectory:
    """A directory outside every store."""

    source: PathOrUrl
    access: Access = field(default_factory=Access, compare=False)


@dataclass(frozen=True, slots=True)
class Verified:
    """What was found of one location, and its report; ``news`` is None if the store has that."""

    report: Report
    news: Report | None = None


def resolve_target(url: str, access: Access | None = None) -> InStore | PlainDirectory:
    """Return what a URL means: a store, a directory inside one, or any other directory.

    Inside a store, the files of a consolidated model, and the records, mean their location.
    """
    source, access = located(url), access or Access()
    found = path_or_url.enclosing_store(source, access)
    if found is None:
        return PlainDirectory(source, access)
    store, parts = found
    if len(parts) > 1 and parts[1] in (CONSOLIDATED, RECORDS):
        parts = (parts[0], *parts[2:])
    return InStore(store, *parts[:2])


def verify(where: InStore | PlainDirectory, options: VerifyOptions) -> Iterator[Verified]:
    """Verify each location; yield each as it is done.  The caller writes the news (`write_report`).

    Raises ConfigError if nothing is there, and Unsupported, after all the others, for a location
    with records that a newer program wrote.
    """
    if isinstance(where, PlainDirectory):
        files = path_or_url.list_tree(where.source, where.access)
        options.expect(_bytes_to_read(files.sizes().values(), options))
        yield Verified(verify_directory(files, path_or_url.pure_path(where.source).name, options))
        return
    run, location = where.run, where.location
    found = read_location(where.store, run, location) if location else read_state(where.store, run)
    named = {(s.run, s.location) for s in found.locations}
    named |= {(f.run, f.location) for f in found.faults}
    if run and not named:
        raise not_found(where.store, run, location)
    newer = {one: found.newer(*one) for one in sorted(named)}
    options.expect(sum(_bytes_to_read(s.sizes.values(), options) for s in found.locations))
    for one in (one for one, error in newer.items() if error is None):
        report, is_judged = _verify_readable(where.store, found, *one, options)
        seen = found.of(*one)
        news = report
        if seen and options.sample and report.verdict == "damaged":
            # A sample knows nothing of the files that it left out: findings about them stay.
            findings = (*report.findings, *unanswered_findings(seen))
            news = replace(report, findings=worst_first(findings))
        reports = seen.records.reports if seen else _read_reports(where.store, found, *one)
        is_new = options.always_report or is_news(news, reports, found.mtimes)
        yield Verified(report, news if is_judged and is_new else None)
    for error in newer.values():
        if error is not None:
            raise error


def _bytes_to_read(sizes: Iterable[int], options: VerifyOptions) -> int:
    share = options.sample.share if options.sample else 1.0
    return 0 if options.level == "stat" else int(share * sum(sizes))


def _verify_readable(
    store: Store,
    found: StoreState,
    run: str,
    location: str,
    options: VerifyOptions,
) -> tuple[Report, bool]:
    """Return a report, and whether the location could be judged: else it must not be written.

    Damaged manifests are reported also where no other can be read: what was read of them before is
    kept by others, and a report has them read again.
    """
    seen, faults = found.of(run, location), found.faults_of(run, location)
    unread = Report(run, checkpoint_of(location), location, 0, "stat", "damaged", (), "", 0, ())
    unread = replace(unread, when=options.now)
    if seen is None:
        is_damaged = any(f.record.kind == "manifest" and f.finding.kind == "digest" for f in faults)
        return replace(unread, findings=tuple(fault.finding for fault in faults)), is_damaged
    try:
        return verify_location(store, seen, options, faults), True
    except Incomplete as e:  # it is being deleted, or moves
        note = (VerifyFinding("note", location, str(e)),)
        return replace(unread, level=options.level, verdict="incomplete", findings=note), False


def _read_reports(store: Store, found: StoreState, run: str, location: str) -> Mapping[str, Report]:
    """Return the reports about a location without a readable manifest, by name."""
    names = (
        name
        for name in record_names(found.mtimes).values()
        if (name.run, name.location, name.kind) == (run, location, "report")
    )
    return group_records(read_records(store, names)[0]).reports


def verify_location(
    store: Store,
    seen: LocationState,
    options: VerifyOptions,
    faults: Sequence[Fault] = (),
) -> Report:
    """Return a report of what ``seen`` says is there, numbered after those that it knows.

    ``faults`` are its records that cannot be read.  Nothing is called missing or short before this
    machine must see what others wrote (`Store.late`).  Raises StoreError where the store does not
    answer, which is no damage, and Incomplete if the location changed meanwhile.
    """
    require(options.level)
    conditions, name = seen.conditions, seen.location
    files = expected_files(seen)
    there = [f for f in files if seen.sizes.get(f.name) == f.size]
    title = consolidated_prefix(seen.run, name).removeprefix(f"{seen.run}/").rstrip("/")
    own = [f for f in there if f.is_own]
    made = [f for f in there if f.is_consolidated]
    tensors = seen.model_record.tensors if seen.model_record else None
    source = CountedSource(store, options.progress)
    has_shards = not (conditions.conflict or conditions.shards)
    with ExitStack() as opened:
        trees = []
        for shown, its in ((name, own), (title, made)):
            tree = StoreFiles(store, {f.path: (f.name, f.size) for f in its})
            tracked = source.track(tree, shown, {f.path: f.shown for f in its})
            trees.append(opened.enter_context(closing(tracked)))
        found, readings, read = _check_levels(
            options, source, files, there, trees, tensors=tensors, has_shards=has_shards
        )
    found += [
        *check_sizes(files, seen.sizes),
        *check_records(seen),
        *note_unnamed(seen, find_unnamed(store, seen)),
    ]
    gone = {f.name for f in found if f.kind in ("missing", "size")}
    found += [fault.finding for fault in faults]
    if conditions.conflict:
        found.append(
            VerifyFinding("note", name, f"conflict, and so not verified: {conditions.conflict}")
        )
    else:
        found += note_gaps(seen)
    if gone and conditions.retired:  # a tombstone says that these files are deleted
        for i, finding in enumerate(found):
            if finding.kind in ("missing", "size"):
                found[i] = replace(finding, kind="note", detail=f"deleted: {finding.detail}")
    elif gone:
        wait_until_visible(store, options.wait)
        _recheck_missing(store, seen, gone)
    findings = worst_first(found)
    is_whole = not conditions.conflict and (conditions.model.holds or bool(conditions.retired))
    judged = verdict(findings, is_incomplete=not is_whole)
    reports = (*seen.records.reports, *(fault.name for fault in faults))
    reached = reached_level(options.level, findings)
    return Report(
        seen.run,
        seen.checkpoint,
        name,
        next_number(reports, name, "report"),
        "stat" if options.sample and judged != "damaged" else reached,
        judged,
        tuple(k.name for k in seen.manifests),
        seen.model_record_name,
        read,
        findings,
        options.now,
        readings,
    )


def _check_levels(
    options: VerifyOptions,
    source: CountedSource,
    files: Sequence[ExpectedFile],
    there: Sequence[ExpectedFile],
    trees: Sequence[TrackedFiles],
    *,
    tensors: Sequence[ModelTensor] | None = None,
    has_digests: bool = True,
    has_shards: bool = True,
) -> tuple[list[VerifyFinding], tuple[Reading, ...], int]:
    """Check every level up to that of ``options``; return findings, readings, and bytes read.

    ``files`` are expected, and ``there`` with their sizes.  ``trees``: the checkpoint's files, and
    those of a consolidated model, which ``tensors`` (its model record's) are of.  Level digest
    compares CRC32s where nothing ``has_digests``; else level load does, for damage from before
    digests were recorded.
    """
    own, last, sample = trees[0], trees[-1], options.sample
    height = LEVELS.index(options.level)
    of_size = sum(f.size for f in files)
    readings = [Reading("stat", len(there), sum(f.size for f in there), len(files), of_size)]
    findings: list[VerifyFinding] = []
    loaded = 0
    if height >= LEVELS.index("digest"):
        if has_digests:
            recorded = [f for f in there if f.recorded.digest]
            found, count, size = check_digests(source, recorded, own, sample)
        else:
            found, count, size = check_crc32s(own, "digest")
        findings += found
        readings.append(Reading("digest", count, size, len(files), of_size))
        share = f"{size} of {of_size} bytes, in {count} of {len(files)} files, were compared"
        if sample:
            percent = 100 * size / of_size if of_size else 100.0
            share = f"a sample ({percent:.1f} %): {share}; nothing is known of the others"
            findings.append(VerifyFinding("note", own.title, share))
        elif size and not has_digests:
            findings.append(VerifyFinding("note", own.title, f"the CRC32s of {share}"))
    if height >= LEVELS.index("parse"):
        before = sum(tree.read for tree in trees)
        findings += check_checkpoint(own) if has_shards else ()
        findings += check_model(last, tensors) if tensors is not None else ()
        count, size = sum(len(tree.seen) for tree in trees), sum(tree.read for tree in trees)
        parsed = sum(tree.tensors for tree in trees)
        readings.append(Reading("parse", count, size - before, len(files), of_size, parsed))
    if height >= LEVELS.index("load"):
        found, reading = load_files(source, [f for f in there if not f.is_copy], own)
        loaded = reading.size
        findings += [*found, *(check_crc32s(own, "load")[0] if has_digests else ())]
        readings.append(reading)
    return findings, tuple(readings), source.read + sum(tree.read for tree in trees) + loaded


def verify_directory(files: FileTree, name: str, options: VerifyOptions) -> Report:
    """Return a report of a directory, without run, manifests and number.

    "incomplete" means that its metadata demands files that are not there.  Without a baseline level
    digest is claimed of nothing; with one it is as in a store, and what is not there is damage.
    Raises Unsupported if no layout knows it and there is no baseline, Incomplete if it changed
    meanwhile, StoreError.
    """
    require(options.level)
    sizes, baseline = files.sizes(), options.baseline
    known = directory_files(sizes, baseline or ())
    there = [f for f in known if sizes.get(f.path) == f.size]
    source = CountedSource(files, options.progress)
    with closing(source.track(files, name)) as tree:
        lacking = list(_find_lacking(tree, must_be_known=baseline is None))
        found, readings, read = _check_levels(
            options, source, known, there, [tree], has_digests=baseline is not None
        )
    found += [*lacking, *(VerifyFinding("note", name, line) for line in files.ignored_entries())]
    if baseline is None:
        found.append(VerifyFinding("note", name, NO_DIGESTS))
    else:
        found += check_sizes(baseline, sizes)
        unknown = (f.path for f in known if not f.recorded.digest)
        found += (VerifyFinding("note", p, "the baseline does not name it") for p in unknown)
    if changed := files.changed():
        hint = "verify again when nothing writes to it"
        raise Incomplete(f"{changed[0]}: changed while it was verified", hint=hint)
    findings = worst_first(found)
    missing = {f for f in lacking if f.kind == "missing"} if baseline is None else set()
    is_incomplete = bool(missing) or any(f.detail.startswith(INCOMPLETE) for f in findings)
    judged = verdict((f for f in findings if f not in missing), is_incomplete=is_incomplete)
    unparsed = [f.detail for f in findings if f.detail.startswith(UNPARSED)]
    if unparsed and judged == "ok" and baseline is None:
        raise Unsupported(unparsed[0])
    reached = reached_level(options.level, findings)
    is_unread = options.sample or (baseline is None and reached == "digest")
    level = "stat" if is_unread and judged != "damaged" else reached
    return Report("", name, name, 0, level, judged, (), "", read, findings, readings=readings)


def record_directory(
    files: FileTree, progress: ReadProgress = no_progress
) -> tuple[ExpectedFile, ...]:
    """Return all files with their digests, for a baseline.  Raises Incomplete, StoreError."""
    source = CountedSource(files, progress)

    def record(item: tuple[str, int]) -> ExpectedFile:
        return directory_file(item[0], digest_file(source, *item))

    with ThreadPool(_THREADS, thread_name_prefix="ckptsync-record") as pool:
        made = tuple(pool.map(record, files.sizes().items()))
    if changed := files.changed():
        hint = "record again when nothing writes to it"
        raise Incomplete(f"{changed[0]}: changed while it was recorded", hint=hint)
    return made


def _recheck_missing(store: Store, seen: LocationState, gone: Collection[str]) -> None:
    """List again before a file is called missing; raise Incomplete if that no longer holds.

    It may have been deleted, moved with its save, or written since the location was listed.
    """
    again = read_location(store, seen.run, seen.location).of(seen.run, seen.location)
    still: set[str] = set()
    if again and not again.conditions.retired:
        listed = (*check_sizes(expected_files(again), again.sizes), *check_records(again))
        still = {finding.name for finding in listed}
    if not still.issuperset(gone):
        why = f"{seen.run}/{seen.location}: changed while it was verified"
        raise Incomplete(why, hint="verify it again")


def _find_lacking(files: TrackedFiles, *, must_be_known: bool) -> Iterator[VerifyFinding]:
    """Yield what a directory's metadata demands and is not there, or not with its size."""
    try:
        sources = registry.sources(files)
        demands = registry.demands(files)
    except Corrupt as e:
        yield VerifyFinding("parse", files.last, str(e))
        return
    if not sources and must_be_known:
        raise registry.no_weights(files)
    if not demands.model:
        if must_be_known:
            yield VerifyFinding(
                "note", "", f"{INCOMPLETE}nothing here says which files a model needs"
            )
        return
    sizes = files.sizes()
    for path, size in (demands.model | demands.resume).items():
        if path not in sizes:
            yield VerifyFinding("missing", path, "the checkpoint's own metadata demands it")
        elif size is not None and sizes[path] != size:
            detail = f"{sizes[path]} bytes, {size} expected by the checkpoint's own metadata"
            yield VerifyFinding("size", path, detail)
