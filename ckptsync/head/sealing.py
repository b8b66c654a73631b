"""Making, mending and completing one consolidated model.  Its model record is written after every file that it names.

Killed anywhere and called again, the same bytes and the same model record come of it: they are a function of what heads have agreed on before the first
byte (`agreeing`).  So two heads at once, whatever their options, write the same bytes under the same names.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Protocol

from ckptsync.digest import digest
from ckptsync.errors import Corrupt, Exists, Incomplete
from ckptsync.head import agreeing
from ckptsync.head.agreeing import Agreement, Origin
from ckptsync.head.checked import CheckedFiles
from ckptsync.head.placing import InTheWay, Writing, is_whole, placed, proven
from ckptsync.merge import output
from ckptsync.merge.consolidate import Chunk, Engine, Merged, Progress, carry_out
from ckptsync.merge.copying import Work
from ckptsync.merge.plan import FORMAT, Options, check_dtype
from ckptsync.merge.prepare import Job, prepare, prepare_beside
from ckptsync.model import Files
from ckptsync.records.coding import encode, record_name
from ckptsync.records.model_record import ModelFile, ModelRecord
from ckptsync.records.names import consolidated_prefix
from ckptsync.records.state import Snapshot
from ckptsync.stores.contract import About, Store, read_all
from ckptsync.stores.pieces import fetched
from ckptsync.stores.tree import StoreFiles

_TIES = "ties_by"  # in a model record's options: the configuration that said which tensors to write; empty if there was none then
_DECIDING = ("config.json", "adapter_config.json")  # which names are tied; what is saved with an adapter


PIECES = 8 << 20
"""Bytes of what a merge fetches beforehand: less than a merge by hand takes, since several of a head's work side by side, beside its daemon."""


@dataclass(frozen=True, slots=True)
class Made:
    """``files`` (of ``size`` bytes together) were written into the consolidated model; ``model_record`` is the name of its record."""

    run: str
    location: str
    model_record: str
    files: tuple[str, ...]
    size: int
    notes: tuple[str, ...] = ()


def source_files(store: Store, snapshot: Snapshot) -> CheckedFiles:
    """A checkpoint's own files, each byte checked as it is read."""
    there = snapshot.present()
    return CheckedFiles(fetched(StoreFiles(store, there), store, PIECES), {path: snapshot.files[path][0].entry for path in there})


class Elsewhere(Protocol):
    """Machines that make models."""

    def engine(self, seen: Snapshot, prefix: str, abouts: Mapping[str, About]) -> Engine:
        """For one model, which is written below ``prefix`` with what is known of its files; it raises InTheWay, too."""
        ...


@dataclass(frozen=True, slots=True)
class Making:
    """What a head would do of itself, whom it tells how far it is, with how many threads, and where, if not in this process."""

    options: Options = field(default_factory=Options)
    progress: Progress | None = None
    work: Work | None = None
    engine: Elsewhere | None = None


def consolidate(store: Store, snapshot: Snapshot, making: Making, origins: Sequence[Origin]) -> Made:
    """Merge a location that is model complete.  Raises Incomplete, Unsupported, Corrupt or StoreError; without the model record nothing was made."""
    agreed, job = agreeing.agree(store, snapshot, making.options, origins, partial(source_files, store))
    seen = agreeing.seen_by(agreed, snapshot)
    files = source_files(store, seen)
    given = {f.path for f in agreed.given}
    left = replace(job, beside=tuple(b for b in job.beside if b[0] not in given))
    prefix, abouts = consolidated_prefix(seen.run, seen.location), _abouts(seen, agreed.options, job)
    engine = making.engine.engine(seen, prefix, abouts) if making.engine else None
    put = Writing(store, prefix, abouts).put
    merged = _merged(store, seen, agreed, partial(carry_out, left, files, put, making.progress, making.work, engine=engine))
    beside = (*merged.files, *agreed.given)
    model_record = ModelRecord(
        run=seen.run,
        checkpoint=seen.checkpoint,
        location=seen.location,
        n=agreed.n,
        manifests=agreed.manifests,
        options={
            "dtype": agreed.dtype,
            "max_shard_size": str(agreed.max_shard_size),
            "source": job.source,
            "allow_code": str(agreed.allow_code).lower(),
            "config": agreed.config,
            _TIES: next((name for name, _ in job.beside if name in _DECIDING), ""),
            "format": str(FORMAT),
        },
        files=beside,
        tensors=merged.tensors,
        left_out=agreed.left_out,
    )
    agreeing.check_holds(store, agreed, seen)
    for file in agreed.given:
        if not is_whole(store, prefix + file.path, file):
            raise Incomplete(f"{prefix}{file.path}: not what {agreed.name} says any more", hint="the next look writes it again")
    return _consolidated(store, model_record, beside, merged.notes)


