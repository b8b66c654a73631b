"""What a head does about a location, and the jobs of its catalogue.  Pure, and decided here alone.

The head's process lists the jobs from its catalogue; the child process that has one reads the
location again, and asks `todo_for` of what it is then.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Literal

from ckptsync.catalogue.child_job import Job
from ckptsync.catalogue.location_summary import Summary
from ckptsync.digest import digest

ANY_RUN = "*"
FINAL = "final"
"""The trainer's last model: it has the configuration that sharded checkpoints lack."""
Todo = Literal["merge", "repair", "configure"]


def todo_for(seen: Summary) -> Todo | None:
    """Return what is to be done about a location.

    Its model is made, repaired, or gets configuration that has come since, if any has.

    Damage to shards holds nothing up: bytes that are read are checked, and those that are not read
    do not matter.
    """
    if seen.status in ("RETIRED", "CONFLICT"):
        return None
    if not seen.model_record:
        return "merge" if seen.model else None
    return "repair" if seen.suspects else "configure"


def head_jobs(locations: Iterable[Summary], configured: Callable[[str], str]) -> tuple[Job, ...]:
    """Return all jobs: new models, the newest checkpoints first; then repairs; then completions.

    ``configured``: of a run, what changes when the files do that an operator gave for it; empty
    where there are none.
    """
    new: list[Summary] = []
    repairs: list[Job] = []
    models: dict[str, list[Summary]] = {}
    finals: dict[str, list[str]] = {}
    for seen in locations:
        todo = todo_for(seen)
        if todo == "merge":
            new.append(seen)
        elif todo == "repair":
            key, size = f"{seen.state} {seen.consolidated}", seen.size + seen.model_size
            once = seen.consolidated
            repairs.append(
                Job("consolidate", seen.run, seen.location, size, key=key, once_per_key=once)
            )
        elif todo == "configure":
            models.setdefault(seen.run, []).append(seen)
        if seen.checkpoint == FINAL and seen.status not in ("RETIRED", "CONFLICT"):
            finals.setdefault(seen.run, []).append(seen.state)
    new.sort(key=lambda s: (-s.arrived, s.run, s.location))
    merges = [Job("consolidate", s.run, s.location, s.size, key=s.state) for s in new]
    completions = (
        _completion(run, its, " ".join([*finals.get(run, []), configured(run)]).strip())
        for run, its in models.items()
    )
    return (*merges, *repairs, *filter(None, completions))


def _completion(run: str, models: Sequence[Summary], given: str) -> Job | None:
    """Return the job that completes the models of a run; None if there is nothing to add.

    One job a run: mostly there is nothing to add, and a process for each location to find that is
    too many.  Configuration comes with late manifests, from what is ``given`` for the run, or from
    the models of the run that lack the least.
    """
    fewest = min(len(s.to_open) for s in models)
    lenders = [s for s in models if len(s.to_open) == fewest]
    lacking = [s for s in models if s.late or (s.to_open and given) or len(s.to_open) > fewest]
    if not lacking:
        return None
    lent = " ".join(f"{s.location} {s.model_record}" for s in lenders)
    states = "\n".join(sorted(s.state for s in lacking))
    key = digest(f"{given}\n{lent}\n{states}".encode())
    return Job("consolidate", run, key=key, once_per_key=True)
