"""The record of what an event of a head did with a location, and what it measured there.

Heads share no memory, and each can be killed while a command runs. So each try to handle an event
is a record: any head sees what is done, and how often it failed (`events.due`). Retention reads the
metrics from it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, get_args

from ckptsync.records.store_paths import FORMAT
from ckptsync.typed_json import Count, FormatNumber

Event = Literal["complete", "consolidated", "verified", "damaged", "repaired", "trained", "retired"]
EVENTS: tuple[Event, ...] = get_args(Event)
"""In the order in which they happen to one location."""
MOST_METRICS = 50
LONGEST_NAME = 100  # characters of a metric's name
LONGEST_ERROR = 500  # characters


@dataclass(frozen=True, slots=True)
class EventRecord:
    """One try to handle an event of a location.

    ``name`` is the event's in the head's configuration, ``event`` what happened. ``definition``: 16
    hex digits that change with what the configuration runs. ``of``: the file name of the record
    that shows what happened; empty for `complete`, which happens once. ``error``: why the try
    failed, or why its metrics were refused. ``metrics``: what it measured, finite numbers. The time
    of the try is the record's mtime.
    """

    run: str
    checkpoint: str
    location: str
    n: Count
    name: str
    definition: str
    event: str
    of: str
    outcome: Literal["done", "failed"]
    error: str = ""
    metrics: dict[str, float] = field(default_factory=dict)
    format: FormatNumber = FORMAT
