"""Merge a checkpoint into its consolidated model; repair or complete that model later.

Heads can be killed at any moment, and two can work on one model. So a model is a function of the
checkpoint, the options and the configuration: whoever makes it again writes the same bytes under
the same names, and a head that would write others stops (`agreement`). The model record is written
after every file that it names. Nothing that a model record names is ever written over, but for
damaged bytes by the recorded ones.
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
from ckptsync.head.agreement import Agreement, agree, check_latest, delete_unbound, finished_inputs
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
from ckptsync.records.weights_record import TensorValues, WeightsRecord, rounded, tensors_digest
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
    """A Ray cluster at ``address``, whose every node reaches the store at ``url``.

    A path must lead to the same directory on each node.
    """

    address: str
    url: str
    options: Mapping[str, object] = field(default_factory=dict, repr=False)
    limits: Limits = field(default_factory=Limits)

    def engine(self, state: LocationState, prefix: str, abouts: Mapping[str, About]) -> RayEngine:
        """Return the engine that writes a location's model below ``prefix`` on the cluster.

        Its tasks open the store themselves, and do not share this process's pace. ``abouts``: what
        is known of each file before it is written.
        """
        # a pace is one process's own
        unpaced = replace(self, limits=replace(self.limits, pace=Limits().pace))
        present = state.present()
        entries = {path: state.files[path][0].entry for path in present}
        files = partial(_open_files, unpaced, present, entries)
        write = partial(_open_write, unpaced, prefix, dict(abouts))
        return RayEngine(self.address, TaskAccess(files, write, (InTheWay,)))


def _open_files(
    cluster: RayCluster, present: Mapping[str, tuple[str, int]], entries: Mapping[str, FileEntry]
) -> Files:
    """Open the store on a node of the cluster; return a checkpoint's files, checked by digest."""
    store = open_store(cluster.url, cluster.options, cluster.limits)
    return open_reader(StoreFiles(store, present), [store], entries)


def _open_write(cluster: RayCluster, prefix: str, abouts: Mapping[str, About]) -> Write:
    """Open the store on a node of the cluster; return the function that creates a model's files."""
    store = open_store(cluster.url, cluster.options, cluster.limits)
    return partial(create_file, store, prefix, abouts)


@dataclass(frozen=True, slots=True)
class HeadOptions:
    """How a head makes models.

    ``config_from``: run (or ``*``) → directory with configuration and tokenizer of its model.
    ``cluster``: where models are made, if not in this process. ``norm_jump``: the factor by which a
    norm must change from one model to the next to be a finding, 0 for never. ``into``: run (or
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
    """What was written of a model: ``files`` (``size`` bytes), and the name of its model record."""

    run: str
    location: str
    model_record: str
    files: tuple[str, ...]
    size: int
    notes: tuple[str, ...] = ()


class InTheWay(Exception):
    """Raised when a different file, which no model record names, has the name of a model's file."""

    def __init__(self, name: str) -> None:
        """Create the exception for a file with this name in the store."""
        super().__init__(name)
        self.name = name


def create_file(
    store: Store, prefix: str, abouts: Mapping[str, About], name: str, chunks: Iterable[Chunk]
) -> None:
    """Create a file of the model below ``prefix``, unless it has these bytes already.

    Raise InTheWay if it has others, Corrupt if the name leads elsewhere, StoreError.
    """
    full_name = checked_own(prefix + name, [prefix])
    if not create_same(store, full_name, chunks, abouts.get(name, UNKNOWN)):
        raise InTheWay(full_name)


