"""What a store says of saves in whose middle their trainer was killed, beside what was really
written.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ckptsync.checkpoint_dirs import FINAL
from ckptsync.layouts import registry
from ckptsync.layouts.file_names import is_beside_weights
from ckptsync.records.location_status import LocationState
from ckptsync.records.store_paths import consolidated_prefix
from ckptsync.stores.checkpoint_files import DirectoryFiles
from ckptsync.stores.contract import Store, read_all
from ckptsync.worker.torn_saves import is_random_state
from tests.campaigns.written import Written, files
from tests.support.vector import bits

TICK = 0.05  # seconds by which a file's time may be behind the clock
CLAIMS = ("COMPLETE", "CONSOLIDATED", "VERIFIED")
# seconds that a save needs where only time tells that it is finished: on a node of shards alone
LIVED = 12.0


@dataclass(slots=True)
class ListedCheckpoint:
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


def judged(
    store: Store, snapshots: Iterable[LocationState], saves: Sequence[Written]
) -> ListedCheckpoint:
    """Every location compared, byte for byte."""
    found = ListedCheckpoint(
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
    found: ListedCheckpoint,
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
    for node in sorted(_nodes(seen)):
        theirs = files(save.parts[node]) if node in save.parts else {}
        ours = {
            path: at.name for path, where in seen.files.items() for at in where if node in at.nodes
        }
        if theirs.keys() - ours.keys():
            yield (
                f"{_named(save)} on {node} has"
                f" {', '.join(sorted(theirs.keys() - ours.keys()))}, too"
            )
        for path, name in sorted(ours.items()):
            if path not in theirs:
                if not is_beside_weights(path):
                    yield f"{_named(save)} on {node} has no {path}"
            elif bytes(read_all(store, name)) != theirs[path].read_bytes():
                yield f"{path} is not what {_named(save)} wrote on {node}"


def _is_all_there(seen: LocationState, save: Written) -> bool:
    return save.finished > 0 and save.parts.keys() <= _nodes(seen)


def _is_excused(seen: LocationState, torn: Written, lacking: set[str]) -> bool:
    """Whether nothing was lacking when the last rank was killed, or random states alone: they are
    not here, and this is nothing to resume from.
    """
    if not lacking:
        return True
    here = {_plain(path, torn) for path in seen.files}
    return (
        all(map(is_random_state, lacking))
        and not here & lacking
        and not seen.conditions.resume.holds
    )


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
    fetched = [
        _fetched(store, name, save.model.parent / f"fetched-{n}.safetensors")
        for n, name in enumerate(there)
    ]
    if bits(*fetched) != bits(save.model):
        yield f"{seen.run}/{seen.location}: the consolidated model is not the one of {_named(save)}"


def _fetched(store: Store, name: str, path: Path) -> Path:
    path.write_bytes(bytes(read_all(store, name)))
    return path


def _nodes(seen: LocationState) -> set[str]:
    return {known.manifest.node for known in seen.manifests}


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
