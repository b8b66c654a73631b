"""Verify what a user names or the schedule says is due: a store, run, location or directory.

`resolve_target` says what a URL means. `verify_location` compares a location with its records;
`verify_directory` a directory with its own metadata, with the CRC32s of torch's archives, and with
a baseline if there is one. Both run the same levels (`_check_levels`). Reports on a location are
written to its store, so that `ls`, `status`, `repair` and workers act on them.
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
    """How to verify.

    ``now`` is the time that reports show; ``baseline`` is of a directory. With a ``sample`` no more
    is claimed than level stat, unless there is damage. ``always_report``: a report is written even
    if the store already says the same. ``expect`` gets the bytes that will be read, before they
    are.
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
    """A store, and what of it is named: everything, a run, or a location of a run."""

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
    """The report on a location; ``news``: the report to write, None if the store says the same."""

    report: Report
    news: Report | None = None


def resolve_target(url: str, access: Access | None = None) -> InStore | PlainDirectory:
    """Return what a URL or path means: a store, a run or location inside one, or a plain directory.

    Inside a store, any file means its location: checkpoint's, consolidated model's or record. Asks
    each directory above whether it is a store. Raise ConfigError, StoreError, and as `open_store`.
    """
    source, access = located(url), access or Access()
    enclosing = path_or_url.enclosing_store(source, access)
    if enclosing is None:
        return PlainDirectory(source, access)
    store, parts = enclosing
    if len(parts) > 1 and parts[1] in (CONSOLIDATED, RECORDS):
        parts = (parts[0], *parts[2:])
    return InStore(store, *parts[:2])


def verify(target: InStore | PlainDirectory, options: VerifyOptions) -> Iterator[Verified]:
    """Verify each location; yield its report as soon as it is done, unwritten (`write_report`).

    ``options.expect`` gets all bytes before the first. ``news`` of a report is None if the store
    says the same, if the location changed meanwhile, and for a plain directory. Raise ConfigError
    if nothing has that name, Unsupported, after all the others, for a location with records that a
    newer program wrote, and what `verify_location` and `verify_directory` raise.
    """
    if isinstance(target, PlainDirectory):
        files = path_or_url.list_tree(target.source, target.access)
        options.expect(_bytes_to_read(files.sizes().values(), options))
        yield Verified(verify_directory(files, path_or_url.pure_path(target.source).name, options))
        return
    run, location = target.run, target.location
    state = (
        read_location(target.store, run, location) if location else read_state(target.store, run)
    )
    known_locations = {(s.run, s.location) for s in state.locations}
    known_locations |= {(f.run, f.location) for f in state.faults}
    if run and not known_locations:
        raise not_found(target.store, run, location)
    errors = {location_key: state.newer(*location_key) for location_key in sorted(known_locations)}
    options.expect(sum(_bytes_to_read(s.sizes.values(), options) for s in state.locations))
    for location_key in (location_key for location_key, error in errors.items() if error is None):
        report, is_judged = _verify_readable(target.store, state, *location_key, options)
        location_state = state.of(*location_key)
        news = report
        if location_state and options.sample and report.verdict == "damaged":
            # A sample knows nothing of the files that it left out: findings about them stay.
            findings = (*report.findings, *unanswered_findings(location_state))
            news = replace(report, findings=worst_first(findings))
        reports = (
            location_state.records.reports
            if location_state
            else _read_reports(target.store, state, *location_key)
        )
        must_write = options.always_report or is_news(news, reports, state.mtimes)
        yield Verified(report, news if is_judged and must_write else None)
    for error in errors.values():
        if error is not None:
            raise error


def _bytes_to_read(sizes: Iterable[int], options: VerifyOptions) -> int:
    """Return about how many bytes a verification of files of these sizes reads; 0 at level stat."""
    share = options.sample.share if options.sample else 1.0
    return 0 if options.level == "stat" else int(share * sum(sizes))


