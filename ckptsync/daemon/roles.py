"""From a configuration to the roles at work."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import replace

from ckptsync.config.schema import Config
from ckptsync.daemon.working import NOWHERE, Ground, Role, Working
from ckptsync.stores.contract import Store


@contextlib.contextmanager
def roles(config: Config, node: str, store: Store, fatal: Callable[[BaseException], None]) -> Iterator[Working]:
    """The roles that a configuration names; raises ConfigError where one cannot begin.  What no role needs is not imported."""
    with contextlib.ExitStack() as stack:
        looks: list[Role] = []
        loops: list[Role] = []
        jobs: list[Role] = []
        ground = NOWHERE
        if "worker" in config.roles:
            from ckptsync.daemon.watching import Watching  # noqa: PLC0415

            watching = Watching(config, node, store, fatal)
            stack.callback(watching.close)
            watching.begin()
            looks.append(watching.looking)
            loops += [watching.sending, *watching.carrying]
            ground = Ground(watching.runs, watching.disks)
        if {"head", "verifier"} & set(config.roles):
            from ckptsync.daemon.heading import of_head  # noqa: PLC0415
            from ckptsync.daemon.outlook import outlook  # noqa: PLC0415
            from ckptsync.daemon.overseeing import Overseer, patience  # noqa: PLC0415

            heading = of_head(config, store, fatal)
            stack.callback(heading.children.end)
            overview = outlook(config, node, Overseer(store, heading.catalogues.recent, patience(config)), fatal)
            jobs += [*heading.roles, Role("overview", config.head.every, overview.look, fatal)]
            ground = replace(
                ground,
                children=heading.children.jobs,
                end_children=heading.children.end,
                are_watched=heading.children.are_watched,
                verifies=config.verify.period if "verifier" in config.roles else 0.0,
                seen=lambda: overview.seen,
                posted=overview.posted,
            )
        if config.metrics.listen:
            from ckptsync.daemon.exposing import AGAIN, Exposing  # noqa: PLC0415

            exposing = Exposing(config, node, lambda: working)
            stack.callback(exposing.close)
            looks.append(Role("metrics", AGAIN, exposing.look, fatal))
        working = Working(loops, jobs, looks, ground)
        yield working
