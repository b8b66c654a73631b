"""Merge a checkpoint into its consolidated model; repair or complete that model later.

A model record is written after every file that it names.  Nothing that a model record names is ever
written over, but for damaged bytes by the right ones.

Killed at any moment and called again, the same bytes and the same model record come of it: they are
a function of the checkpoint, the options and the configuration at hand.  So two heads of one
configuration write the same bytes under the same names.  A head that would write others stops, as
`agreement` says.
"""

from __future__ import annotations

from collections.abc import Collection, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial

from ckptsync.catalogue.location_summary import by_age
from ckptsync.catalogue.uncached import StoreState, read_checkpoints, read_state
from ckptsync.digest import digest
from ckptsync.errors import (
    CkptsyncError,
    Corrupt,
    Incomplete,
    NotFound,
    StoreError,
    Unsupported,
    without_frames,
)
from ckptsync.head.agreement import agree, check_latest, delete_unbound, finished_inputs
from ckptsync.head.due_jobs import ANY_RUN, FINAL, LEFT_ALONE, todo_for
from ckptsync.head.weights_comparison import record_weights
from ckptsync.layouts.file_names import is_beside_weights
from ckptsync.merger import model_files
from ckptsync.merger.completeness import DOUBT
from ckptsync.merger.engine import Destination, MergeResult, Progress, Write, write_model
from ckptsync.merger.inputs import MergeRequest, check_unchanged
from ckptsync.merger.into_base import join_files, open_base, plan_sums
from ckptsync.merger.plan import FORMAT, MergeOptions, MergeResources, check_dtype
from ckptsync.merger.prepare import MAX_BESIDE, MergeJob, prepare, prepare_beside
from ckptsync.merger.ray_engine import RayEngine, TaskAccess
from ckptsync.merger.readers import open_reader
from ckptsync.merger.tensor_statistics import Statistics
from ckptsync.records.io import create_record, next_number
from ckptsync.records.location_status import LocationState
from ckptsync.records.manifest import FileEntry
from ckptsync.records.model_record import ModelFile, ModelRecord, is_same_model
from ckptsync.records.store_paths import checked_own, checkpoint_of, consolidated_prefix
from ckptsync.records.weights_findings import NORM_JUMP
from ckptsync.records.weights_record import (
    TensorValues,
    WeightsRecord,
    rounded,
    tensors_digest,
)
from ckptsync.stores.checkpoint_files import FileTree, StoreFiles, TopFiles
from ckptsync.stores.contract import UNKNOWN, About, Chunk, Store, read_all
from ckptsync.stores.limits import Limits
from ckptsync.stores.opening import Access, open_store
from ckptsync.stores.stream import create_same, has_same_bytes, verified
from ckptsync.stores.urls import located
from ckptsync.tensors import Files, MemoryFiles

PREFETCH = 8 << 20
"""Bytes that a merge fetches ahead: few, since several work beside each other."""
_CONFIG_FROM = "config_from"
_INTO = "into"
"""The option of a model record that names the base of an adapter: a path or URL, and its state."""
_CONFIGURATIONS = frozenset({"config.json", "adapter_config.json"})
"""They decide which tensors are written: which names are tied, what is saved with an adapter."""
_DECIDED_BY = "ties_by"
"""The option of a model record that names the configuration that decided; empty if none did."""


@dataclass(frozen=True, slots=True)
class RayCluster:
    """The Ray cluster at ``address``, whose every node reaches the store at ``url``.

    A path must lead to the same directory on each.
    """

    address: str
    url: str
    options: Mapping[str, object] = field(default_factory=dict, repr=False)
    limits: Limits = field(default_factory=Limits)

    def engine(self, seen: LocationState, prefix: str, abouts: Mapping[str, About]) -> RayEngine:
        """Return the engine of a location's model, which is written below ``prefix``."""
        plain = replace(self, limits=replace(self.limits, pace=Limits().pace))  # one process's own
        there = seen.present()
        entries = {path: seen.files[path][0].entry for path in there}
        files = partial(_open_files, plain, there, entries)
        write = partial(_open_write, plain, prefix, dict(abouts))
        return RayEngine(self.address, TaskAccess(files, write, (InTheWay,)))


