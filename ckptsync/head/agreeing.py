"""What heads agree on before one of them writes a byte of a model: of what it is made, and how.

Two heads may be given other options, see other manifests for a moment, or have other configuration at hand.  The first that creates
``agreement-<n>.json`` decides, and everybody follows, also who finds it after a crash: so all write the same bytes under the same names.  What it
gives of configuration lies beside the model before; so each head can make the model, whatever it has at hand itself.

A head puts its own bytes there, and never takes up others that it finds: what lies beside a model counts if an agreement has its digest.  It follows
no agreement that would replace a file of the checkpoint, or bring code that it would not bring itself.

One that cannot be followed (its manifests no longer count, its files are not there, an older program made it) is followed by the next number.  A
head that is overtaken so writes no model record.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace

import msgspec

from ckptsync.catalogue.fresh import read_records
from ckptsync.decoding import Count, Decoder, FormatNumber
from ckptsync.digest import digest
from ckptsync.errors import Corrupt, Exists, Incomplete, NotFound, Unsupported
from ckptsync.head.placing import placed
from ckptsync.merge import output
from ckptsync.merge.plan import FORMAT, Options, check_dtype
from ckptsync.merge.prepare import MAX_BESIDE, Job, prepare
from ckptsync.model import Files
from ckptsync.records.model_record import ModelFile
from ckptsync.records.names import NUMBER, consolidated_prefix, parse_record_name, records_prefix
from ckptsync.records.state import Snapshot
from ckptsync.records.state import snapshot as described
from ckptsync.stores.contract import Store, read_all

CONFIG_FROM = "config_from"
_NAME = re.compile(rf"agreement-({NUMBER})\.json")


@dataclass(frozen=True, slots=True)
class Origin:
    """A further location for configuration and tokenizer; ``name`` stands in the model record, so it is the same for every head."""

    name: str
    files: Files


def code_from(origins: Sequence[Origin]) -> Files | None:
    """Return the location from which code may come: the directory that the operator named, and nothing that a node has sent."""
    return next((origin.files for origin in origins if origin.name == CONFIG_FROM), None)


@dataclass(frozen=True, slots=True)
class Agreement:
    """``manifests``: names of those that the model is made of.  ``given``: files from elsewhere, which lie beside the model already.

    ``config``: whose they are.  ``code``: files beside the model that have code of ``config_from`` in them: who follows makes them of its own.
    ``left_out``, ``source`` and ``options``: as a model record's.  ``merge``: the number of the merge's output format.
    """

    run: str
    location: str
    n: Count
    manifests: tuple[str, ...]
    dtype: str
    max_shard_size: Count
    source: str
    given: tuple[ModelFile, ...] = ()
    code: tuple[ModelFile, ...] = ()
    left_out: tuple[str, ...] = ()
    allow_code: bool = False
    config: str = ""
    merge: FormatNumber = FORMAT
    format: FormatNumber = 1

    @property
    def name(self) -> str:
        """Of its record.  It has no digest in it: one number can be agreed on once."""
        return f"{records_prefix(self.run, self.location)}agreement-{self.n}.json"

    @property
    def options(self) -> Options:
        """For the merge; raises Corrupt."""
        try:
            return Options(check_dtype(self.dtype), self.max_shard_size, self.source, self.allow_code)
        except ValueError as e:
            raise Corrupt(f"{self.name}: no usable options: {e}") from e

    def encoded(self) -> bytes:
        """As it is stored."""
        return msgspec.json.encode(asdict(self), order="sorted") + b"\n"


_DECODER = Decoder(Agreement, "an agreement")


class Held:
    """Files in memory: what was read once and checked is what is written."""

    def __init__(self, files: Mapping[str, bytes]) -> None:
        self.files = dict(files)

    def sizes(self) -> Mapping[str, int]:
        return {name: len(data) for name, data in self.files.items()}

    def read_into(self, name: str, start: int, out: memoryview) -> None:
        out[:] = self.files[name][start : start + out.nbytes]


def agree(
    store: Store, snapshot: Snapshot, options: Options, origins: Sequence[Origin], files: Callable[[Snapshot], Files]
) -> tuple[Agreement, Job]:
    """Return what holds for what is to be made of a location, and its job: what another head has agreed on if this one can follow it, else its own.

    ``files``: the checkpoint's own.  Raises Unsupported if a newer program has agreed on something; Incomplete if another head was first by a
    moment with what this one cannot follow, or has put other bytes in the way of this one's; and what `prepare` raises.
    """
    last = _last(store, snapshot)
    if followed := _followed(store, snapshot, last, options, origins=origins, files=files):
        return followed
    job = prepare(files(snapshot), options, [o.files for o in origins], code_from=code_from(origins))
    from_elsewhere = given_by(job, origins)
    given = {name: job.content(name) for name, _ in from_elsewhere if name not in job.code}
    code = {name: job.content(name) for name, _ in job.beside if name in job.code}
    own = Agreement(
        snapshot.run,
        snapshot.location,
        max(next_n(snapshot), 0 if last is None else last + 1),
        tuple(k.name for k in snapshot.manifests),
        options.dtype,
        options.max_shard_size,
        job.source,
        given=_described(given),
        code=_described(code),
        left_out=job.left_out,
        allow_code=options.allow_code,
        config=" ".join(f"{name}={origin.name}" for name, origin in from_elsewhere),
    )
    prefix = consolidated_prefix(own.run, own.location)
    in_the_way = [name for name in given if not placed(store, prefix + name, given[name])]
    with contextlib.suppress(Exists):  # another head's, or this one's own of a moment ago
        store.create(own.name, [own.encoded()])
    last = _last(store, snapshot)
    if last == own.n and _read(store, snapshot, last) == own:
        for name in in_the_way:
            make_way(store, snapshot, own, prefix + name)
            if not placed(store, prefix + name, given[name]):
                raise Incomplete(f"{name}: another head puts its own beside the model", hint="the next look tries again")
        return own, replace(job, held={**job.held, **given, **code})
    if followed := _followed(store, snapshot, last, options, origins=origins, files=files):
        return followed
    raise Incomplete(f"{own.name}: another head was first, with what this one cannot follow", hint="the next look tries again")


def given_by(job: Job, origins: Sequence[Origin]) -> list[tuple[str, Origin]]:
    """What stands beside the weights and is not the checkpoint's own."""
    return [(name, origin) for name, files in job.beside for origin in origins if origin.files is files]