def consolidate_location(
    store: Store,
    run: str,
    location: str,
    options: HeadOptions,
    *,
    progress: Progress | None = None,
    work: MergeResources | None = None,
) -> tuple[WrittenModel, ...]:
    """Read a location; merge, repair or complete its model, as `todo_for` says.

    Return what was written: nothing if nothing was due, or if its records cannot be read. With an
    empty ``location`` every model of the run is completed, and none is merged or repaired. A repair
    that finds no damage completes the model. Raise Incomplete, Unsupported, Corrupt or StoreError;
    of several locations the first error, after all were tried.
    """
    if location:
        names = [checkpoint_of(location), FINAL]
        run_state = read_checkpoints(store, run, names)
        states_here = [state for state in run_state.readable if state.location == location]
        lender_checkpoints = {
            checkpoint_of(name) for state in states_here for name in _lenders(state)
        }
        if lender_checkpoints.difference(names):
            run_state = read_checkpoints(store, run, [*names, *lender_checkpoints])
    else:
        run_state = read_state(store, run)
    builder = ModelBuilder(store, options, run_state, progress, work)
    models: list[WrittenModel] = []
    errors: list[CkptsyncError] = []
    for state in run_state.readable:
        summary = run_state.summary_of(state)
        todo = todo_for(summary)
        if state.location != location and (location or todo != "configure"):
            continue
        model: WrittenModel | None = None
        try:
            if todo == "merge":
                model = builder.merge(state)
            elif todo == "repair":
                model = builder.repair(state, summary.suspects)
            if todo in ("repair", "configure"):
                model = model or builder.add_late_configuration(state)
        except CkptsyncError as e:
            errors.append(without_frames(e))
        if model:
            models.append(model)
    if errors:
        raise errors[0]
    return tuple(models)


@dataclass(frozen=True, slots=True)
class _PlannedModel:
    """A planned model and what its merge reads.

    ``source``: the weights source of the checkpoint. ``options``: what else decides the bytes, for
    the model record. ``trees``: the base that an adapter is summed into, which must not change
    meanwhile.
    """

    job: MergeJob
    files: Files
    origins: Sequence[_Origin]
    source: str
    options: Mapping[str, str] = field(default_factory=dict)
    trees: tuple[FileTree, ...] = ()


