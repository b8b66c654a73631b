"""What a store says of saves in whose middle their trainer was killed, beside what was really
written: which saves were finished on every rank, and what those held on each node.
"""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ckptsync.checkpoint_dirs import FINAL
from ckptsync.layouts import registry
from ckptsync.layouts.file_names import is_beside_weights
from ckptsync.records.location_status import LocationState
from ckptsync.records.store_paths import consolidated_prefix
from ckptsync.stores.checkpoint_files import DirectoryFiles
from ckptsync.stores.contract import Store, read_all
from ckptsync.walk import walk
from ckptsync.worker.torn_saves import is_random_state
from tests.campaigns.cluster import compared, nodes_of
from tests.campaigns.two_nodes import NODES, events
from tests.support.vector import bits

TICK = 0.05  # seconds by which a file's time may be behind the clock
CLAIMS = ("COMPLETE", "CONSOLIDATED", "VERIFIED")
# seconds that a save needs where only time tells that it is finished: on a node of shards alone
LIVED = 12.0
Said = Mapping[str, Sequence[Mapping[str, Any]]]
"""What each rank said, by any name of it."""


@dataclass(frozen=True, slots=True)
class Segment:
    """One process group of a training that was killed, and perhaps went on: ``n`` counts them from
    0.  ``ranks``: of all nodes.  ``stem``: of a checkpoint's name.
    """

    run: str
    n: int
    hook: bool
    ranks: int
    stem: str = "checkpoint-"

    @property
    def name(self) -> str:
        """Of its directory of truth."""
        return f"{self.run}.{self.n}"


@dataclass(frozen=True, slots=True)
class Written:
    """One save.

    ``parts``: node → a copy of what it held when it was finished, or of what was left of it.
    ``model``: as the framework gathered it.

    ``begun`` and ``finished``: seconds since the epoch, 0 where a rank never said so.  ``marked``:
    every rank took part in the next step after it, so that a hook had its word.  ``ended``: when
    another save may have rotated it, or begun to write over it.
    """

    run: str
    segment: int
    checkpoint: str
    step: int
    parts: Mapping[str, Path]
    model: Path
    begun: float
    finished: float
    marked: bool
    ended: float = float("inf")

    @property
    def lived(self) -> float:
        """For how many seconds it was there, and whole."""
        return self.ended - self.finished if self.finished else 0.0


def written(home: Path, segment: Segment) -> list[Written]:
    """All saves that a segment began, oldest first, once its processes have ended and before
    another begins.
    """
    truths = [home / f"node{n}" / "truth" / segment.name for n in range(NODES)]
    said = {
        f"{n} {rank}": lines
        for n, truth in enumerate(truths)
        for rank, lines in events(truth).items()
    }
    found = [_written(home, segment, step, said) for step in sorted(_times(said, "saving"))]
    return [replace(w, ended=_gone(said, w)) for w in found]


def overtaken(saves: Iterable[Written], begun: float) -> list[Written]:
    """Those of earlier segments when a later one begins to save: whatever it rotates or overwrites,
    it does not before.
    """
    return [replace(w, ended=min(w.ended, begun)) for w in saves]


def _written(home: Path, segment: Segment, step: int, said: Said) -> Written:
    name = f"{segment.stem}{step}"
    parts = {f"node{n}": _part(home / f"node{n}", segment, name) for n in range(NODES)}
    done, after = _times(said, "written").get(step, ()), _times(said, "gone").get(step, ())
    return Written(
        run=segment.run,
        segment=segment.n,
        checkpoint=name,
        step=step,
        parts={node: part for node, part in parts.items() if part is not None},
        model=home / "node0" / "truth" / segment.name / f"model-{step}.safetensors",
        begun=min(_times(said, "saving")[step]),
        finished=max(done) if len(done) == segment.ranks else 0.0,
        marked=len(after) == segment.ranks,
    )


def _part(node: Path, segment: Segment, name: str) -> Path | None:
    """The copy that the trainer made itself when all had gone on, else one of what lies there
    now.
    """
    kept, there = node / "truth" / segment.name / name, node / "out" / segment.run / name
    if not kept.is_dir() and there.is_dir():
        shutil.copytree(there, kept)
    return kept if kept.is_dir() else None


