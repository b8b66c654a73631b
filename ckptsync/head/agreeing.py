"""What heads agree on before one of them writes a byte of a model: of what it is made, and how.

Two heads may be given other options, see other manifests for a moment, or have other configuration at hand.  The first that creates
``agreement-<n>.json`` decides, and everybody follows, also who finds it after a crash: so all write the same bytes under the same names.  What it
gives of configuration lies beside the model before; so each head can make the model, whatever it has at hand itself.

One that cannot be followed any more (its manifests no longer count, an older program made it) is followed by the next number.  A head that is
overtaken so does not seal.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import msgspec

from ckptsync.digest import digest
from ckptsync.errors import Corrupt, Exists, Incomplete, Unsupported
from ckptsync.head.placing import placed
from ckptsync.merge import output
from ckptsync.merge.plan import FORMAT, Options, check_dtype
from ckptsync.merge.prepare import MAX_BESIDE, Job
from ckptsync.model import Files, read_whole
from ckptsync.records.names import consolidated_prefix, records_prefix
from ckptsync.records.seal import SealedFile
from ckptsync.records.state import Snapshot
from ckptsync.records.state import snapshot as described
from ckptsync.stores.contract import Store, read_all
from ckptsync.stores.tree import StoreFiles

LIMIT = 16 << 20
_NAME = re.compile(r"agreement-(\d+)\.json")


@dataclass(frozen=True, slots=True)
class Origin:
    """A further place for configuration and tokenizer; ``name`` stands in the seal, so it is the same for every head."""

    name: str
    files: Files


@dataclass(frozen=True, slots=True)
class Agreement:
    """``manifests``: names of those that the model is made of.  ``given``: files that lie beside it already and are no checkpoint's own.

    ``config``: whose they are.  ``source`` and ``options``: as a seal's.  ``merge``: the number of the merge's output format.
    """

    run: str
    place: str
    n: int
    manifests: tuple[str, ...]
    dtype: str
    max_shard_size: int
    source: str
    given: tuple[SealedFile, ...] = ()
    config: str = ""
    merge: int = FORMAT
    format: int = 1

    @property
    def name(self) -> str:
        """Of its record.  It has no digest in it: one number can be agreed on once."""
        return f"{records_prefix(self.run, self.place)}agreement-{self.n}.json"

    @property
    def options(self) -> Options:
        """For the merge; raises Corrupt."""
        try:
            return Options(check_dtype(self.dtype), self.max_shard_size, self.source)
        except ValueError as e:
            raise Corrupt(f"{self.name}: no usable options: {e}") from e

    def encoded(self) -> bytes:
        """As it is stored."""
        return msgspec.json.encode(asdict(self), order="sorted") + b"\n"


_DECODER = msgspec.json.Decoder(Agreement)  # made here: see records.coding


def found(store: Store, snapshot: Snapshot) -> Agreement | None:
    """The one that holds for what is to be made of a place now.  Raises Unsupported if a newer program made it."""
    at = _standing(store, snapshot)
    return at if isinstance(at, Agreement) else None


def _standing(store: Store, snapshot: Snapshot) -> Agreement | int:
    """The one that holds, or the next one's number."""
    last, least = _last(store, snapshot), next_n(snapshot)
    if last is None or last < least:
        return least
    agreement = _read(store, snapshot, last)
    if agreement and agreement.merge > FORMAT:
        raise Unsupported(
            f"{agreement.name}: agreed on by a newer program (output format {agreement.merge}, {FORMAT} here)",
            hint="upgrade ckptsync on this machine",
        )
    is_due = agreement and agreement.merge == FORMAT and set(agreement.manifests) <= {k.name for k in snapshot.manifests}
    return agreement if agreement and is_due else last + 1