class ModelBuilder:
    """Merges, repairs and completes models of a run's checkpoints.

    ``run_state``: the run's locations; those beside the one at work may supply configuration.
    """

    def __init__(
        self,
        store: Store,
        options: HeadOptions,
        run_state: StoreState,
        progress: Progress | None,
        work: MergeResources | None,
    ) -> None:
        """Keep the arguments; read nothing."""
        self._store, self._options, self._run_state = store, options, run_state
        self._progress, self._work = progress, work
        self._directories: dict[str, Files] = {}

    def merge(self, state: LocationState) -> WrittenModel:
        """Merge a checkpoint into its model; return what was written.

        Writes the agreement, the model's files, the weights record if values were counted, and last
        the model record; deletes all other files below the model's prefix. Raise Incomplete if
        another head makes this model of other options or inputs, and what `prepare` and the store
        raise.
        """
        options, origins = self._choose_inputs(state)
        planned = self._plan_model(state, options, origins, self._base_of(state.run))
        from_elsewhere = _files_from(planned.job, planned.origins)
        # read once: what the agreement says is what is written
        copied = {name: planned.job.content(name) for name, _ in from_elsewhere}
        job = replace(planned.job, contents={**planned.job.contents, **copied})
        manifests = tuple(k.name for k in state.manifests)
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
        agreement = agree(self._store, state, inputs)
        merged = self._write_agreed(state, replace(planned, job=job), agreement)
        record = ModelRecord(
            run=state.run,
            checkpoint=state.checkpoint,
            location=state.location,
            n=agreement.n,
            manifests=manifests,
            options=record_options,
            files=merged.files,
            tensors=merged.tensors,
            left_out=job.left_out,
        )
        check_latest(self._store, agreement)
        remarks = frozenset(state.demands.remarks)
        doubts = [n for n in job.notes if n.startswith(DOUBT) and n not in remarks]
        notes = (*merged.notes, *self._record_values(record, merged, doubts))
        return self._write_record(record, record.files, notes)

    def _write_agreed(
        self, state: LocationState, planned: _PlannedModel, agreement: Agreement
    ) -> MergeResult:
        """Write the planned files of a model, then delete all other files below its prefix.

        A planned name that holds other bytes is deleted, and writing begins again. Files that have
        their bytes are kept. A cluster writes the weights, except sums with a base. Raise
        Incomplete if the agreement is no longer the latest, or if the base has changed.
        """
        store, job = self._store, planned.job
        prefix = consolidated_prefix(state.run, state.location)
        # What each file of weights is made of, so that a killed head's upload is continued.
        model_origin = f"model record {digest(agreement.data)}"
        abouts = {plan.name: About(plan.size, f"{model_origin} {plan.name}") for plan in job.plans}
        cluster = self._options.cluster
        engine = cluster.engine(state, prefix, abouts) if cluster and not job.sums else None

        def write(name: str, chunks: Iterable[Chunk]) -> None:
            """Create a file of the model; raise Incomplete if another head has taken over."""
            check_latest(store, agreement)
            create_file(store, prefix, abouts, name, chunks)

        merged = None
        while merged is None:
            destination = Destination(write)
            try:
                merged = write_model(
                    job, planned.files, destination, self._progress, self._work, engine=engine
                )
            except InTheWay as e:
                delete_unbound(store, state, agreement, e.name)
        check_unchanged(planned.trees)
        written = {prefix + file.path for file in merged.files}
        for name in [e.name for e in store.names(prefix) if e.name not in written]:
            delete_unbound(store, state, agreement, name)
        return merged

    def _record_values(
        self, record: ModelRecord, merged: MergeResult, doubts: Iterable[str]
    ) -> Iterator[str]:
        """Write the weights record of a model; yield a note if StoreError or Unsupported stops it.

        Nothing happens before the first item is requested, nor if no values were counted. A model
        without this record is complete.
        """
        if merged.statistics is None:
            return
        statistics = [merged.statistics.get(tensor.name) for tensor in record.tensors]
        record_without_findings = WeightsRecord(
            run=record.run,
            checkpoint=record.checkpoint,
            location=record.location,
            n=record.n,
            of=tensors_digest(record.tensors),
            values=tuple(
                _tensor_values(tensor_statistics) if tensor_statistics else None
                for tensor_statistics in statistics
            ),
        )
        try:
            record_weights(
                self._store, record, record_without_findings, doubts, self._options.norm_jump
            )
        except (StoreError, Unsupported) as e:
            yield f"the statistics of its weights could not be recorded: {e}"

    def _choose_inputs(self, state: LocationState) -> tuple[MergeOptions, list[_Origin]]:
        """Return the options and origins by which a location's model is made.

        They are this head's, unless a damaged model record has an agreement that can be read. Then
        the agreement's options count, and the undamaged files that it copied come first, without
        those with code. An agreement that allows code counts only if this head allows it. Reads
        those files. Raise Corrupt if the agreement's options are not usable, StoreError.
        """
        options, origins = self._options.merge, self._origins(state)
        inputs = finished_inputs(self._store, state)
        if inputs is None:
            return options, origins
        recorded = _parse_options(state, inputs.options)
        if recorded.allow_code and not options.allow_code:
            return options, origins
        prefix = consolidated_prefix(state.run, state.location)
        files: dict[str, dict[str, bytes]] = {}
        for word in inputs.options.get("config", "").split():
            name, _, origin = word.rpartition("=")
            with suppress(NotFound, Corrupt):
                data = read_all(self._store, prefix + name, MAX_BESIDE)
                is_same = digest(data) == inputs.copied.get(name) and is_beside_weights(name)
                if is_same and not model_files.has_code(name, data):
                    files.setdefault(origin, {})[name] = data
        stored = [_Origin(origin, MemoryFiles(contents)) for origin, contents in files.items()]
        return recorded, [*stored, *origins]

    def repair(self, state: LocationState, suspects: Collection[str]) -> WrittenModel | None:
        """Write those files of a model again that lack the recorded bytes; None if all have them.

        Only ``suspects``, paths in the model, are read. The options are the model record's, and no
        record is written. Raise Corrupt, with nothing written under that name, if the sources no
        longer give the recorded bytes; Incomplete, after all others were written, if a source is
        gone.
        """
        record = _model_record(state)
        prefix = consolidated_prefix(state.run, state.location)
        damaged = {
            f.path: f
            for f in record.files
            if f.path in suspects and not self._has_recorded_bytes(prefix, f)
        }
        if not damaged:
            return None
        job, files = self._plan_repair(state)
        rewritten = self._rewrite_damaged(prefix, job, files, damaged)
        if missing := sorted(damaged.keys() - rewritten):
            raise Incomplete(
                f"{prefix}{missing[0]}: cannot be rebuilt, no source has this file any more",
                hint=(
                    "the configuration directory or checkpoint that it was copied from has"
                    " changed or is gone"
                ),
            )
        size = sum(f.size for f in damaged.values())
        names = tuple(sorted(damaged))
        return WrittenModel(state.run, state.location, state.model_record_name, names, size)

    def _has_recorded_bytes(self, prefix: str, file: ModelFile) -> bool:
        """Return whether a file of a model is stored with its recorded bytes; it is read back."""
        return bool(has_same_bytes(self._store, prefix + file.path, file.size, file.digest))

    def _plan_repair(self, state: LocationState) -> tuple[MergeJob, Files]:
        """Return the job that made a model, planned again, and the files that it reads.

        Files beside the model that are undamaged, which are read back, come before other origins.
        If no configuration decided the merge, none decides the weights now. Raise Incomplete if an
        adapter was summed into a base and the configuration names none.
        """
        store, record = self._store, _model_record(state)
        prefix = consolidated_prefix(state.run, state.location)
        options, origins = _parse_options(state, record.options), self._origins(state)
        # Its own undamaged configuration comes first: another head may have had another one.
        beside = (f for f in record.files if is_beside_weights(f.path))
        intact = [f for f in beside if self._has_recorded_bytes(prefix, f)]
        own_files = StoreFiles(store, {f.path: (prefix + f.path, f.size) for f in intact})
        base = self._base_of(state.run) if _INTO in record.options else ""
        if _INTO in record.options and not base:
            raise Incomplete(
                f"{state.run}/{state.location}: its adapter was summed into"
                f" {record.options[_INTO]}",
                hint="name that base in the configuration: head.adapters.into",
            )
        planned = self._plan_model(state, options, [_Origin("", own_files), *origins], base)
        if record.options.get(_DECIDED_BY):
            return planned.job, planned.files
        # The model was merged without a configuration, which has come since: plan its
        # weights without it again, else tied tensors would be left out now.
        weights_files = source_files(store, state, without=_CONFIGURATIONS)
        plans = prepare(weights_files, options, every=True).plans
        return replace(planned.job, plans=plans), planned.files

    def _rewrite_damaged(
        self, prefix: str, job: MergeJob, files: Files, damaged: Mapping[str, ModelFile]
    ) -> set[str]:
        """Write the damaged files that a job makes over those stored; return their paths.

        ``damaged``: by path; one that the job does not make is not written. A damaged index is made
        from all plans. Raise Corrupt, and leave the stored file, if the new bytes are not those of
        its record; StoreError.
        """
        rewritten: set[str] = set()

        def write(name: str, chunks: Iterable[Chunk]) -> None:
            """Write a damaged file, once, over the stored one; leave all others. Raise Corrupt."""
            if name in damaged and name not in rewritten:
                changed = Corrupt(
                    f"{name}: the rebuilt file does not match its model record",
                    hint="the configuration or the version of ckptsync has changed since the first"
                    " merge",
                )
                full_name = checked_own(prefix + name, [prefix])
                chunks = verified(chunks, name, damaged[name].digest, changed)
                self._store.write(full_name, chunks)
                rewritten.add(name)

        for name in sorted(damaged):
            if name.endswith(".index.json"):  # it names all files, also those that are intact
                write(name, [model_files.make_index(job.plans)])
        plans = tuple(plan for plan in job.plans if plan.name in damaged)
        beside = tuple(b for b in job.beside if b[0] in damaged)
        remaining = replace(job, plans=plans, beside=beside)
        write_model(remaining, files, Destination(write), self._progress, self._work)
        return rewritten

    def _base_of(self, run: str) -> str:
        """Return the base that this head sums a run's adapters into; empty if there is none."""
        return self._options.into.get(run) or self._options.into.get(ANY_RUN) or ""

    def _plan_model(
        self, state: LocationState, options: MergeOptions, origins: Sequence[_Origin], base: str
    ) -> _PlannedModel:
        """Return the plan of a location's model, or of its sum with ``base`` if it is one adapter.

        Without ``base``, a path or URL, nothing is summed. Several adapters are not summed either;
        a note of the job says so. Reads the base's metadata. Raise what `prepare` and opening the
        base raise.
        """
        files = source_files(self._store, state)
        job = _plan_merge(files, options, origins)
        if not base or not job.is_adapter:
            return _PlannedModel(job, files, origins, job.source)
        if sum(plan.name.startswith("adapter_model") for plan in job.plans) != 1:
            note = f"several adapters: they are not summed into {base}"
            return _PlannedModel(replace(job, notes=(*job.notes, note)), files, origins, job.source)
        adapter_job = _plan_merge(files, replace(options, dtype="keep"), origins)
        base_location = located(base)
        access = self._options.access.within(PREFETCH)
        request = MergeRequest((), located(self._store.url), options, into=base_location)
        opened_base = open_base(request, access)
        joined_files = join_files(opened_base.files, [files])
        summed_job = plan_sums(
            opened_base.job, [(state.location, adapter_job)], joined_files, options
        )
        holders = {id(holder): holder for _, holder in opened_base.job.beside}
        base_origins = [_Origin(_INTO, holder) for holder in holders.values()]
        base_state = digest(" ".join(tree.state() for tree in opened_base.trees).encode())
        return _PlannedModel(
            summed_job,
            joined_files,
            [*origins, *base_origins],
            job.source,
            {_INTO: f"{base} {base_state}"},
            opened_base.trees,
        )

    def add_late_configuration(self, state: LocationState) -> WrittenModel | None:
        """Write configuration that came after the merge, and a further model record that names it.

        Return the added files, None if there is nothing to add. Weights stay as they were merged.
        Raise Incomplete if other bytes are stored under such a name, Corrupt if the model record
        has no usable options.
        """
        store, record, origins = self._store, _model_record(state), self._origins(state)
        model_paths = {f.path for f in record.files}
        is_adapter = bool(record.adapters)
        available = [state.present(), *(source.files.sizes() for source in origins)]
        beside = {
            n for sizes in available for n in model_files.files_beside(sizes, adapter=is_adapter)
        }
        if not beside - model_paths:
            return None
        files, options = source_files(store, state), _parse_options(state, record.options)
        if is_adapter:
            job = _plan_merge(files, options, origins)
        else:
            sources = [source.files for source in origins]
            dtypes = [t.dtype for t in record.tensors if t.file != model_files.VALUE_HEAD]
            job = prepare_beside(files, options, sources, dtypes, _code_from(origins))
        job = replace(job, beside=tuple(b for b in job.beside if b[0] not in model_paths))
        if not job.beside:
            return None
        prefix = consolidated_prefix(state.run, state.location)
        added_files: list[ModelFile] = []
        for name, _ in job.beside:
            data = job.content(name)
            full_name = checked_own(prefix + name, [prefix])
            if not create_same(store, full_name, [data]):  # other bytes may be anyone's
                raise Incomplete(
                    f"{prefix}{name}: exists with different content, and no model record names it",
                    hint=(
                        "another head may be about to write that record: try again; if no other"
                        " head runs, delete the file"
                    ),
                )
            added_files.append(ModelFile(name, len(data), digest(data)))
        origins_text = " ".join(
            f"{name}={origin.name}" for name, origin in _files_from(job, origins)
        )
        further = replace(
            record,
            n=next_number(state.records.model_records, state.location, "model"),
            manifests=tuple(k.name for k in state.manifests),
            options={
                **record.options,
                "config": " ".join(filter(None, (record.options.get("config", ""), origins_text))),
            },
            files=(*record.files, *added_files),
            left_out=tuple(
                sorted({*record.left_out, *job.left_out} - {f.path for f in added_files})
            ),
        )
        return self._write_record(further, added_files, ())

    def _write_record(
        self, record: ModelRecord, written: Sequence[ModelFile], notes: tuple[str, ...]
    ) -> WrittenModel:
        """Write a model record unless it is stored; return the model with the ``written`` files.

        Raise as `create_record` does.
        """
        name, _ = create_record(self._store, record)
        files, size = tuple(f.path for f in written), sum(f.size for f in written)
        return WrittenModel(record.run, record.location, name, files, size, notes)

    def _origins(self, state: LocationState) -> list[_Origin]:
        """Return where files beside a model come from, after the checkpoint itself, in this order.

        The run's newest final model; the operator's directory; if the location has a model record,
        one other checkpoint with configuration whose model has the very same tensors. A checkpoint
        that this model's configuration came from precedes the newest. RETIRED and CONFLICT ones
        lend nothing.
        """
        candidates = [
            s for s in self._run_state.readable if s.run == state.run and s.status not in LEFT_ALONE
        ]
        age = {
            s.location: place
            for place, s in enumerate(by_age(map(self._run_state.summary_of, candidates)))
        }
        candidates.sort(key=lambda s: age[s.location])
        origins = [
            _Origin(FINAL, source_files(self._store, s))
            for s in [s for s in candidates if s.checkpoint == FINAL][-1:]
            if s.location != state.location
        ]
        config_from = self._options.config_from
        if directory := config_from.get(state.run) or config_from.get(ANY_RUN):
            if directory not in self._directories:
                self._directories[directory] = TopFiles(directory, follows_links=True)
            origins.append(_Origin(_CONFIG_FROM, self._directories[directory]))
        lenders, own_record = _lenders(state), state.model_record
        others = [s for s in candidates if s.checkpoint != FINAL and s.location != state.location]
        others.sort(key=lambda s: s.location in lenders)
        for lender in reversed(others) if own_record else ():
            has_files = lender.model_record and any(map(is_beside_weights, lender.present()))
            if (
                own_record
                and has_files
                and lender.model_record
                and is_same_model(own_record, lender.model_record)
            ):
                return [*origins, _Origin(lender.location, source_files(self._store, lender))]
        return origins