def _verify_readable(
    store: Store, state: StoreState, run: str, location: str, options: VerifyOptions
) -> tuple[Report, bool]:
    """Verify a location; return a report, and whether it may be written.

    It may not if the location changed meanwhile: then it is "incomplete", with a note why; nor if
    no manifest can be read, unless one is damaged: other processes remember it, and a report has
    them read it again. Raise StoreError, Unsupported.
    """
    location_state, faults = state.of(run, location), state.faults_of(run, location)
    empty_report = Report(
        run, checkpoint_of(location), location, 0, "stat", "damaged", (), "", 0, ()
    )
    empty_report = replace(empty_report, when=options.now)
    if location_state is None:
        is_damaged = any(f.record.kind == "manifest" and f.finding.kind == "digest" for f in faults)
        return replace(empty_report, findings=tuple(fault.finding for fault in faults)), is_damaged
    try:
        return verify_location(store, location_state, options, faults), True
    except Incomplete as e:  # it is being deleted, or moves
        note = (VerifyFinding("note", location, str(e)),)
        return replace(
            empty_report, level=options.level, verdict="incomplete", findings=note
        ), False


def _read_reports(store: Store, state: StoreState, run: str, location: str) -> Mapping[str, Report]:
    """Read the reports about a location; return those that can be read, by name.

    Raise StoreError.
    """
    names = (
        name
        for name in record_names(state.mtimes).values()
        if (name.run, name.location, name.kind) == (run, location, "report")
    )
    return group_records(read_records(store, names)[0]).reports


def verify_location(
    store: Store, state: LocationState, options: VerifyOptions, faults: Sequence[Fault] = ()
) -> Report:
    """Return a report on the files of ``state``, numbered after the reports that it has.

    ``faults`` are its records that cannot be read. If a file is missing or has another size, it
    waits `Store.late` seconds and reads the location again; what a tombstone covers becomes a note
    instead. A sample without damage claims level "stat". Raise StoreError if the store does not
    answer, which is no damage; Incomplete if the location changed meanwhile; Unsupported if a
    library of level load is missing.
    """
    require(options.level)
    conditions, name = state.conditions, state.location
    files = expected_files(state)
    all_findings, readings, bytes_read = _read_location_files(store, state, options, files)
    all_findings += [
        *check_sizes(files, state.sizes),
        *check_records(state),
        *note_unnamed(state, find_unnamed(store, state)),
    ]
    absent = {f.name for f in all_findings if f.kind in ("missing", "size")}
    all_findings += [fault.finding for fault in faults]
    if conditions.conflict:
        detail = f"conflict, and so not verified: {conditions.conflict}"
        all_findings.append(VerifyFinding("note", name, detail))
    else:
        all_findings += note_gaps(state)
    if absent and conditions.retired:  # a tombstone says that these files are deleted
        all_findings = [
            replace(f, kind="note", detail=f"deleted: {f.detail}")
            if f.kind in ("missing", "size")
            else f
            for f in all_findings
        ]
    elif absent:
        wait_until_visible(store, options.wait)
        _recheck_missing(store, state, absent)
    findings = worst_first(all_findings)
    is_whole = not conditions.conflict and (conditions.model.holds or bool(conditions.retired))
    report_verdict = verdict(findings, is_incomplete=not is_whole)
    reports = (*state.records.reports, *(fault.name for fault in faults))
    level_reached = reached_level(options.level, findings)
    return Report(
        state.run,
        state.checkpoint,
        name,
        next_number(reports, name, "report"),
        "stat" if options.sample and report_verdict != "damaged" else level_reached,
        report_verdict,
        tuple(k.name for k in state.manifests),
        state.model_record_name,
        bytes_read,
        findings,
        options.now,
        readings,
    )


