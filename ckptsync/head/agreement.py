"""What heads agree on before one of them writes a byte of weights: of what it is made, and how.

Two heads may have different options, see different manifests for a moment, or have different
configuration at hand.  The first that creates ``agreement-<n>.json`` decides, and every head
follows, also after a crash: so all write the same bytes under the same names.  Configuration that
the agreement gives is stored before the agreement itself; so each head can make the model,
whatever it has at hand itself.

A head never takes up other bytes that it finds beside a model: they count only if an agreement has
their digest.  It follows no agreement that would replace a file of the checkpoint, or bring code
that the head would not bring itself.

An agreement that cannot be followed (its manifests no longer count, its files are gone, an older
program made it) is followed by the next number.  A head that is overtaken in this way writes no
model record.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Container, Mapping, Sequence
from dataclasses import asdict, dataclass, replace

import msgspec

from ckptsync.digest import digest
from ckptsync.errors import Corrupt, Exists, Incomplete, NotFound, Unsupported
from ckptsync.head.source_files import source_files
from ckptsync.layouts.file_names import is_beside_weights
from ckptsync.merge import model_files
from ckptsync.merge.plan import FORMAT, MergeOptions, check_dtype
from ckptsync.merge.prepare import MAX_BESIDE, MergeJob, prepare
from ckptsync.records.io import next_number, read_records
from ckptsync.records.location_status import LocationState, describe_location, record_names
from ckptsync.records.model_record import ModelFile
from ckptsync.records.store_paths import (
    NUMBER,
    checked_own,
    consolidated_prefix,
    own_prefixes,
    records_prefix,
)
from ckptsync.stores.contract import Store, read_all
from ckptsync.stores.stream import create_same
from ckptsync.tensors import Files, FilesWrapper, MemoryFiles
from ckptsync.typed_json import Count, Decoder, FormatNumber

CONFIG_FROM = "config_from"
_NAME = re.compile(rf"agreement-({NUMBER})\.json")
AGAIN = "a head service tries again automatically; otherwise run the same command again"


@dataclass(frozen=True, slots=True)
class Origin:
    """A further source of configuration and tokenizer.

    ``name`` stands in the model record, so it is the same for every head.
    """

    name: str
    files: Files


def code_from(origins: Sequence[Origin]) -> Files | None:
    """Return the only source that code may come from: the operator's directory."""
    return next((origin.files for origin in origins if origin.name == CONFIG_FROM), None)


def plan_merge(files: Files, options: MergeOptions, origins: Sequence[Origin]) -> MergeJob:
    """Plan a merge with what these origins have, the first of them first; see `prepare`.

    Of several adapters every one is in the model of a store.
    """
    config = [o.files for o in origins]
    return prepare(files, options, config, code_from=code_from(origins), every=True)