def _followed(
    store: Store,
    snapshot: Snapshot,
    n: int | None,
    options: Options,
    *,
    origins: Sequence[Origin],
    files: Callable[[Snapshot], Files],
) -> tuple[Agreement, Job] | None:
    """An agreement and its job, if it is one for this location as it is now, its files are there, and it brings nothing that this head refuses."""
    agreement = _read(store, snapshot, n) if n is not None and n >= next_n(snapshot) else None
    if agreement is None:
        return None
    if agreement.merge > FORMAT or agreement.format > 1:
        raise Unsupported(
            f"{agreement.name}: agreed on by a newer program (output format {agreement.merge}, {FORMAT} here)",
            hint="upgrade ckptsync on this machine",
        )
    if agreement.merge < FORMAT or not set(agreement.manifests) <= {k.name for k in snapshot.manifests}:
        return None
    given = _given(store, agreement)
    if given is None or (agreement.allow_code and not options.allow_code):
        return None
    own, code = files(seen_by(agreement, snapshot)), dict[str, bytes]()
    if agreement.code:
        mine = prepare(own, agreement.options, [Held(given), *(o.files for o in origins)], code_from=code_from(origins))
        code = {name: mine.content(name) for name, _ in mine.beside if name in mine.code}
        if _described(code) != agreement.code:
            return None
    held = Held(given | code)
    job = prepare(own, agreement.options, [held], code_from=held)
    if not given.keys() <= {name for name, location in job.beside if location is held}:
        return None  # the checkpoint has such a file itself, or it stands beside models of another kind
    return agreement, replace(job, held={**job.held, **held.files})


