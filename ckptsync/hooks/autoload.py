"""Gives every Hugging Face Trainer of a process the hook, where the script knows nothing of it.

    ckptsync hook install
    CKPTSYNC_AUTOLOAD=1 llamafactory-cli train x.yaml

Some scripts cannot be edited.  ``ckptsync-autoload.pth`` lies beside the packages; each Python of
the environment, and so each process that torchrun or Ray starts, runs its one line at the start.
With the variable set it calls `begin`, which waits until ``transformers.trainer`` is imported, and
then wraps the constructor of its ``CallbackHandler``, so that each handler ends with our callback.
Every Trainer makes one (transformers 5.24). The list ``DEFAULT_CALLBACKS`` would not do: ms-swift
replaces it.

Until then nothing is imported but the standard library, and no error here reaches the script.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any

VARIABLE = "CKPTSYNC_AUTOLOAD"
_OFF = frozenset({"", "0", "n", "no", "false", "off"})
_TRAINER = "transformers.trainer"
_SILENT = {
    "llamafactory.v1.launcher": (
        "LLaMA-Factory v1 runs no callback for intermediate checkpoints; the worker goes by"
        " CHECKPOINT_COMPLETE"
    )
}


def begin() -> None:
    """Call `install`, unless the variable is empty, ``0``, ``n``, ``no``, ``false`` or ``off``."""
    if os.environ.get(VARIABLE, "").strip().lower() not in _OFF:
        install()


def install() -> None:
    """Give the hook, once, to every Trainer that this process makes from now on."""
    trainer = sys.modules.get(_TRAINER)
    if trainer is not None:
        _wrap(trainer)
    elif not any(isinstance(finder, _Awaiting) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Awaiting(_wrap))


class _Awaiting:
    """A finder of modules that calls ``then`` once ``transformers.trainer`` has been imported."""

    def __init__(self, then: Callable[[Any], None]) -> None:
        """Remember ``then``; the caller puts the finder into ``sys.meta_path``."""
        self._then = then
        self._asks = False

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:  # noqa: ARG002
        """Return the spec of ``transformers.trainer`` from the other finders.

        Return None for every other module, and for a call that this search itself makes.  The
        spec's loader calls ``then`` after the module has run.  Warn if the module is of a trainer
        that takes no callback (`_SILENT`).
        """
        if name in _SILENT:
            _warn(_SILENT[name])
        if name != _TRAINER or self._asks:
            return None
        from importlib.util import find_spec  # noqa: PLC0415  # most processes train nothing

        self._asks = True  # it asks all finders, and so this one again
        try:
            spec = find_spec(name)
            if spec is not None:
                self._follow(spec.loader)
        finally:
            self._asks = False
        return spec

    def _follow(self, loader: Any) -> None:
        """Make a loader call ``then`` after the module has run, and remove this finder.

        Warn, and do nothing, if the loader cannot be changed.
        """

        def exec_module(module: Any) -> None:
            """Run a module, and call ``then`` if it is the awaited one."""
            run(module)
            if module.__name__ == _TRAINER:  # a loader may have several modules
                self._then(module)
                if self in sys.meta_path:
                    sys.meta_path.remove(self)

        try:
            run = loader.exec_module
            loader.exec_module = exec_module
        except AttributeError as e:  # not a loader of Python's own
            _warn(f"{type(loader).__name__} loads it: {e}")


def _wrap(trainer: Any) -> None:
    """Make each callback handler of a module of trainers add our callback, once; log any error."""
    try:
        from ckptsync.hooks.hf import DefaultCallback  # noqa: PLC0415  # it needs transformers

        handler = trainer.CallbackHandler
        construct = handler.__init__
        if getattr(construct, "__module__", "") == __name__:
            return  # it is wrapped

        def __init__(self: Any, *args: Any, **kwargs: Any) -> None:  # noqa: N807  # its own name
            """Construct the handler, and add our callback, unless it has been given one."""
            construct(self, *args, **kwargs)
            try:
                if not any(isinstance(callback, DefaultCallback) for callback in self.callbacks):
                    self.add_callback(DefaultCallback)
            except Exception as e:  # noqa: BLE001  # the script's Trainer works without ours
                _warn(f"{type(e).__name__}: {e}")

        handler.__init__ = __init__
    except Exception as e:  # noqa: BLE001  # whatever version of transformers this is: the script wanted to import it, and can
        _warn(f"{type(e).__name__}: {e}")


def _warn(why: str) -> None:
    """Log why the hook is not installed."""
    import logging  # noqa: PLC0415  # most processes of an environment train nothing

    logging.getLogger("ckptsync.hook").warning(
        "ckptsync: %s is set, but the hook cannot be installed: %s", VARIABLE, why
    )