def _open_files(
    cluster: RayCluster, there: Mapping[str, tuple[str, int]], entries: Mapping[str, FileEntry]
) -> Files:
    """Open a checkpoint's own files on a node of the cluster."""
    store = open_store(cluster.url, cluster.options, cluster.limits)
    return open_reader(StoreFiles(store, there), [store], entries)


def _open_write(cluster: RayCluster, prefix: str, abouts: Mapping[str, About]) -> Write:
    """Return what creates files of the model on a node of the cluster."""
    store = open_store(cluster.url, cluster.options, cluster.limits)
    return partial(create_file, store, prefix, abouts)


@dataclass(frozen=True, slots=True)
class HeadOptions:
    """``config_from``: run (or ``*``) → directory with configuration and tokenizer of its model.

    ``cluster``: where models are made, if not in this process.  ``norm_jump``: by which factor a
    norm must change from one model to the next to be a finding, 0 for never.  ``into``: run (or
    ``*``) → the base that its adapters are summed into, a path or URL, reached by ``access``.
    """

    merge: MergeOptions = field(default_factory=MergeOptions)
    config_from: Mapping[str, str] = field(default_factory=dict)
    cluster: RayCluster | None = None
    norm_jump: float = NORM_JUMP
    into: Mapping[str, str] = field(default_factory=dict)
    access: Access = field(default_factory=Access)


@dataclass(frozen=True, slots=True)
class _Origin:
    """A further source of configuration and tokenizer.

    ``name`` stands in the model record, so it is the same for every head.
    """

    name: str
    files: Files


@dataclass(frozen=True, slots=True)
class WrittenModel:
    """``files`` (``size`` bytes) were written into the model whose record is ``model_record``."""

    run: str
    location: str
    model_record: str
    files: tuple[str, ...]
    size: int
    notes: tuple[str, ...] = ()


