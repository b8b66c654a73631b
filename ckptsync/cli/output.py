"""Print results: JSON for programs, tables for people, the progress of long work.

Every command prints in the same forms, so that programs can rely on them.  Names and errors come
from a store that anybody may have written, so every line is cleaned of control characters before it
reaches a terminal.
"""

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
"""The format of ``--json``.  Keys may be added under the same number; none is removed."""
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
    """Print a line without control characters, at once."""
    print(clean(line), file=sys.stderr if to_stderr else sys.stdout, flush=True)


def print_error(error: CkptsyncError, *, as_json: bool = False, about: str = "") -> None:
    """Print an error and its hint on stderr, with ``as_json`` as one line of JSON.

    ``about``: the target to name first, unless the error names it; not in JSON.
    """
    if as_json:
        print(json.dumps(as_document(describe_error(error))), file=sys.stderr)
        return
    target = f"{about}: " if about and about not in str(error) else ""
    say(f"ckptsync: error: {target}{error}", to_stderr=True)
    if error.hint:
        say(f"ckptsync: hint: {error.hint}", to_stderr=True)


def describe_error(error: CkptsyncError) -> dict[str, Any]:
    """Return an error as a document for ``--json``."""
    return {"error": str(error), "hint": error.hint, "exit_code": error.exit_code}


def as_document(value: Mapping[str, Any], exit_code: int = 0) -> dict[str, Any]:
    """Return a result after `FORMAT` and an exit code; its own keys of those names win."""
    return {"format": FORMAT, "exit_code": exit_code, **value}


def print_json(value: Mapping[str, Any], exit_code: int = 0) -> None:
    """Print the document of a result (`as_document`) as one line of JSON."""

    def plain(value: object) -> Any:
        """Return a dataclass as a dict, a set as a sorted list, any other value as text."""
        if is_dataclass(value) and not isinstance(value, type):
            return asdict(value)
        return sorted(value) if isinstance(value, (set, frozenset)) else str(value)

    print(json.dumps(as_document(value, exit_code), ensure_ascii=True, default=plain), flush=True)


def print_removal(
    args: argparse.Namespace,
    removed: Sequence[Path],
    kept_lines: Sequence[str],
    notes: Sequence[str],
    following: Sequence[str] = (),
    **more: str,
) -> None:
    """Print what an ``uninstall`` removed, or would remove with ``--dry-run``.

    Args:
        args: of the command.
        removed: the paths.
        kept_lines: what was not removed, and why.
        notes: sentences for people.
        following: the commands to run then.
        more: further keys for ``--json``.

    """
    if args.json:
        paths = {"removed": list(map(str, removed)), "kept": list(kept_lines), "notes": list(notes)}
        print_json({"dry_run": args.dry_run, **more, **paths, "next": list(following)})
        return
    would = "would be " if args.dry_run else ""
    lines = [f"{path}: {would}removed" for path in removed]
    for line in (
        *lines,
        *(f"kept {line}" for line in kept_lines),
        *(f"note: {note}" for note in notes),
    ):
        say(line)
    if following:
        print("then:", *following, sep="\n    ")


def first_of(lines: Sequence[str]) -> str:
    """Return the first line, and how many more there are; empty for no line."""
    more = f" (and {len(lines) - 1} more)" if len(lines) > 1 else ""
    return f"{lines[0]}{more}" if lines else ""


def columns(text: str) -> int:
    """Return how many columns a text takes on a terminal; a Chinese character takes two."""
    if text.isascii():
        return len(text)
    from rich.cells import cell_len

    return cell_len(text)


def aligned(rows: Iterable[Sequence[str]]) -> list[str]:
    """Return rows as lines with aligned columns, cleaned; the last column is not padded.

    All rows have the same number of cells; [] for no rows.
    """
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
    """Print a heading and rows; on a terminal the status of each row is coloured."""
    print_lines(aligned([heading, *rows]))


def print_lines(lines: Iterable[str]) -> None:
    """Print lines; on a terminal the status in each line is coloured."""
    sys.stdout.writelines(f"{paint(clean(line))}\n" for line in lines)


def paint(line: str) -> str:
    """Return a line with the first word of `COLOURS` that it has in colour, in that order.

    Return it unchanged if stdout is no terminal, or the user wants no colours.
    """
    if not has_colours(sys.stdout):
        return line
    for word, code in COLOURS.items():
        if f" {word} " in f" {line} ":
            return line.replace(word, f"\x1b[{code}m{word}\x1b[0m", 1)
    return line


@contextlib.contextmanager
def progress(args: argparse.Namespace, label: str, kept_text: str = "") -> Iterator[Progress]:
    """Within the block, show the progress that the given function gets: bytes done and in all.

    A total of 0 is not known.  On a terminal it is a bar on stderr, elsewhere a line every
    `SECONDS_BETWEEN_LINES`, with ``--json`` nothing.  ``kept_text``: what to print after the bytes
    done if the user interrupts the work.
    """
    label = clean(label)
    if args.json:
        yield lambda _done, _total: None
        return
    position = (0, 0)

    def report(done: int, total: int) -> None:
        """Remember the position for an interrupt, and show it."""
        nonlocal position
        position = done, total
        show(done, total)

    try:
        with _bar(label) if sys.stderr.isatty() else nullcontext(_progress_lines(label)) as show:
            yield report
    except KeyboardInterrupt:
        if kept_text and position[0]:
            say(f"ckptsync: {label}: {_of(*position)} {kept_text}", to_stderr=True)
        raise


def _of(done: int, total: int) -> str:
    """Return how much is done, of what, if the total is known."""
    return f"{show_size(done)} of {show_size(total)}" if total else show_size(done)


@contextlib.contextmanager
def _bar(label: str) -> Iterator[Progress]:
    """Show a bar on the terminal within the block, and give the function that moves it."""
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
        redirect_stdout=sys.stdout.isatty(),  # else stdout of a pipe would go to stderr
    ) as bar:
        task = bar.add_task(label, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total or None)


def _progress_lines(label: str) -> Progress:
    """Return a `Progress` that prints at most a line every `SECONDS_BETWEEN_LINES` on stderr.

    Its rate is that since the last line.
    """
    last, last_done = time.monotonic(), 0

    def show(done: int, total: int) -> None:
        """Print a line if the last one is old enough."""
        nonlocal last, last_done
        now = time.monotonic()
        if now - last < SECONDS_BETWEEN_LINES:
            return
        rate = max(0.0, (done - last_done) / (now - last))
        last, last_done = now, done
        is_known = rate >= 1 and total
        remaining = f", {show_duration(round((total - done) / rate))} left" if is_known else ""
        line = f"ckptsync: {label}: {_of(done, total)}, {show_size(round(rate))}/s{remaining}"
        print(line, file=sys.stderr, flush=True)

    return show