def _merged(store: Store, snapshot: Snapshot, agreed: Agreement, merge: Callable[[], Merged]) -> Merged:
    """The merge, after what it found in its way was removed: bytes that nothing binds, of an agreement that nobody follows any more."""
    while True:
        try:
            return merge()
        except InTheWay as e:  # noqa: PERF203 - a merge costs a million times more
            agreeing.make_way(store, snapshot, agreed, e.name)


def _abouts(snapshot: Snapshot, options: Options, job: Job) -> dict[str, About]:
    """What is known of each file of weights: its size, and what it is made of, so that a head that was killed goes on with an upload."""
    told = [*(k.name for k in snapshot.manifests), repr(options), job.source, str(FORMAT)]
    origin = digest("\n".join(told).encode())
    return {plan.name: About(plan.size, f"model record {origin} {plan.name}") for plan in job.plans}


def mend(
    store: Store, snapshot: Snapshot, suspects: Sequence[str], origins: Sequence[Origin], making: Making | None = None
) -> Made | None:
    """Write again those of ``suspects`` whose bytes are not the consolidated ones; ``None`` if all are well.

    Options are the model record's, whatever this head's are: of ``making`` only the rest counts.  Raises Corrupt, with nothing written under that name, if
    the sources no longer give the bytes that the model record names.
    """
    model_record = _model_record_of(snapshot)
    prefix = consolidated_prefix(snapshot.run, snapshot.location)
    bad = {f.path: f for f in model_record.files if f.path in suspects and not is_whole(store, prefix + f.path, f)}
    if not bad:
        return None
    files = source_files(store, snapshot)
    job = prepare(
        files,
        _options_of(model_record),
        [_beside(store, model_record, bad), *(o.files for o in origins)],
        code_from=agreeing.code_from(origins),
    )
    if not model_record.options.get(_TIES):  # its configuration came later, and must not change what the weights are now
        job = replace(job, plans=prepare(_Without(files, _DECIDING), _options_of(model_record)).plans)
    done: set[str] = set()

    def write(name: str, chunks: Iterable[Chunk]) -> None:
        if name in bad and name not in done:
            store.write(prefix + name, proven(chunks, bad[name]))
            done.add(name)

    for name in sorted(bad):
        if name.endswith(".index.json"):  # it speaks of all files, also of those that need no mending
            write(name, [output.index(job.plans)])
    making = making or Making()
    carry_out(_only(job, bad), files, write, making.progress, making.work)
    if lost := sorted(bad.keys() - done):
        raise Incomplete(f"{prefix}{lost[0]}: nothing has its content any more", hint="the configuration it came from has gone")
    return Made(snapshot.run, snapshot.location, snapshot.model_record_name, tuple(sorted(bad)), sum(f.size for f in bad.values()))