def _read_location_files(
    store: Store, state: LocationState, options: VerifyOptions, files: Sequence[ExpectedFile]
) -> tuple[list[VerifyFinding], tuple[Reading, ...], int]:
    """Check the stored files of a location at every level; return what `_check_levels` does.

    Shards are not parsed if they are deleted, or of two saves. Raise as `_check_levels` does.
    """
    prefix = consolidated_prefix(state.run, state.location)
    model_title = prefix.removeprefix(f"{state.run}/").rstrip("/")
    present = [f for f in files if state.sizes.get(f.name) == f.size]
    own_files = [f for f in present if f.is_own]
    model = [f for f in present if f.is_consolidated]
    source = CountedSource(store, options.progress)
    with ExitStack() as stack:
        trees = []
        for title, tree_files in ((state.location, own_files), (model_title, model)):
            stored_files = StoreFiles(store, {f.path: (f.name, f.size) for f in tree_files})
            tracked = source.track(stored_files, title, {f.path: f.shown for f in tree_files})
            trees.append(stack.enter_context(closing(tracked)))
        return _check_levels(
            options,
            source,
            files,
            present,
            trees,
            tensors=state.model_record.tensors if state.model_record else None,
            has_shards=not (state.conditions.conflict or state.conditions.shards),
        )


def _check_levels(
    options: VerifyOptions,
    source: CountedSource,
    files: Sequence[ExpectedFile],
    present: Sequence[ExpectedFile],
    trees: Sequence[TrackedFiles],
    *,
    tensors: Sequence[ModelTensor] | None = None,
    has_digests: bool = True,
    has_shards: bool = True,
) -> tuple[list[VerifyFinding], tuple[Reading, ...], int]:
    """Check every level up to that of ``options``; return findings, readings, and bytes read.

    ``files`` are expected, ``present`` are those stored with their sizes. ``trees``: the
    checkpoint's files, then those of a consolidated model, which ``tensors`` (of its model record)
    are of. Level digest compares CRC32s if no file ``has_digests``; else level load does, for
    damage from before digests were recorded. A sample limits level digest alone. Without
    ``has_shards`` the checkpoint is not parsed. Raise StoreError, Unsupported without a loader.
    """
    own_tree, model_tree, sample = trees[0], trees[-1], options.sample
    height = LEVELS.index(options.level)
    expected_size = sum(f.size for f in files)
    present_size = sum(f.size for f in present)
    readings = [Reading("stat", len(present), present_size, len(files), expected_size)]
    findings: list[VerifyFinding] = []
    loaded = 0
    if height >= LEVELS.index("digest"):
        if has_digests:
            recorded = [f for f in present if f.recorded.digest]
            level_findings, count, size = check_digests(source, recorded, own_tree, sample)
        else:
            level_findings, count, size = check_crc32s(own_tree, "digest")
        findings += level_findings
        readings.append(Reading("digest", count, size, len(files), expected_size))
        share_text = (
            f"{size} of {expected_size} bytes, in {count} of {len(files)} files, were compared"
        )
        if sample:
            percent = 100 * size / expected_size if expected_size else 100.0
            share_text = f"a sample ({percent:.1f} %): {share_text}; nothing is known of the others"
            findings.append(VerifyFinding("note", own_tree.title, share_text))
        elif size and not has_digests:
            findings.append(VerifyFinding("note", own_tree.title, f"the CRC32s of {share_text}"))
    if height >= LEVELS.index("parse"):
        read_before = sum(tree.read for tree in trees)
        findings += check_checkpoint(own_tree) if has_shards else ()
        findings += check_model(model_tree, tensors) if tensors is not None else ()
        count, size = sum(len(tree.seen) for tree in trees), sum(tree.read for tree in trees)
        parsed = sum(tree.tensors for tree in trees)
        size -= read_before
        readings.append(Reading("parse", count, size, len(files), expected_size, parsed))
    if height >= LEVELS.index("load"):
        level_findings, reading = load_files(
            source, [f for f in present if not f.is_copy], own_tree
        )
        loaded = reading.size
        findings += [*level_findings, *(check_crc32s(own_tree, "load")[0] if has_digests else ())]
        readings.append(reading)
    return findings, tuple(readings), source.read + sum(tree.read for tree in trees) + loaded