class InTheWay(Exception):
    """Raised when a different file, which no model record names, has the name of a model's file."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.name = name


def create_file(
    store: Store, prefix: str, abouts: Mapping[str, About], name: str, chunks: Iterable[Chunk]
) -> None:
    """Create a file of the model, unless it has these bytes already.  Raises InTheWay."""
    full = checked_own(prefix + name, [prefix])
    if not create_same(store, full, chunks, abouts.get(name, UNKNOWN)):
        raise InTheWay(full)


def consolidate_location(
    store: Store,
    run: str,
    location: str,
    options: HeadOptions,
    *,
    progress: Progress | None = None,
    work: MergeResources | None = None,
) -> tuple[WrittenModel, ...]:
    """Do what is due of a location as it is now; without ``location`` complete the run's models.

    Raises Incomplete, Unsupported, Corrupt or StoreError; of several locations the first error,
    after all were tried.
    """
    if location:
        names = [checkpoint_of(location), FINAL]
        found = read_checkpoints(store, run, names)
        here = [seen for seen in found.readable if seen.location == location]
        lent = {checkpoint_of(name) for seen in here for name in _lenders(seen)}
        if lent.difference(names):
            found = read_checkpoints(store, run, [*names, *lent])
    else:
        found = read_state(store, run)
    builder = ModelBuilder(store, options, found, progress, work)
    made: list[WrittenModel] = []
    errors: list[CkptsyncError] = []
    for seen in found.readable:
        summary = found.summary_of(seen)
        todo = todo_for(summary)
        if seen.location != location and (location or todo != "configure"):
            continue
        done: WrittenModel | None = None
        try:
            if todo == "merge":
                done = builder.merge(seen)
            elif todo == "repair":
                done = builder.repair(seen, summary.suspects)
            if todo in ("repair", "configure"):
                done = done or builder.add_late_configuration(seen)
        except CkptsyncError as e:
            errors.append(without_frames(e))
        if done:
            made.append(done)
    if errors:
        raise errors[0]
    return tuple(made)


@dataclass(frozen=True, slots=True)
class _Planned:
    """A model's job and what it reads.

    ``source``: of the checkpoint.  ``options``: what else decides the bytes, for the model record.
    ``trees``: the base that an adapter is summed into, which must not change meanwhile.
    """

    job: MergeJob
    files: Files
    origins: Sequence[_Origin]
    source: str
    options: Mapping[str, str] = field(default_factory=dict)
    trees: tuple[FileTree, ...] = ()


class ModelBuilder:
    """Merges, repairs and completes models of a run's checkpoints.

    ``found``: the run's locations; others than the one at work may supply configuration.
    """

    def __init__(
        self,
        store: Store,
        options: HeadOptions,
        found: StoreState,
        progress: Progress | None,
        work: MergeResources | None,
    ) -> None:
        self._store, self._options, self._found = store, options, found
        self._progress, self._work = progress, work
        self._directories: dict[str, Files] = {}

    def merge(self, seen: LocationState) -> WrittenModel:
        """Merge a checkpoint; the model record is written last.

        Raises Incomplete if another head makes this model of other options or inputs.
        """
        store = self._store
        options, origins = self._inputs(seen)
        planned = self._plan_model(seen, options, origins, self._base(seen.run))
        job, files, origins = planned.job, planned.files, [*planned.origins]
        from_elsewhere = _files_from(job, origins)
        # read once: what the agreement says is what is written
        copied = {name: job.content(name) for name, _ in from_elsewhere}
        job = replace(job, contents={**job.contents, **copied})
        manifests = tuple(k.name for k in seen.manifests)
        record_options = {
            "dtype": options.dtype,
            "max_shard_size": str(options.max_shard_size),
            "source": planned.source,
            "allow_code": str(options.allow_code).lower(),
            "config": " ".join(f"{name}={origin.name}" for name, origin in from_elsewhere),
            _DECIDED_BY: next((name for name, _ in job.beside if name in _CONFIGURATIONS), ""),
            "format": str(FORMAT),
            **planned.options,
        }
        digests = {name: digest(data) for name, data in copied.items()}
        inputs = {"manifests": manifests, "options": record_options, "copied": digests}
        agreed = agree(store, seen, inputs)
        prefix = consolidated_prefix(seen.run, seen.location)
        # What each file of weights is made of: so a head that was killed goes on with an upload.
        origin = f"model record {digest(agreed.data)}"
        abouts = {plan.name: About(plan.size, f"{origin} {plan.name}") for plan in job.plans}
        cluster = self._options.cluster
        engine = cluster.engine(seen, prefix, abouts) if cluster and not job.sums else None

        def write(name: str, chunks: Iterable[Chunk]) -> None:
            check_latest(store, agreed)
            create_file(store, prefix, abouts, name, chunks)

        merged = None
        while merged is None:
            into = Destination(write)
            try:
                merged = write_model(job, files, into, self._progress, self._work, engine=engine)
            except InTheWay as e:
                delete_unbound(store, seen, agreed, e.name)
        check_unchanged(planned.trees)
        written = {prefix + file.path for file in merged.files}
        for name in [e.name for e in store.names(prefix) if e.name not in written]:
            delete_unbound(store, seen, agreed, name)
        record = ModelRecord(
            run=seen.run,
            checkpoint=seen.checkpoint,
            location=seen.location,
            n=agreed.n,
            manifests=manifests,
            options=record_options,
            files=merged.files,
            tensors=merged.tensors,
            left_out=job.left_out,
        )
        check_latest(store, agreed)
        remarks = frozenset(seen.demands.remarks)
        doubts = [n for n in job.notes if n.startswith(DOUBT) and n not in remarks]
        notes = (*merged.notes, *self._record_values(record, merged, doubts))
        return self._record(record, record.files, notes)

    def _record_values(
        self, record: ModelRecord, merged: MergeResult, doubts: Iterable[str]
    ) -> Iterator[str]:
        """Write the statistics of a model, if they were asked for; yield a note if that fails.

        They come before the model record, so that a model has them from its first moment.  A model
        without them is as good: whoever may write models may not always write these.
        """
        if merged.statistics is None:
            return
        its = [merged.statistics.get(tensor.name) for tensor in record.tensors]
        plain = WeightsRecord(
            run=record.run,
            checkpoint=record.checkpoint,
            location=record.location,
            n=record.n,
            of=tensors_digest(record.tensors),
            values=tuple(_values(one) if one else None for one in its),
        )
        try:
            record_weights(self._store, record, plain, doubts, self._options.norm_jump)
        except (StoreError, Unsupported) as e:
            yield f"the statistics of its weights could not be recorded: {e}"

    def _inputs(self, seen: LocationState) -> tuple[MergeOptions, list[_Origin]]:
        """Return this head's options and origins.

        Where a model record is damaged, its options, and files beside its model that are well; but
        no code, which comes from the operator alone.
        """
        options, origins = self._options.merge, self._origins(seen)
        inputs = finished_inputs(self._store, seen)
        if inputs is None:
            return options, origins
        recorded = _options_of(seen, inputs.options)
        if recorded.allow_code and not options.allow_code:
            return options, origins
        prefix = consolidated_prefix(seen.run, seen.location)
        files: dict[str, dict[str, bytes]] = {}
        for word in inputs.options.get("config", "").split():
            name, _, origin = word.rpartition("=")
            with suppress(NotFound, Corrupt):
                data = read_all(self._store, prefix + name, MAX_BESIDE)
                is_same = digest(data) == inputs.copied.get(name) and is_beside_weights(name)
                if is_same and not model_files.has_code(name, data):
                    files.setdefault(origin, {})[name] = data
        stored = [_Origin(origin, MemoryFiles(its)) for origin, its in files.items()]
        return recorded, [*stored, *origins]

    def repair(self, seen: LocationState, suspects: Collection[str]) -> WrittenModel | None:
        """Write those of ``suspects`` again that lack the recorded bytes; None if all are well.

        The options are the model record's, whatever this head's are.  Raises Corrupt, with nothing
        written under that name, if the sources no longer give the recorded bytes.
        """
        store, record = self._store, _model_record(seen)
        prefix = consolidated_prefix(seen.run, seen.location)

        def is_bad(file: ModelFile) -> bool:
            return not has_same_bytes(store, prefix + file.path, file.size, file.digest)

        bad = {f.path: f for f in record.files if f.path in suspects and is_bad(f)}
        if not bad:
            return None
        options, origins = _options_of(seen, record.options), self._origins(seen)
        # Its own configuration, as far as it is well: another head may have had another at hand.
        beside = (f for f in record.files if is_beside_weights(f.path) and f.path not in bad)
        well = [f for f in beside if not is_bad(f)]
        own = StoreFiles(store, {f.path: (prefix + f.path, f.size) for f in well})
        base = self._base(seen.run) if _INTO in record.options else ""
        if _INTO in record.options and not base:
            raise Incomplete(
                f"{seen.run}/{seen.location}: its adapter was summed into {record.options[_INTO]}",
                hint="name that base in the configuration: head.adapters.into",
            )
        planned = self._plan_model(seen, options, [_Origin("", own), *origins], base)
        job, files = planned.job, planned.files
        if not record.options.get(_DECIDED_BY):
            # The model was merged without a configuration, which has come since: plan its
            # weights without it again, else tied tensors would be left out now.
            plain = source_files(store, seen, without=_CONFIGURATIONS)
            job = replace(job, plans=prepare(plain, options, every=True).plans)
        done: set[str] = set()

        def write(name: str, chunks: Iterable[Chunk]) -> None:
            if name in bad and name not in done:
                changed = Corrupt(
                    f"{name}: the rebuilt file does not match its model record",
                    hint="the configuration or the version of ckptsync has changed since the first"
                    " merge",
                )
                full = checked_own(prefix + name, [prefix])
                store.write(full, verified(chunks, name, bad[name].digest, changed))
                done.add(name)

        for name in sorted(bad):
            if name.endswith(".index.json"):  # it names all files, also those that are well
                write(name, [model_files.make_index(job.plans)])
        plans = tuple(plan for plan in job.plans if plan.name in bad)
        left = replace(job, plans=plans, beside=tuple(b for b in job.beside if b[0] in bad))
        write_model(left, files, Destination(write), self._progress, self._work)
        if lost := sorted(bad.keys() - done):
            raise Incomplete(
                f"{prefix}{lost[0]}: cannot be rebuilt, no source has this file any more",
                hint=(
                    "the configuration directory or checkpoint that it was copied from has"
                    " changed or is gone"
                ),
            )
        size = sum(f.size for f in bad.values())
        names = tuple(sorted(bad))
        return WrittenModel(seen.run, seen.location, seen.model_record_name, names, size)

    def _base(self, run: str) -> str:
        """Return the base that this head sums a run's adapters into; empty without one."""
        return self._options.into.get(run) or self._options.into.get(ANY_RUN) or ""

    def _plan_model(
        self, seen: LocationState, options: MergeOptions, origins: Sequence[_Origin], base: str
    ) -> _Planned:
        """Plan a location's model; where it is one adapter, and ``base`` is named, their sum."""
        files = source_files(self._store, seen)
        job = _plan_merge(files, options, origins)
        if not base or not job.is_adapter:
            return _Planned(job, files, origins, job.source)
        if sum(plan.name.startswith("adapter_model") for plan in job.plans) != 1:
            note = f"several adapters: they are not summed into {base}"
            return _Planned(replace(job, notes=(*job.notes, note)), files, origins, job.source)
        of_adapter = _plan_merge(files, replace(options, dtype="keep"), origins)
        place = located(base)
        access = self._options.access.within(PREFETCH)
        request = MergeRequest((), located(self._store.url), options, into=place)
        opened = open_base(request, access)
        both = join_files(opened.files, [files])
        summed_job = plan_sums(opened.job, [(seen.location, of_adapter)], both, options)
        holders = {id(holder): holder for _, holder in opened.job.beside}
        its = [_Origin(_INTO, holder) for holder in holders.values()]
        state = digest(" ".join(tree.state() for tree in opened.trees).encode())
        return _Planned(
            summed_job,
            both,
            [*origins, *its],
            job.source,
            {_INTO: f"{base} {state}"},
            opened.trees,
        )

    def add_late_configuration(self, seen: LocationState) -> WrittenModel | None:
        """Add configuration that came later, under a further model record; None if there is none.

        Weights stay as they were merged.  Raises Incomplete where other bytes are stored under such
        a name.
        """
        store, record, origins = self._store, _model_record(seen), self._origins(seen)
        bound = {f.path for f in record.files}
        is_adapter = bool(record.adapters)
        there = [seen.present(), *(o.files.sizes() for o in origins)]
        beside = {n for sizes in there for n in model_files.files_beside(sizes, adapter=is_adapter)}
        if not beside - bound:
            return None
        files, options = source_files(store, seen), _options_of(seen, record.options)
        if is_adapter:
            job = _plan_merge(files, options, origins)
        else:
            sources = [o.files for o in origins]
            dtypes = [t.dtype for t in record.tensors if t.file != model_files.VALUE_HEAD]
            job = prepare_beside(files, options, sources, dtypes, _code_from(origins))
        job = replace(job, beside=tuple(b for b in job.beside if b[0] not in bound))
        if not job.beside:
            return None
        prefix = consolidated_prefix(seen.run, seen.location)
        added: list[ModelFile] = []
        for name, _ in job.beside:
            data = job.content(name)
            full = checked_own(prefix + name, [prefix])
            if not create_same(store, full, [data]):  # other bytes may be anyone's
                raise Incomplete(
                    f"{prefix}{name}: exists with different content, and no model record names it",
                    hint=(
                        "another head may be about to write that record: try again; if no other"
                        " head runs, delete the file"
                    ),
                )
            added.append(ModelFile(name, len(data), digest(data)))
        origin = " ".join(f"{name}={origin.name}" for name, origin in _files_from(job, origins))
        further = replace(
            record,
            n=next_number(seen.records.model_records, seen.location, "model"),
            manifests=tuple(k.name for k in seen.manifests),
            options={
                **record.options,
                "config": " ".join(filter(None, (record.options.get("config", ""), origin))),
            },
            files=(*record.files, *added),
            left_out=tuple(sorted({*record.left_out, *job.left_out} - {f.path for f in added})),
        )
        return self._record(further, added, ())

    def _record(
        self, record: ModelRecord, written: Sequence[ModelFile], notes: tuple[str, ...]
    ) -> WrittenModel:
        """Write a model record, unless another head, or this one before a kill, has written it."""
        name, _ = create_record(self._store, record)
        files, size = tuple(f.path for f in written), sum(f.size for f in written)
        return WrittenModel(record.run, record.location, name, files, size, notes)

    def _origins(self, seen: LocationState) -> list[_Origin]:
        """Return where files beside a model may come from, after the checkpoint itself.

        The run's final model; the operator's directory; the newest other checkpoint of the run that
        has a configuration, and whose model has the very same tensors.
        """
        there = [
            s for s in self._found.readable if s.run == seen.run and s.status not in LEFT_ALONE
        ]
        age = {s.location: at for at, s in enumerate(by_age(map(self._found.summary_of, there)))}
        there.sort(key=lambda s: age[s.location])
        origins = [
            _Origin(FINAL, source_files(self._store, s))
            for s in [s for s in there if s.checkpoint == FINAL][-1:]
            if s.location != seen.location
        ]
        config_from = self._options.config_from
        if directory := config_from.get(seen.run) or config_from.get(ANY_RUN):
            if directory not in self._directories:
                self._directories[directory] = TopFiles(directory, follows_links=True)
            origins.append(_Origin(_CONFIG_FROM, self._directories[directory]))
        lenders, own = _lenders(seen), seen.model_record
        others = [s for s in there if s.checkpoint != FINAL and s.location != seen.location]
        others.sort(key=lambda s: s.location in lenders)
        for other in reversed(others) if own else ():
            has_files = other.model_record and any(map(is_beside_weights, other.present()))
            if own and has_files and other.model_record and is_same_model(own, other.model_record):
                return [*origins, _Origin(other.location, source_files(self._store, other))]
        return origins