def complete(store: Store, snapshot: Snapshot, origins: Sequence[Origin]) -> Made | None:
    """Add configuration and tokenizer files that have come since it was consolidated, under a further model record; ``None`` if there are none.

    Nothing that a model record has bound is ever written over, so weights stay as they were merged.  Raises Incomplete where other bytes lie.
    """
    model_record = _model_record_of(snapshot)
    bound = {f.path for f in model_record.files}
    is_adapter = any(f.path.startswith("adapter_model") for f in model_record.files)
    there = [snapshot.present(), *(o.files.sizes() for o in origins)]
    if not {name for sizes in there for name in output.beside(sizes, adapter=is_adapter)} - bound:
        return None
    files = source_files(store, snapshot)
    options, locations, code_from = _options_of(model_record), [o.files for o in origins], agreeing.code_from(origins)
    if is_adapter:
        job = prepare(files, options, locations, code_from=code_from)
    else:
        job = prepare_beside(files, options, locations, [t.dtype for t in model_record.tensors], code_from)
    job = replace(job, beside=tuple(b for b in job.beside if b[0] not in bound))
    if not job.beside:
        return None
    prefix = consolidated_prefix(snapshot.run, snapshot.location)
    added = tuple(_added(store, prefix + name, name, job.content(name)) for name, _ in job.beside)
    origin = " ".join(f"{name}={origin.name}" for name, origin in agreeing.given_by(job, origins))
    config = " ".join(filter(None, (model_record.options.get("config", ""), origin)))
    further = replace(
        model_record,
        n=agreeing.next_n(snapshot),
        manifests=tuple(k.name for k in snapshot.manifests),
        options={**model_record.options, "config": config},
        files=(*model_record.files, *added),
        left_out=tuple(sorted({*model_record.left_out, *job.left_out} - {f.path for f in added})),
    )
    return _consolidated(store, further, added, ())


def _beside(store: Store, model_record: ModelRecord, bad: Collection[str]) -> Files:
    """The model's own configuration and tokenizer, as far as they are well: another head may have had others at hand."""
    prefix = consolidated_prefix(model_record.run, model_record.location)
    well = [f for f in model_record.files if output.is_beside(f.path) and f.path not in bad and is_whole(store, prefix + f.path, f)]
    return StoreFiles(store, {f.path: (prefix + f.path, f.size) for f in well})


def _added(store: Store, full: str, name: str, data: bytes) -> ModelFile:
    """Put a file beside the model.  Bytes that are found there are never taken for it: they may be anyone's."""
    if not placed(store, full, data):
        raise Incomplete(
            f"{full}: other bytes lie there, and no model record names them",
            hint="another head may be about to: the next look sees it; if none runs, delete the file",
        )
    return ModelFile(name, len(data), digest(data))


def _model_record_of(snapshot: Snapshot) -> ModelRecord:
    assert snapshot.model_record is not None
    return snapshot.model_record


def _consolidated(store: Store, model_record: ModelRecord, written: Sequence[ModelFile], notes: tuple[str, ...]) -> Made:
    data = encode(model_record)
    name = record_name(model_record, data)
    try:
        store.create(name, [data])
    except Exists:  # another head, or this one before it was killed
        if read_all(store, name) != data:
            store.write(name, [data])  # damaged there: its name says that these bytes are the right ones
    return Made(model_record.run, model_record.location, name, tuple(f.path for f in written), sum(f.size for f in written), notes)


def _options_of(model_record: ModelRecord) -> Options:
    is_allowed = model_record.options.get("allow_code") == "true"
    try:
        return Options(
            check_dtype(model_record.options["dtype"]),
            int(model_record.options["max_shard_size"]),
            model_record.options["source"],
            is_allowed,
        )
    except (KeyError, ValueError) as e:
        raise Corrupt(f"{model_record.run}/{model_record.location}: its model record has no usable options: {e}") from e


def _only(job: Job, wanted: Iterable[str]) -> Job:
    names = set(wanted)
    plans = tuple(p for p in job.plans if p.name in names)
    return replace(job, plans=plans, beside=tuple(b for b in job.beside if b[0] in names))


class _Without:
    """Files, but for some."""

    def __init__(self, files: Files, names: Collection[str]) -> None:
        self._files, self._names = files, names

    def sizes(self) -> Mapping[str, int]:
        return {name: size for name, size in self._files.sizes().items() if name not in self._names}

    def read_into(self, name: str, start: int, out: memoryview) -> None:
        self._files.read_into(name, start, out)