def _tensor_values(statistics: Statistics) -> TensorValues:
    """Return a tensor's statistics as a weights record has them."""
    ends = (rounded(statistics.low), rounded(statistics.high), rounded(statistics.norm))
    return (statistics.nans, statistics.infinities, statistics.zeros, *ends)


def source_files(store: Store, state: LocationState, without: Container[str] = ()) -> Files:
    """Return a checkpoint's own files that are stored whole, as `open_reader`; read nothing yet.

    A read checks digests, raises Corrupt if one differs, and reads ahead from a distant store.
    ``without``: paths to leave out.
    """
    present = {
        path: name_and_size
        for path, name_and_size in state.present().items()
        if path not in without
    }
    entries = {path: state.files[path][0].entry for path in present}
    return open_reader(StoreFiles(store, present), [store], entries, PREFETCH)


def _plan_merge(files: Files, options: MergeOptions, origins: Sequence[_Origin]) -> MergeJob:
    """Return the job of a merge with configuration of these origins, the first of them first.

    If there are several adapters, all are in the model. Reads metadata. Raise as `prepare`.
    """
    config = [o.files for o in origins]
    return prepare(files, options, config, code_from=_code_from(origins), every=True)


def _code_from(origins: Sequence[_Origin]) -> Files | None:
    """Return the only files that code may come from: the last `_CONFIG_FROM` origin, or None."""
    return next((o.files for o in reversed(origins) if o.name == _CONFIG_FROM), None)


def _files_from(job: MergeJob, origins: Sequence[_Origin]) -> list[tuple[str, _Origin]]:
    """Return each file beside the weights that comes from one of these origins, with its origin."""
    return [
        (name, origin) for name, files in job.beside for origin in origins if origin.files is files
    ]


def _lenders(state: LocationState) -> set[str]:
    """Return the other locations from which the model's configuration was copied; maybe none."""
    config = state.model_record.options.get("config", "") if state.model_record else ""
    origins = {word.partition("=")[2] for word in config.split()}
    return origins - {FINAL, _CONFIG_FROM}


def _model_record(state: LocationState) -> ModelRecord:
    """Return the model record that counts; there must be one."""
    assert state.model_record is not None
    return state.model_record


def _parse_options(state: LocationState, options: Mapping[str, str]) -> MergeOptions:
    """Return the merge options that a model record names; raise Corrupt if they are not usable."""
    is_allowed = options.get("allow_code") == "true"
    try:
        dtype, size = check_dtype(options["dtype"]), int(options["max_shard_size"])
        return MergeOptions(dtype, size, options["source"], is_allowed)
    except (KeyError, ValueError) as e:
        raise Corrupt(
            f"{state.run}/{state.location}: its model record has no usable options: {e}"
        ) from e
