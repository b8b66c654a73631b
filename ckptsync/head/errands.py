"""What a head has to do, as its catalogue tells it: one errand for each location, or run, that something is to be done about.  Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from ckptsync.catalogue.summary import Summary
from ckptsync.digest import digest

ANY_RUN = "*"
FINAL = "final"
"""The model that a trainer leaves in its run's root: it has the configuration that sharded checkpoints lack."""


@dataclass(frozen=True, slots=True)
class Errand:
    """``location`` is empty where all consolidated locations of a run are meant; ``size``: bytes that are read.  Errands of equal ``key`` come to the same end.

    ``lasts``: what has been looked at once need not be looked at again while its key is the same.
    """

    run: str
    location: str
    size: int
    key: str
    lasts: bool = False


def errands(locations: Iterable[Summary], configured: Callable[[str], str]) -> tuple[Errand, ...]:
    """New models first, those of the newest checkpoints before others; then what is damaged of older ones; then what could be added.

    ``configured``: of a run, what changes when files that an operator gave for it do; empty where there are none.
    """
    known = [s for s in locations if s.status not in ("RETIRED", "CONFLICT")]
    new = sorted((s for s in known if not s.model_record and s.model), key=lambda s: (-s.arrived, s.run, s.location))
    bad = [s for s in known if s.model_record and (s.proof.damage or not s.consolidated)]
    return (
        *(Errand(s.run, s.location, s.size, s.state) for s in new),
        *(Errand(s.run, s.location, s.size + s.model_size, f"{s.state} {s.consolidated}", lasts=s.consolidated) for s in bad),
        *_completions(known, configured),
    )


def _completions(known: Iterable[Summary], configured: Callable[[str], str]) -> Iterator[Errand]:
    """One for a run: most often there is nothing to add, and ten thousand processes that find so are many.

    Where one model lacks more than another of its run, that one may lend it its configuration.
    """
    by_run: dict[str, list[Summary]] = {}
    for s in known:
        by_run.setdefault(s.run, []).append(s)
    for run, locations in by_run.items():
        given = " ".join([*(s.state for s in locations if s.checkpoint == FINAL), configured(run)]).strip()
        fewest = min((len(s.to_open) for s in locations if s.consolidated), default=0)
        able = " ".join(f"{s.location} {s.model_record}" for s in locations if s.consolidated and len(s.to_open) == fewest)
        lacking = [s for s in locations if s.consolidated and (s.late or (s.to_open and given) or len(s.to_open) > fewest)]
        if lacking:
            states = "\n".join(sorted(s.state for s in lacking))
            yield Errand(run, "", 0, digest(f"{given}\n{able}\n{states}".encode()), lasts=True)