def _values(its: Statistics) -> TensorValues:
    ends = (rounded(its.low), rounded(its.high), rounded(its.norm))
    return (its.nans, its.infinities, its.zeros, *ends)


def source_files(store: Store, seen: LocationState, without: Container[str] = ()) -> Files:
    """Return a checkpoint's own files as far as they are there: checked, and read ahead."""
    present = {path: lies for path, lies in seen.present().items() if path not in without}
    entries = {path: seen.files[path][0].entry for path in present}
    return open_reader(StoreFiles(store, present), [store], entries, PREFETCH)


def _plan_merge(files: Files, options: MergeOptions, origins: Sequence[_Origin]) -> MergeJob:
    """Plan a merge with what these origins have, the first of them first; see `prepare`.

    Of several adapters every one is in the model of a store.
    """
    config = [o.files for o in origins]
    return prepare(files, options, config, code_from=_code_from(origins), every=True)


def _code_from(origins: Sequence[_Origin]) -> Files | None:
    """Return the only source that code may come from: the operator's directory."""
    return next((o.files for o in reversed(origins) if o.name == _CONFIG_FROM), None)


def _files_from(job: MergeJob, origins: Sequence[_Origin]) -> list[tuple[str, _Origin]]:
    """Return the files beside the weights that are not the checkpoint's own."""
    return [
        (name, origin) for name, files in job.beside for origin in origins if origin.files is files
    ]


def _lenders(seen: LocationState) -> set[str]:
    """Return the locations from which the model's config files were copied."""
    config = seen.model_record.options.get("config", "") if seen.model_record else ""
    origins = {word.partition("=")[2] for word in config.split()}
    return origins - {FINAL, _CONFIG_FROM}


def _model_record(seen: LocationState) -> ModelRecord:
    assert seen.model_record is not None
    return seen.model_record


def _options_of(seen: LocationState, options: Mapping[str, str]) -> MergeOptions:
    is_allowed = options.get("allow_code") == "true"
    try:
        dtype, size = check_dtype(options["dtype"]), int(options["max_shard_size"])
        return MergeOptions(dtype, size, options["source"], is_allowed)
    except (KeyError, ValueError) as e:
        raise Corrupt(
            f"{seen.run}/{seen.location}: its model record has no usable options: {e}"
        ) from e