def _times(said: Said, event: str) -> dict[int, list[float]]:
    """Step → when each rank said it first."""
    found: dict[int, list[float]] = {}
    for lines in said.values():
        first: dict[int, float] = {}
        for line in lines:
            if line["event"] == event:
                first.setdefault(line["step"], line["at"])
        for step, at in first.items():
            found.setdefault(step, []).append(at)
    return found


def _gone(said: Said, save: Written) -> float:
    """When its own training may have rotated it: not before it saved again."""
    later = [min(at) for step, at in _times(said, "saving").items() if step > save.step]
    return min(later, default=float("inf"))


def files(part: Path) -> dict[str, Path]:
    """Of a copy, by path; without what a writer had not given its name yet."""
    return {stat.path: part / stat.path for stat in walk(part).files}


# --- the judgement


@dataclass(slots=True)
class Judgement:
    """``words``: how many locations have which.

    ``wanted``: saves that had to be in the store, ``whole``: claimed locations that are what was
    written.

    ``short``: of those, locations that lack nothing but random states of ranks that were killed
    before they wrote them, and say so.  ``unsaid``: of those, locations of saves of which all was
    written when a rank was killed, though it had not come so far as to say it.
    """

    words: Counter[str] = field(default_factory=Counter)
    finished: int = 0
    torn: int = 0
    wanted: int = 0
    whole: int = 0
    short: int = 0
    unsaid: int = 0
    wrong: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        locations = ", ".join(f"{n} {word}" for word, n in sorted(self.words.items()))
        return (
            f"{self.finished} saves finished, {self.torn} torn; {self.wanted} had to be in the"
            f" store; locations: {locations}; {self.whole} of those claimed to be whole are,"
            f" {self.short} of them without a killed rank's random state, {self.unsaid} whose last"
            f" rank was killed when all was written; {len(self.wrong)} wrong"
        )


def judged(store: Store, snapshots: Iterable[LocationState], saves: Sequence[Written]) -> Judgement:
    """Every location compared, byte for byte."""
    found = Judgement(
        finished=sum(bool(w.finished) for w in saves), torn=sum(not w.finished for w in saves)
    )
    matched: set[tuple[str, int, str]] = set()
    names = {(w.run, w.checkpoint) for w in saves}
    for seen in sorted(snapshots, key=lambda s: (s.run, s.location)):
        found.words[seen.status] += 1
        if seen.status in CLAIMS and (seen.run, seen.checkpoint) in names:
            _judge_location(store, seen, saves, found, matched)
        elif seen.status in CLAIMS and not _is_final(seen):
            found.wrong.append(
                f"{seen.run}/{seen.location}: {seen.status}, and nobody began to save that"
            )
    wanted = [w for w in saves if w.finished and (w.marked or w.lived > LIVED)]
    found.wanted = len(wanted)
    found.wrong += [
        f"{_named(w)}: MISSED" for w in wanted if (w.run, w.segment, w.checkpoint) not in matched
    ]
    return found


def _judge_location(
    store: Store,
    seen: LocationState,
    saves: Sequence[Written],
    found: Judgement,
    matched: set[tuple[str, int, str]],
) -> None:
    of_name = [w for w in saves if (w.run, w.checkpoint) == (seen.run, seen.checkpoint)]
    told = {(w.segment): [*_differences(store, seen, w)] for w in of_name}
    same = [w for w in of_name if not told[w.segment]]
    whole = next((w for w in same if w.finished), None)
    if whole is not None:
        matched |= {(w.run, w.segment, w.checkpoint) for w in same if _is_all_there(seen, w)}
        wrong = [*_model(store, seen, whole)]
        found.whole += not wrong
        found.wrong += wrong
    elif (
        same
        and (lacking := _lacking(same[0], saves)) is not None
        and _is_excused(seen, same[0], lacking)
    ):
        found.whole += 1
        found.short += bool(lacking)
        found.unsaid += not lacking
    elif same:
        found.wrong.append(
            f"{seen.run}/{seen.location}: {seen.status}, and TORN: {_named(same[0])} was never"
            " finished"
        )
    else:
        best = min(told.values(), key=len, default=["nobody wrote that"])
        found.wrong.append(
            f"{seen.run}/{seen.location}: {seen.status}, and of no save: {'; '.join(best)}"
        )


