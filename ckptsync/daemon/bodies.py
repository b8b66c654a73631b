"""What child processes of the head do, by the kind of their order: they alone import what merges and verifies."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from ckptsync.config.loading import limits_of, options_for
from ckptsync.config.schema import Config, LimitsConfig
from ckptsync.daemon import told_head
from ckptsync.daemon.orders import Done, Kind, Order
from ckptsync.errors import ConfigError, StoreError
from ckptsync.stores.opening import open_store

if TYPE_CHECKING:
    from ckptsync.head.clustered import Clustered
    from ckptsync.stores.contract import Store

At = Callable[[int, int], None]
BUDGET = 600.0  # seconds after which retention begins with no other location: it is killed after 900, and what it has done counts
LEAST_MEMORY = 16 << 20  # bytes: two parts of an upload
WINDOW = 6 << 20
"""Bytes that a merge has in flight for each of its threads: of several at work beside the daemon, each is to be small."""


def carry_out(order: Order, config: Config, at: At) -> Done:
    """Do it; raises CkptsyncError."""
    return _BODIES[order.kind](_opened(config), order, config, at)


def _opened(config: Config) -> Store:
    url = config.store.url
    try:
        return open_store(url, options_for(url, config.store.options), limits_of(shared(config)))
    except ConfigError as e:  # the head has it open, so it has gone meanwhile, and will be back
        raise StoreError(str(e), hint=e.hint) from e


def shared(config: Config) -> LimitsConfig:
    """What transfers may take, where merges, a verification and the daemon share it."""
    told, jobs = config.limits, config.head.jobs
    table = told.bandwidth
    rates = tuple(rate and rate / jobs for rate in table.rates) if table else ()
    memory = max(min(told.memory, LEAST_MEMORY), told.memory // (jobs + 4))
    return replace(told, bandwidth=replace(table, rates=rates) if table else None, memory=memory)


def _consolidate(store: Store, order: Order, config: Config, at: At) -> Done:
    from ckptsync.head.consolidate import HeadOptions, one  # noqa: PLC0415
    from ckptsync.merge.copying import Work  # noqa: PLC0415
    from ckptsync.merge.plan import Options  # noqa: PLC0415

    engine = _cluster(config) if config.head.engine == "ray" else None
    head = config.head
    merge = Options(head.dtype, head.max_shard_size, allow_code=head.allow_code)
    options = HeadOptions(merge, head.config_from, engine)
    made = one(store, order.run, order.location, options, progress=at, work=Work(config.head.threads, window=WINDOW))
    return Done(tuple(map(told_head.made, made)), changed=bool(made))


def _cluster(config: Config) -> Clustered:
    """The one that Ray's own variable names, or that this machine is in."""
    from ckptsync.head.clustered import Clustered  # noqa: PLC0415

    url = config.store.url
    return Clustered(os.environ.get("RAY_ADDRESS", "auto"), url, options_for(url, config.store.options), limits_of(config.limits))


def _verify(store: Store, order: Order, config: Config, at: At) -> Done:
    from ckptsync.verify.location import verify_and_report  # noqa: PLC0415

    read = 0

    def told(size: int) -> None:
        nonlocal read
        read += size or 1  # of a process of its own, which has its own limits, a sign of life
        at(read, order.size)

    result = verify_and_report(store, order.run, order.location, order.level or config.verify.level, order.now, told=told)
    return Done(tuple(told_head.verifier(result)), told_head.verifier_errors(result), changed=bool(result.report))


def _retain(store: Store, _order: Order, config: Config, at: At) -> Done:
    from ckptsync.catalogue import kept  # noqa: PLC0415
    from ckptsync.head.gc import Asked, Memory, tick  # noqa: PLC0415

    gone, began = 0, time.monotonic()
    memory = Memory(kept.load(store.url))

    def told(size: int) -> None:
        nonlocal gone
        gone += size
        at(gone, 0)

    def is_over() -> bool:
        return time.monotonic() - began > BUDGET

    try:
        swept = tick(store, Asked(config.retention.of, config.retention.grace), memory, told, is_over)
    finally:
        kept.save(store.url, memory.cache)  # also when this process is told to end: the next one goes on there
    return Done(tuple(map(told_head.let_go, swept.done)), told_head.not_let_go(swept.failed), changed=bool(swept.done))


_BODIES: dict[Kind, Callable[[Store, Order, Config, At], Done]] = {
    "consolidate": _consolidate,
    "verify": _verify,
    "retain": _retain,
}