def proposed(store: Store, snapshot: Snapshot, options: Options, job: Job, origins: Sequence[Origin]) -> tuple[Agreement, bool]:
    """Agree on what this head would do; what another has agreed on meanwhile, if it was first.  And whether ``job`` is what was agreed on."""
    given, are_own = [], True
    for name, origin in given_by(job, origins):
        data = read_whole(origin.files, name, MAX_BESIDE)
        data = output.with_dtype(data, job.dtype) if name == "config.json" else data
        there = placed(store, consolidated_prefix(snapshot.run, snapshot.place) + name, data, MAX_BESIDE)
        given.append(SealedFile(name, len(there), digest(there)))
        are_own &= there == data
    at = _standing(store, snapshot)
    if isinstance(at, Agreement):
        return at, False
    own = Agreement(
        snapshot.run,
        snapshot.place,
        at,
        tuple(k.name for k in snapshot.manifests),
        options.dtype,
        options.max_shard_size,
        job.source,
        tuple(given),
        " ".join(f"{name}={origin.name}" for name, origin in given_by(job, origins)),
    )
    with contextlib.suppress(Exists):  # another head's, or this one's own of a moment ago
        store.create(own.name, [own.encoded()])
    agreed = found(store, snapshot)
    if agreed is None:
        raise Incomplete(f"{own.name}: it cannot be followed, and nothing else is agreed on", hint="the next look tries again")
    return agreed, are_own and agreed == own


def given_by(job: Job, origins: Sequence[Origin]) -> list[tuple[str, Origin]]:
    """What stands beside the weights and is not the checkpoint's own."""
    return [(name, origin) for name, files in job.beside for origin in origins if origin.files is files]


def seen_by(agreement: Agreement, snapshot: Snapshot) -> Snapshot:
    """The place as it is without manifests that came later; raises Incomplete."""
    if len(agreement.manifests) == len(snapshot.manifests):
        return snapshot
    known = [k for k in snapshot.manifests if k.name in agreement.manifests]
    seen = described(snapshot.place, snapshot.records, known, snapshot.sizes)
    if seen is None or not seen.facets.model.holds:
        raise Incomplete(f"{agreement.name}: its manifests do not make a whole model any more")
    return seen


def given(store: Store, agreement: Agreement) -> StoreFiles:
    """Its files, as they lie beside the model; raises Incomplete, or Corrupt if one is not what was agreed on."""
    prefix = consolidated_prefix(agreement.run, agreement.place)
    for file in agreement.given:
        if digest(read_all(store, prefix + file.path, MAX_BESIDE)) != file.digest:
            raise Corrupt(f"{prefix}{file.path}: not what {agreement.name} says")
    return StoreFiles(store, {f.path: (prefix + f.path, f.size) for f in agreement.given})


def check_holds(store: Store, agreement: Agreement, snapshot: Snapshot) -> None:
    """Raise Incomplete if another has taken its place, as it may where a name cannot be created exclusively, or after a long sleep."""
    if _last(store, snapshot) != agreement.n or read_all(store, agreement.name, LIMIT) != agreement.encoded():
        raise Incomplete(f"{agreement.name}: overtaken by another head", hint="nothing was sealed; the next look follows it")


def next_n(snapshot: Snapshot) -> int:
    """The number of the next seal."""
    return max((seal.n for seal in snapshot.records.seals.values()), default=-1) + 1


def _last(store: Store, snapshot: Snapshot) -> int | None:
    prefix = records_prefix(snapshot.run, snapshot.place)
    names = (entry.name.removeprefix(prefix) for entry in store.names(prefix))
    return max((int(m[1]) for m in map(_NAME.fullmatch, names) if m), default=None)


def _read(store: Store, snapshot: Snapshot, n: int) -> Agreement | None:
    """``None`` of one that cannot be read: the next number takes its place."""
    name = f"{records_prefix(snapshot.run, snapshot.place)}agreement-{n}.json"
    data = read_all(store, name, LIMIT)
    try:
        agreement = _DECODER.decode(data)
    except (msgspec.MsgspecError, RecursionError):
        return None
    is_whole = agreement.encoded() == data and agreement.name == name and agreement.manifests
    return agreement if is_whole or agreement.merge > FORMAT or agreement.format > 1 else None