@dataclass(frozen=True, slots=True)
class Agreement:
    """``manifests``: names of those that the model is made of.

    ``given``: files from elsewhere, already stored beside it.

    ``config``: where those are from.  ``code``: files beside the model that have code of
    ``config_from``: each head makes them of its own directory.  ``left_out``, ``source`` and
    ``options``: as a model record's.  ``merge``: the number of the merge's output format.
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
        """Return the name of its record: without a digest, so each number exists once."""
        return f"{records_prefix(self.run, self.location)}agreement-{self.n}.json"

    @property
    def options(self) -> MergeOptions:
        """Return the options of the merge; raises Corrupt."""
        try:
            return MergeOptions(
                check_dtype(self.dtype), self.max_shard_size, self.source, self.allow_code
            )
        except ValueError as e:
            raise Corrupt(f"{self.name}: no usable options: {e}") from e

    def encoded(self) -> bytes:
        """Return the bytes that are stored."""
        return msgspec.json.encode(asdict(self), order="sorted") + b"\n"


_DECODER = Decoder(Agreement, "an agreement")


@dataclass(frozen=True, slots=True)
class AgreedMerge:
    """An agreement, the plan of its merge, and the location.

    The location has only the manifests that the agreement names, not those that came later.
    """

    agreement: Agreement
    job: MergeJob
    location: LocationState


class NamedFiles(FilesWrapper):
    """A view of ``files`` restricted to ``names``."""

    def __init__(self, files: Files, names: Container[str]) -> None:
        super().__init__(files)
        self._names = names

    def sizes(self) -> Mapping[str, int]:
        return {name: size for name, size in super().sizes().items() if name in self._names}


def agree(
    store: Store, seen: LocationState, options: MergeOptions, origins: Sequence[Origin]
) -> AgreedMerge:
    """Return the agreement on a location's model, and the plan of it.

    That is another head's agreement if this one can follow it, else its own.

    Raises Unsupported if a newer program has made an agreement; Incomplete if another head created
    its agreement first, and this one cannot follow it, or keeps storing other bytes in this one's
    way; and what `prepare` raises.
    """
    last, latest = _latest(store, seen)
    if followed := _follow(store, seen, latest, options, origins):
        return followed
    job = plan_merge(source_files(store, seen), options, origins)
    from_elsewhere = files_from(job, origins)
    given = {name: job.content(name) for name, _ in from_elsewhere if name not in job.code}
    code = {name: job.content(name) for name, _ in job.beside if name in job.code}
    own = Agreement(
        seen.run,
        seen.location,
        max(next_number(seen.records.model_records, seen.location, "model"), last + 1),
        tuple(k.name for k in seen.manifests),
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
    names = {name: checked_own(prefix + name, [prefix]) for name in given}
    in_the_way = [n for n in given if not create_same(store, names[n], [given[n]])]
    with contextlib.suppress(Exists):  # another head's, or this one's own of a moment ago
        store.create(own.name, [own.encoded()])
    _, latest = _latest(store, seen)
    if latest == own:
        for name in in_the_way:
            delete_unbound(store, seen, own, names[name])
            if not create_same(store, names[name], [given[name]]):
                raise Incomplete(
                    f"{name}: another head has stored a different file under this name", hint=AGAIN
                )
        job = replace(job, contents={**job.contents, **given, **code})
        return AgreedMerge(own, job, seen)
    if followed := _follow(store, seen, latest, options, origins):
        return followed
    raise Incomplete(
        f"{own.name}: another head agreed first, on options or sources that this head cannot use",
        hint=AGAIN,
    )


def files_from(job: MergeJob, origins: Sequence[Origin]) -> list[tuple[str, Origin]]:
    """Return the files beside the weights that are not the checkpoint's own."""
    return [
        (name, origin) for name, files in job.beside for origin in origins if origin.files is files
    ]


def _agreed_location(agreement: Agreement, seen: LocationState) -> LocationState:
    """Return the location without manifests that came after the agreement.

    Raises Incomplete if that is no whole model.
    """
    if len(agreement.manifests) == len(seen.manifests):
        return seen
    known = [k for k in seen.manifests if k.name in agreement.manifests]
    agreed = describe_location(seen.location, seen.records, known, seen.sizes)
    if agreed is None or not agreed.conditions.model.holds:
        raise Incomplete(
            f"{agreement.name}: the manifests that it names no longer make a complete model"
        )
    return agreed


def check_holds(store: Store, agreement: Agreement, seen: LocationState) -> None:
    """Raise Incomplete if another agreement has replaced it.

    That happens where a name cannot be created exclusively, or after a long sleep.
    """
    if _latest(store, seen)[1] != agreement:
        raise Incomplete(f"{agreement.name}: another head has replaced this agreement", hint=AGAIN)


