"""The command line in this process: its exit code is checked, what it printed is returned."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest

from ckptsync.cli.main import main


class Printed(NamedTuple):
    """What a command wrote to its two streams."""

    out: str
    err: str

    @property
    def json(self) -> Any:
        """Return the document that it printed with ``--json``: its result, or else its error."""
        return json.loads(self.out or self.err)


Cli = Callable[..., Printed]


def command_line(capsys: pytest.CaptureFixture[str]) -> Cli:
    """Return a function that runs ``ckptsync`` with some words.

    It fails unless the exit code is ``code``.  What was printed before is dropped.
    """

    def cli(*words: object, code: int = 0) -> Printed:
        capsys.readouterr()
        exit_code = main([*map(str, words)])
        printed = Printed(*capsys.readouterr())
        assert exit_code == code, f"{words}: {exit_code}\n{printed.out}\n{printed.err}"
        return printed

    return cli