def _differences(store: Store, seen: LocationState, save: Written) -> Iterator[str]:
    """Between a location and what was written, on the nodes that have sent their part."""
    for node in sorted(nodes_of(seen)):
        theirs = files(save.parts[node]) if node in save.parts else {}
        lacking, extra, other = compared(store, seen, theirs, node)
        if lacking:
            yield f"{_named(save)} on {node} has {', '.join(lacking)}, too"
        for path in extra:
            if not is_beside_weights(path):
                yield f"{_named(save)} on {node} has no {path}"
        for path in other:
            yield f"{path} is not what {_named(save)} wrote on {node}"


def _is_all_there(seen: LocationState, save: Written) -> bool:
    return save.finished > 0 and save.parts.keys() <= nodes_of(seen)


def _is_excused(seen: LocationState, torn: Written, lacking: set[str]) -> bool:
    """Whether nothing was lacking when the last rank was killed, or random states alone: they are
    not here, and this is nothing to resume from, or it is a whole model: nothing says how many
    ranks wrote that, and the Trainer goes on without a rank's random state.
    """
    if not lacking:
        return True
    here = {_plain(path, torn) for path in seen.files}
    return (
        all(map(is_random_state, lacking))
        and not here & lacking
        and (not seen.conditions.resume.holds or _is_whole(seen))
    )


def _is_whole(seen: LocationState) -> bool:
    sources = (source for known in seen.manifests for source in known.manifest.sources)
    return any(registry.WeightsSource.named(source).is_whole for source in sources)


def _is_final(seen: LocationState) -> bool:
    """The model at a training's end is no save of a step; ZeRO-3's has a tag for its name."""
    is_zero = seen.checkpoint.startswith("global_step") and not seen.run.startswith("raw-")
    return seen.checkpoint == FINAL or is_zero


def _lacking(torn: Written, saves: Iterable[Written]) -> set[str] | None:
    """What any finished save of the same kind of training has, and this one has not written to its
    end; ``None`` where there is none.
    """
    kind = torn.run.rpartition("-")[0]
    examples = [w for w in saves if w.run.rpartition("-")[0] == kind and w.finished]
    ended = {
        _plain(path, torn)
        for part in torn.parts.values()
        for path in _ended(part, torn.begun - TICK)
    }
    wanted = {
        _plain(path, w) for w in examples for part in w.parts.values() for path in files(part)
    }
    return wanted - ended if examples else None


def _ended(part: Path, begun: float) -> Iterator[str]:
    """Files of a save that have the end of their format."""
    there = DirectoryFiles(str(part))
    for path, file in files(part).items():
        if file.stat().st_mtime >= begun and file.stat().st_size and registry.closed(path, there):
            yield path


def _plain(path: str, save: Written) -> str:
    return path.replace(f"global_step{save.step}/", "global_step/")


def _model(store: Store, seen: LocationState, save: Written) -> Iterator[str]:
    """The consolidated model beside the weights as the framework gathered them."""
    prefix = consolidated_prefix(seen.run, seen.location)
    there = [
        name for name in seen.sizes if name.startswith(prefix) and name.endswith(".safetensors")
    ]
    if seen.status == "COMPLETE" or not there or not save.model.is_file():
        return
    fetched = [save.model.parent / f"fetched-{n}.safetensors" for n in range(len(there))]
    for name, path in zip(there, fetched, strict=True):
        path.write_bytes(read_all(store, name))
    if bits(*fetched) != bits(save.model):
        yield f"{seen.run}/{seen.location}: the consolidated model is not the one of {_named(save)}"


def _named(save: Written) -> str:
    return f"{save.run}/{save.checkpoint} of segment {save.segment}"


def by_mode(kills: Iterable[Mapping[str, object]]) -> Iterator[str]:
    """How many kills, and how many of them in the middle of a save, by mode and by what was
    killed.
    """
    counted: Counter[tuple[object, ...]] = Counter()
    for kill in kills:
        for key in ("mode", "hook", "scope"):
            counted[key, kill[key], "kills"] += 1
            counted[key, kill[key], "hits"] += bool(kill["hit"])
    for key, value in sorted({(str(k[0]), k[1]) for k in counted}, key=str):
        yield (
            f"{key} {value}: {counted[key, value, 'kills']} kills, {counted[key, value, 'hits']} in"
            " the middle of a save"
        )
