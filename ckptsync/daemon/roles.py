"""From a configuration to the roles at work."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

from ckptsync.config.values import Config
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
            loops.append(watching.sending)
            ground = Ground(watching.runs, watching.disks)
        if "head" in config.roles:
            from ckptsync.daemon.heading import head  # noqa: PLC0415

            jobs.append(Role("head", config.head.every, head(config, store), fatal))
        if "verifier" in config.roles:
            from ckptsync.daemon.heading import Proving  # noqa: PLC0415

            proving = Proving(config, store)
            verifier = Role("verifier", config.verify.tick, proving.look, fatal)
            proving.hint = verifier.tick.hint
            jobs.append(verifier)
        yield Working(loops, jobs, looks, ground)