def _given(store: Store, agreement: Agreement) -> dict[str, bytes] | None:
    """The files that lie beside the model already; None if one is not what was agreed on, or not what an agreement may give."""
    found: dict[str, bytes] = {}
    for file in agreement.given:
        if not output.is_beside(file.path) or file.path in found:
            return None
        try:
            data = read_all(store, consolidated_prefix(agreement.run, agreement.location) + file.path, MAX_BESIDE)
            if digest(data) != file.digest or (not agreement.allow_code and output.has_code(file.path, data)):
                return None
        except (NotFound, Corrupt):
            return None
        found[file.path] = data
    return found


def _described(files: Mapping[str, bytes]) -> tuple[ModelFile, ...]:
    return tuple(ModelFile(name, len(data), digest(data)) for name, data in files.items())


def seen_by(agreement: Agreement, snapshot: Snapshot) -> Snapshot:
    """The location as it is without manifests that came later; raises Incomplete."""
    if len(agreement.manifests) == len(snapshot.manifests):
        return snapshot
    known = [k for k in snapshot.manifests if k.name in agreement.manifests]
    seen = described(snapshot.location, snapshot.records, known, snapshot.sizes)
    if seen is None or not seen.conditions.model.holds:
        raise Incomplete(f"{agreement.name}: its manifests do not make a whole model any more")
    return seen


def check_holds(store: Store, agreement: Agreement, snapshot: Snapshot) -> None:
    """Raise Incomplete if another agreement has replaced it, as it may where a name cannot be created exclusively, or after a long sleep."""
    if _last(store, snapshot) != agreement.n or read_all(store, agreement.name, _DECODER.limit) != agreement.encoded():
        raise Incomplete(f"{agreement.name}: overtaken by another head", hint="nothing was consolidated; the next look follows it")


def make_way(store: Store, snapshot: Snapshot, agreed: Agreement, name: str) -> None:
    """Remove what lies under a name of the model: bytes that nothing binds, of an agreement that nobody follows any more, or of nobody.

    Raises Incomplete if a model record has come meanwhile: it may bind what is there.  One that is damaged binds nothing: it is written again.
    """
    check_holds(store, agreed, snapshot)
    listed = (entry.name for entry in store.names(records_prefix(snapshot.run, snapshot.location)))
    new = {
        str(p): p
        for p in map(parse_record_name, listed)
        if p and p.kind == "model" and str(p) not in snapshot.records.model_records
    }
    _, faults = read_records(store, new)
    if new.keys() - {fault.name for fault in faults if isinstance(fault.error, Corrupt)}:
        raise Incomplete(
            f"{snapshot.run}/{snapshot.location}: consolidated by another head meanwhile", hint="the next look sees it"
        )
    store.delete(name)


def next_n(snapshot: Snapshot) -> int:
    """The number of the next model record."""
    return max((model_record.n for model_record in snapshot.records.model_records.values()), default=-1) + 1


def _last(store: Store, snapshot: Snapshot) -> int | None:
    prefix = records_prefix(snapshot.run, snapshot.location)
    names = (entry.name.removeprefix(prefix) for entry in store.names(prefix))
    return max((int(m[1]) for m in map(_NAME.fullmatch, names) if m), default=None)


def _read(store: Store, snapshot: Snapshot, n: int) -> Agreement | None:
    """``None`` of one that cannot be read: the next number replaces it."""
    name = f"{records_prefix(snapshot.run, snapshot.location)}agreement-{n}.json"
    try:
        data = read_all(store, name, _DECODER.limit)
        agreement = _DECODER.decode(data, name)
    except Corrupt:
        return None
    is_whole = agreement.encoded() == data and agreement.name == name and agreement.manifests
    return agreement if is_whole or agreement.merge > FORMAT or agreement.format > 1 else None
