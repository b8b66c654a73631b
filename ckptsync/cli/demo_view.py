"""How the demo is shown: a live table on a terminal, a line for each change elsewhere, JSON lines if asked for."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Iterator, Sequence
from typing import Protocol

from ckptsync.cli import output
from ckptsync.cli.locations import HEADING

Row = Sequence[str]


class View(Protocol):
    """What the story tells."""

    def say(self, text: str) -> None:
        """A sentence of the story."""
        ...

    def table(self, rows: Sequence[Row]) -> None:
        """The checkpoints as they are now, under `HEADING`."""
        ...


class Lines:
    """A sentence is a line; of the table, only rows that changed are."""

    def __init__(self) -> None:
        self._last: dict[tuple[str, str], Row] = {}

    def say(self, text: str) -> None:
        print(output.clean(text), flush=True)

    def table(self, rows: Sequence[Row]) -> None:
        for row in rows:
            key = (row[0], row[1])
            if self._last.get(key) != row:
                print("  " + output.aligned([row])[0], flush=True)
            self._last[key] = row


class Json:
    """``{"say": …}`` and ``{"table": […]}``, the latter where something changed."""

    def __init__(self) -> None:
        self._last: list[Row] = []

    def say(self, text: str) -> None:
        print(json.dumps({"say": text}), flush=True)

    def table(self, rows: Sequence[Row]) -> None:
        if list(rows) != self._last:
            self._last = list(rows)
            keys = [word.lower() for word in HEADING]
            print(json.dumps({"table": [dict(zip(keys, row, strict=True)) for row in rows]}), flush=True)


class Live:
    """Sentences scroll; the table stays below them and is drawn again."""

    def __init__(self) -> None:
        from rich.console import Console
        from rich.live import Live as RichLive

        self.live = RichLive(console=Console(), refresh_per_second=8)

    def say(self, text: str) -> None:
        self.live.console.print(output.clean(text), markup=False, highlight=False)

    def table(self, rows: Sequence[Row]) -> None:
        from rich.text import Text

        drawn = [output.painted(line) for line in output.aligned([HEADING, *rows])] if rows else []
        self.live.update(Text.from_ansi("\n".join(["", *drawn, ""]), no_wrap=True, overflow="ellipsis"))


@contextlib.contextmanager
def view(*, as_json: bool) -> Iterator[View]:
    """The one that fits where the output goes."""
    if as_json:
        yield Json()
    elif not sys.stdout.isatty():
        yield Lines()
    else:
        live = Live()
        with live.live:
            yield live
