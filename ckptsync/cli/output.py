"""What a command prints: JSON for programs, tables for people, progress of long work."""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, is_dataclass
from pathlib import Path
from typing import Any

from ckptsync.colours import has_colours
from ckptsync.errors import CkptsyncError
from ckptsync.quantities import clean, show_duration, show_size

Progress = Callable[[int, int], None]
"""Called with the bytes that are done, and the bytes in all."""
FORMAT = 1
"""Of what ``--json`` prints: keys may be added under the same number, and none go."""
SECONDS_BETWEEN_LINES = 30.0
COLOURS = {
    "WAITING": "33",
    "REFUSED": "31",
    "UPLOADING": "33",
    "INCOMPLETE": "33",
    "COMPLETE": "36",
    "CONSOLIDATED": "34",
    "VERIFIED": "32",
    "DAMAGED": "1;31",
    "CONFLICT": "35",
    "RETIRED": "2",
    "CRITICAL": "1;31",
    "WARNING": "33",
}
"""How a terminal shows each status and severity (ECMA-48 SGR)."""


def say(line: str, *, to_stderr: bool = False) -> None:
    """Print a line in which names and errors from a store cannot command the terminal."""
    print(clean(line), file=sys.stderr if to_stderr else sys.stdout, flush=True)


def print_error(error: CkptsyncError, *, as_json: bool = False, about: str = "") -> None:
    """Print an error and its hint on stderr.

    ``about``: the target that it is of, where the error does not name it.
    """
    if as_json:
        print(json.dumps(as_document(describe_error(error))), file=sys.stderr)
        return
    target = f"{about}: " if about and about not in str(error) else ""
    say(f"ckptsync: error: {target}{error}", to_stderr=True)
    if error.hint:
        say(f"ckptsync: hint: {error.hint}", to_stderr=True)


def describe_error(error: CkptsyncError) -> dict[str, Any]:
    """Return an error for ``--json``."""
    return {"error": str(error), "hint": error.hint, "exit_code": error.exit_code}


def as_document(value: Mapping[str, Any], exit_code: int = 0) -> dict[str, Any]:
    """Return a result as every command prints it: with `FORMAT`, and an exit code."""
    return {"format": FORMAT, "exit_code": exit_code, **value}


def print_json(value: Mapping[str, Any], exit_code: int = 0) -> None:
    """Print a result as one line of JSON, as `as_document` has it."""

    def plain(value: object) -> Any:
        if is_dataclass(value) and not isinstance(value, type):
            return asdict(value)
        return sorted(value) if isinstance(value, (set, frozenset)) else str(value)

    print(json.dumps(as_document(value, exit_code), ensure_ascii=True, default=plain), flush=True)


def print_removal(
    args: argparse.Namespace,
    removed: Sequence[Path],
    kept: Sequence[str],
    notes: Sequence[str],
    following: Sequence[str] = (),
    **more: str,
) -> None:
    """Print what an ``uninstall`` removed, or would remove; ``following``: what to run then."""
    if args.json:
        paths = {"removed": list(map(str, removed)), "kept": list(kept), "notes": list(notes)}
        print_json({"dry_run": args.dry_run, **more, **paths, "next": list(following)})
        return
    would = "would be " if args.dry_run else ""
    lines = [f"{path}: {would}removed" for path in removed]
    for line in (*lines, *(f"kept {line}" for line in kept), *(f"note: {note}" for note in notes)):
        say(line)
    if following:
        print("then:", *following, sep="\n    ")


def first_of(lines: Sequence[str]) -> str:
    """Return the first line, and how many more there are."""
    more = f" (and {len(lines) - 1} more)" if len(lines) > 1 else ""
    return f"{lines[0]}{more}" if lines else ""


def columns(text: str) -> int:
    """Return how many columns of a terminal a text takes: a Chinese character takes two."""
    if text.isascii():
        return len(text)
    from rich.cells import cell_len

    return cell_len(text)


def aligned(rows: Iterable[Sequence[str]]) -> list[str]:
    """Return rows as lines with aligned columns; the last column is not padded."""
    cleaned = [[clean(cell) for cell in row] for row in rows]
    widths = [max(map(columns, col)) for col in zip(*(row[:-1] for row in cleaned), strict=True)]
    return [
        "  ".join(
            [
                *(cell + " " * (n - columns(cell)) for cell, n in zip(row, widths, strict=False)),
                row[-1],
            ]
        ).rstrip()
        for row in cleaned
    ]


def print_table(heading: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Print a heading and rows; a terminal shows each row's status in colour."""
    print_lines(aligned([heading, *rows]))


def print_lines(lines: Iterable[str]) -> None:
    """Print lines; see `print_table`."""
    sys.stdout.writelines(f"{paint(clean(line))}\n" for line in lines)


def paint(line: str) -> str:
    """Return a line of stdout with the first word of `COLOURS` that stands alone in it coloured.

    As it is, where stdout is no terminal or its user wants no colours.
    """
    if not has_colours(sys.stdout):
        return line
    for word, code in COLOURS.items():
        if f" {word} " in f" {line} ":
            return line.replace(word, f"\x1b[{code}m{word}\x1b[0m", 1)
    return line


@contextlib.contextmanager
def progress(args: argparse.Namespace, what: str, kept: str = "") -> Iterator[Progress]:
    """Show progress until the block ends; a total of 0 is not known.

    A bar on a terminal, elsewhere a line now and then, with ``--json`` nothing.  ``kept``: what
    people are told of the bytes that are done when they interrupt it.
    """
    what = clean(what)
    if args.json:
        yield lambda _done, _total: None
        return
    position = (0, 0)

    def note(done: int, total: int) -> None:
        nonlocal position
        position = done, total
        show(done, total)

    try:
        with _bar(what) if sys.stderr.isatty() else nullcontext(_progress_lines(what)) as show:
            yield note
    except KeyboardInterrupt:
        if kept and position[0]:
            say(f"ckptsync: {what}: {_of(*position)} {kept}", to_stderr=True)
        raise


def _of(done: int, total: int) -> str:
    return f"{show_size(done)} of {show_size(total)}" if total else show_size(done)


@contextlib.contextmanager
def _bar(what: str) -> Iterator[Progress]:
    """Show a bar on the terminal until the block ends."""
    from rich import progress as rich
    from rich.console import Console

    columns = (
        rich.TextColumn("{task.description}", markup=False),
        rich.BarColumn(),
        rich.DownloadColumn(),
        rich.TransferSpeedColumn(),
        rich.TimeRemainingColumn(),
    )
    with rich.Progress(
        *columns,
        console=Console(stderr=True),
        transient=True,
        redirect_stdout=sys.stdout.isatty(),  # else what a program reads would go to stderr
    ) as bar:
        task = bar.add_task(what, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total or None)


def _progress_lines(what: str) -> Progress:
    """Return a `Progress` that prints at most a line every `SECONDS_BETWEEN_LINES`.

    The rate is that since the line before.
    """
    last, before = time.monotonic(), 0

    def show(done: int, total: int) -> None:
        nonlocal last, before
        now = time.monotonic()
        if now - last < SECONDS_BETWEEN_LINES:
            return
        rate = max(0.0, (done - before) / (now - last))
        last, before = now, done
        is_known = rate >= 1 and total
        left = f", {show_duration(round((total - done) / rate))} left" if is_known else ""
        line = f"ckptsync: {what}: {_of(done, total)}, {show_size(round(rate))}/s{left}"
        print(line, file=sys.stderr, flush=True)

    return show