def verify_directory(files: FileTree, name: str, options: VerifyOptions) -> Report:
    """Return a report on a directory, without run, manifests and number.

    "incomplete" means that its metadata demands files that are missing. Without a baseline level
    digest is never claimed; with one it is as in a store, and a missing file is damage. Raise
    Unsupported if no layout knows it and there is no baseline, or if a library of level load is
    missing; Incomplete if a file changed meanwhile, or what a trainer wrote has no weights;
    StoreError.
    """
    require(options.level)
    sizes, baseline = files.sizes(), options.baseline
    expected = directory_files(sizes, baseline or ())
    present = [f for f in expected if sizes.get(f.path) == f.size]
    source = CountedSource(files, options.progress)
    with closing(source.track(files, name)) as tree:
        lacking = list(_find_lacking(tree, must_be_known=baseline is None))
        all_findings, readings, bytes_read = _check_levels(
            options, source, expected, present, [tree], has_digests=baseline is not None
        )
    all_findings += [
        *lacking,
        *(VerifyFinding("note", name, line) for line in files.ignored_entries()),
    ]
    if baseline is None:
        all_findings.append(VerifyFinding("note", name, NO_DIGESTS))
    else:
        all_findings += check_sizes(baseline, sizes)
        unnamed = (f.path for f in expected if not f.recorded.digest)
        all_findings += (
            VerifyFinding("note", path, "the baseline does not name it") for path in unnamed
        )
    if changed := files.changed():
        hint = "verify again when nothing writes to it"
        raise Incomplete(f"{changed[0]}: changed while it was verified", hint=hint)
    findings = worst_first(all_findings)
    missing = {f for f in lacking if f.kind == "missing"} if baseline is None else set()
    is_incomplete = bool(missing) or any(f.detail.startswith(INCOMPLETE) for f in findings)
    report_verdict = verdict((f for f in findings if f not in missing), is_incomplete=is_incomplete)
    unparsed = [f.detail for f in findings if f.detail.startswith(UNPARSED)]
    if unparsed and report_verdict == "ok" and baseline is None:
        raise Unsupported(unparsed[0])
    level_reached = reached_level(options.level, findings)
    is_unread = options.sample or (baseline is None and level_reached == "digest")
    level = "stat" if is_unread and report_verdict != "damaged" else level_reached
    return Report(
        "", name, name, 0, level, report_verdict, (), "", bytes_read, findings, readings=readings
    )


def record_directory(
    files: FileTree, progress: ReadProgress = no_progress
) -> tuple[ExpectedFile, ...]:
    """Read all files by `_THREADS` threads; return them with their digests, for a baseline.

    Raise Incomplete if one changed meanwhile, StoreError, Corrupt if one became shorter.
    """
    source = CountedSource(files, progress)

    def record(item: tuple[str, int]) -> ExpectedFile:
        """Read one file, given as path and size; return it with its digests."""
        return directory_file(item[0], digest_file(source, *item))

    with ThreadPool(_THREADS, thread_name_prefix="ckptsync-record") as pool:
        files_recorded = tuple(pool.map(record, files.sizes().items()))
    if changed := files.changed():
        hint = "record again when nothing writes to it"
        raise Incomplete(f"{changed[0]}: changed while it was recorded", hint=hint)
    return files_recorded


def _recheck_missing(store: Store, state: LocationState, absent: Collection[str]) -> None:
    """Read the location again; raise Incomplete unless it lacks all ``absent`` files still.

    ``absent``: names in findings. Also raised if it has no manifest any more, or is being deleted.
    Raise StoreError.
    """
    state_now = read_location(store, state.run, state.location).of(state.run, state.location)
    absent_now: set[str] = set()
    if state_now and not state_now.conditions.retired:
        findings = (
            *check_sizes(expected_files(state_now), state_now.sizes),
            *check_records(state_now),
        )
        absent_now = {finding.name for finding in findings}
    if not absent_now.issuperset(absent):
        why = f"{state.run}/{state.location}: changed while it was verified"
        raise Incomplete(why, hint="verify it again")


def _find_lacking(files: TrackedFiles, *, must_be_known: bool) -> Iterator[VerifyFinding]:
    """Yield findings for what a directory's metadata demands and is missing, or has another size.

    Damaged metadata is one finding. If it ``must_be_known``, metadata that demands nothing is a
    note, and what `registry.no_weights` returns is raised if no layout knows the directory. Raise
    also as `registry.demands`, but for Corrupt.
    """
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