def delete_unbound(store: Store, seen: LocationState, agreed: Agreement, name: str) -> None:
    """Delete a file of the model that no model record binds.

    It is of an agreement that nobody follows any more, or of nobody.

    Raises Incomplete if a model record has come meanwhile, unless it is damaged: then it binds
    nothing, and is written again.
    """
    check_holds(store, agreed, seen)
    listed = record_names(
        entry.name for entry in store.names(records_prefix(seen.run, seen.location))
    )
    known = seen.records.model_records
    new = {n: parsed for n, parsed in listed.items() if parsed.kind == "model" and n not in known}
    _, faults = read_records(store, new.values())
    if new.keys() - {fault.name for fault in faults if isinstance(fault.error, Corrupt)}:
        where = f"{seen.run}/{seen.location}"
        raise Incomplete(f"{where}: consolidated by another head meanwhile", hint=AGAIN)
    store.delete(checked_own(name, own_prefixes(seen.run, seen.location)))


def _follow(
    store: Store,
    seen: LocationState,
    agreement: Agreement | None,
    options: MergeOptions,
    origins: Sequence[Origin],
) -> AgreedMerge | None:
    """Return the merge of the latest agreement, None if this head cannot follow it.

    It must be for the location as it is now, and bring nothing that this head refuses.
    """
    first = next_number(seen.records.model_records, seen.location, "model")
    if agreement is None or agreement.n < first:
        return None
    if agreement.merge > FORMAT or agreement.format > 1:
        raise Unsupported(
            f"{agreement.name}: written by a newer ckptsync (output format {agreement.merge},"
            f" {FORMAT} here)",
            hint="upgrade ckptsync on this machine",
        )
    if agreement.merge < FORMAT or not set(agreement.manifests) <= {k.name for k in seen.manifests}:
        return None
    given = _given(store, agreement)
    if given is None or (agreement.allow_code and not options.allow_code):
        return None
    agreed = _agreed_location(agreement, seen)
    stored, with_code = MemoryFiles(given), {file.path for file in agreement.code}
    mine = [Origin(o.name, NamedFiles(o.files, with_code)) for o in origins]
    agreed_origins = [Origin("", stored), *mine]
    job = plan_merge(source_files(store, agreed), agreement.options, agreed_origins)
    if not given.keys() <= {name for name, files in job.beside if files is stored}:
        return None  # the checkpoint has such a file, or it is of another kind of model
    code = {name: job.content(name) for name, _ in job.beside if name in job.code}
    if _described(code) != agreement.code:
        return None
    return AgreedMerge(agreement, replace(job, contents={**job.contents, **given, **code}), agreed)


def _given(store: Store, agreement: Agreement) -> dict[str, bytes] | None:
    """Return the agreed files that are stored beside the model already.

    None if one is not what was agreed on, or may not be given.
    """
    found: dict[str, bytes] = {}
    prefix = consolidated_prefix(agreement.run, agreement.location)
    for file in agreement.given:
        if not is_beside_weights(file.path) or file.path in found:
            return None
        try:
            data = read_all(store, prefix + file.path, MAX_BESIDE)
            is_agreed = digest(data) == file.digest and (
                agreement.allow_code or not model_files.has_code(file.path, data)
            )
        except (NotFound, Corrupt):
            return None
        if not is_agreed:
            return None
        found[file.path] = data
    return found


def _described(files: Mapping[str, bytes]) -> tuple[ModelFile, ...]:
    return tuple(ModelFile(name, len(data), digest(data)) for name, data in files.items())


def _latest(store: Store, seen: LocationState) -> tuple[int, Agreement | None]:
    """Return the highest number of an agreement, -1 if there is none, and that agreement.

    None in its stead if it cannot be read.
    """
    prefix = records_prefix(seen.run, seen.location)
    names = (entry.name.removeprefix(prefix) for entry in store.names(prefix))
    n = max((int(m[1]) for m in map(_NAME.fullmatch, names) if m), default=-1)
    if n < 0:
        return n, None
    name = f"{prefix}agreement-{n}.json"
    try:
        data = read_all(store, name, _DECODER.limit)
        agreement = _DECODER.decode(data, name)
    except (NotFound, Corrupt):
        return n, None
    is_whole = agreement.encoded() == data and agreement.name == name and agreement.manifests
    return n, agreement if is_whole or agreement.merge > FORMAT or agreement.format > 1 else None
