"""The record of what a location's model is made of; a head that would make another model stops.

Two heads with different options could write a model of mixed files. So before its first byte of a
model, a head creates ``agreement-<n>.json``: manifests, options, and the digests of files from
elsewhere. Heads of one configuration write the same bytes there, so they write the same files and
the same model record, at once or one after the other.

A head whose inputs or options differ from the latest agreement stops with an error. If nobody has
written that model for `IDLE`, the head that wrote the agreement has stopped: then this one creates
the next number, and its files replace those that no model record names. A head whose agreement is
no longer the latest deletes nothing more, and writes no model record. What an agreement says is
compared; it is used otherwise only to make a damaged model record again.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

import msgspec

from ckptsync.digest import digest
from ckptsync.errors import Corrupt, Incomplete, NotFound
from ckptsync.records.io import next_number, read_records
from ckptsync.records.location_status import LocationState, record_names
from ckptsync.records.store_paths import (
    NUMBER,
    SENDING,
    checked_own,
    consolidated_prefix,
    own_prefixes,
    records_prefix,
)
from ckptsync.stores.clock import store_now
from ckptsync.stores.contract import Store, read_all
from ckptsync.stores.stream import create_same, has_same_bytes

IDLE = SENDING
"""Seconds on the store's clock after which a head that writes no file of a model has stopped."""
_NAME = re.compile(rf"agreement-({NUMBER})\.json")
_AGAIN = "a head service tries again automatically; otherwise run the same command again"
_ONE_CONFIGURATION = (
    "give all heads one configuration; if no other head runs, this one replaces that model"
    f" {IDLE / 60:.0f} minutes after its last file"
)


@dataclass(frozen=True, slots=True)
class Agreement:
    """Number ``n`` of a location's agreements; ``data`` is what is stored."""

    run: str
    location: str
    n: int
    data: bytes

    @property
    def name(self) -> str:
        """Return the agreement's name in the store, without a digest: each number exists once."""
        return f"{records_prefix(self.run, self.location)}agreement-{self.n}.json"


def agree(store: Store, state: LocationState, inputs: Mapping[str, object]) -> Agreement:
    """Return the agreement by which this head makes a location's model of ``inputs``.

    It is the latest one if that has these inputs. Else the next number is written: there is none
    yet for this model, or its head has written nothing for `IDLE` seconds. Raise Incomplete if that
    head has written since, if another head has the same number, or if the model was made since
    ``state`` was read. Raise StoreError.
    """
    data = msgspec.json.encode(inputs, order="sorted") + b"\n"
    first = next_number(state.records.model_records, state.location, "model")
    last_number = max((-1, *_agreement_times(store, state.run, state.location)))
    if last_number >= first:
        latest = Agreement(state.run, state.location, last_number, data)
        if _is_latest(store, latest):
            return latest
        records = [entry.name for entry in store.names(records_prefix(state.run, state.location))]
        if last_number >= next_number(records, state.location, "model"):  # no head has finished it
            _check_idle(store, latest)
        _check_unfinished(store, state, records)
    own_agreement = Agreement(state.run, state.location, max(first, last_number + 1), data)
    create_same(store, own_agreement.name, [data])
    check_latest(store, own_agreement)
    return own_agreement


class Inputs(msgspec.Struct, frozen=True):
    """What an agreement says; see docs/store-format.md."""

    manifests: tuple[str, ...]
    options: dict[str, str]
    copied: dict[str, str]


def finished_inputs(store: Store, state: LocationState) -> Inputs | None:
    """Return the latest agreement's inputs if a stored model record of its number is unreadable.

    Unreadable: ``state`` does not have it. None otherwise, and if the agreement is gone or damaged.
    Raise StoreError.
    """
    prefix = records_prefix(state.run, state.location)
    listed = record_names(entry.name for entry in store.names(prefix))
    last_number = max(_agreement_times(store, state.run, state.location), default=-1)
    unreadable = listed.keys() - state.records.model_records.keys()
    if not any(
        (listed[name].kind, listed[name].n) == ("model", last_number) for name in unreadable
    ):
        return None
    try:
        data = read_all(store, f"{prefix}agreement-{last_number}.json", 32 << 20)
        return msgspec.json.decode(data, type=Inputs)
    except (NotFound, Corrupt, ValueError, RecursionError):
        return None


def check_latest(store: Store, own: Agreement) -> None:
    """Raise Incomplete if another head has created a later agreement, or replaced this one.

    Lists the records, and reads the agreement back. A name can be replaced in a store that cannot
    create exclusively. Raise StoreError.
    """
    if not _is_latest(store, own):
        raise _overtaken_error(own)


def delete_unbound(store: Store, state: LocationState, own: Agreement, name: str) -> None:
    """Delete the file ``name`` of the model; the caller knows that no record in ``state`` names it.

    Raise Incomplete if the agreement is not the latest, or if an undamaged model record was written
    since ``state`` was read; Corrupt if the name lies outside of the location; StoreError.
    """
    check_latest(store, own)
    names = [entry.name for entry in store.names(records_prefix(state.run, state.location))]
    if replace(own, n=own.n + 1).name in names:  # since the check, which may have taken long
        raise _overtaken_error(own)
    _check_unfinished(store, state, names)
    store.delete(checked_own(name, own_prefixes(state.run, state.location)))


def _check_unfinished(store: Store, state: LocationState, names: Iterable[str]) -> None:
    """Read the model records in ``names`` that ``state`` lacks; raise Incomplete if one is sound.

    One of a newer program counts as sound. Raise StoreError.
    """
    read_before = state.records.model_records
    new_models = {
        name: record
        for name, record in record_names(names).items()
        if record.kind == "model" and name not in read_before
    }
    _, faults = read_records(store, new_models.values())
    damaged = {fault.name for fault in faults if isinstance(fault.error, Corrupt)}
    if new_models.keys() - damaged:
        title = f"{state.run}/{state.location}"
        raise Incomplete(f"{title}: consolidated by another head meanwhile", hint=_AGAIN)


def _overtaken_error(own: Agreement) -> Incomplete:
    """Return the error for a head whose agreement is no longer the latest."""
    return Incomplete(
        f"{own.name}: another head, with other options or inputs, has begun to write this model"
        " instead",
        hint=_ONE_CONFIGURATION,
    )


def _is_latest(store: Store, own: Agreement) -> bool:
    """Return whether no later agreement is stored, and this one has its bytes; raise StoreError."""
    last_number = max(_agreement_times(store, own.run, own.location), default=-1)
    return last_number == own.n and bool(
        has_same_bytes(store, own.name, len(own.data), digest(own.data))
    )


def _check_idle(store: Store, latest: Agreement) -> None:
    """Raise Incomplete if a file of the model, or the agreement, is younger than `IDLE` seconds.

    Writes a small file to learn the time of the store's clock. Raise StoreError.
    """
    times = [_agreement_times(store, latest.run, latest.location).get(latest.n, 0.0)]
    prefix = consolidated_prefix(latest.run, latest.location)
    times += [entry.mtime for entry in store.names(prefix)]
    if store_now(store) - max(times) < IDLE:
        raise Incomplete(
            f"{latest.name}: another head, with other options or inputs, writes this model",
            hint=_ONE_CONFIGURATION,
        )


def _agreement_times(store: Store, run: str, location: str) -> dict[int, float]:
    """Return each agreement's number and its mtime on the store's clock; raise StoreError."""
    prefix = records_prefix(run, location)
    return {
        int(match[1]): entry.mtime
        for entry in store.names(prefix)
        if (match := _NAME.fullmatch(entry.name.removeprefix(prefix)))
    }
