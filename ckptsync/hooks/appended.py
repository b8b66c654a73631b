"""The callback that `ckptsync.hooks.asked` tells what to do: `ckptsync-llamafactory` passes it, and `ckptsync.hooks.autoload` appends it to all Trainers.

Where a script passes a `CkptSyncCallback` itself, that one wins over one that was appended.  Trainer tells default callbacks of ``on_train_begin`` first, so who else is there is known
at the event after it, with which this one begins; no gradient was reduced by then.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from typing import Any

from ckptsync.hooks.asked import asked
from ckptsync.hooks.hf import CkptSyncCallback

_log = logging.getLogger("ckptsync.hook")


class FromEnvironment(CkptSyncCallback):
    """The callback with the options of the environment, which says that it is on."""

    _has_said = False

    def __init__(self) -> None:
        options = asked(os.environ)
        super().__init__(store=options.store, wait=options.wait, run=options.run)
        if options.refused:
            self._refuse_wait(options.refused)

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Begin, and say so once in a process."""
        super().on_train_begin(args, state, control, **kwargs)
        if self._saver is not None and self._saver.here.rank == 0 and not FromEnvironment._has_said:
            FromEnvironment._has_said = True
            _log.warning("ckptsync: on: every save of %s is kept until it is stored", args.output_dir)


class Appended(FromEnvironment):
    """The same for a Trainer that did not ask for it."""

    _awaits = False

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:  # noqa: ARG002
        """Others may hear of it after this one."""
        self._awaits = True

    def _begin_late(self, args: Any, state: Any, control: Any, kwargs: Any) -> None:
        """At the event after ``on_train_begin``, whichever it is."""
        if not self._awaits:
            return
        self._awaits = False
        if self.is_beside_another(state):
            self.stand_aside()
            return
        super().on_train_begin(args, state, control, **kwargs)


def _late(name: str) -> Callable[..., None]:
    event = getattr(CkptSyncCallback, name)

    def heard(self: Appended, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        with self._unharmed("begin"):
            self._begin_late(args, state, control, kwargs)
        event(self, args, state, control, **kwargs)

    heard.__name__, heard.__doc__ = name, event.__doc__
    return heard


for _name in [name for name in vars(CkptSyncCallback) if name.startswith("on_") and name != "on_train_begin"]:
    setattr(Appended, _name, _late(_name))
