"""Trainers killed with SIGKILL in the middle of a save, again and again, beside workers: what a
store calls whole is whole, and no torn save ever is.

    python -m tests.campaigns.killed --modes ddp fsdp2 zero2 zero3 --chains 3

Real trainings (Hugging Face's Trainer) across two nodes without a shared disk, a worker on each,
with the hook and without.  One rank, one node's ranks or all are killed at a random moment of a
save, which is slowed down to be hit (`tests.campaigns.slow_saving`).  Then the training is let be,
or goes on over the same directory: from its last whole checkpoint, so that the torn one is written
over, or from one before, so that whole ones are.  A training that goes on sees other lines, so that
its saves of the same name have other weights.  ``--modes raw-...``: DeepSpeed, accelerate and
torch's distributed checkpoint without any Trainer.

In the end, when all that waits has waited long enough, every location that the store calls
COMPLETE, or consolidates and verifies, must be byte for byte one save that had ended on every rank;
of a save that the hook marked, or that lived long enough, there must be such a location.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import shutil
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import count
from pathlib import Path
from typing import Any

from ckptsync.catalogue.uncached import read_state
from ckptsync.checkpoint_dirs import FINAL
from ckptsync.head.consolidate import HeadOptions
from ckptsync.head.due_jobs import VerifyPolicy
from ckptsync.layouts import registry
from ckptsync.records.location_status import LocationState
from ckptsync.records.store_paths import consolidated_prefix
from ckptsync.stores.checkpoint_files import DirectoryFiles
from ckptsync.stores.contract import Store, read_all
from ckptsync.walk import walk
from ckptsync.worker.torn_saves import is_random_state
from tests.campaigns.campaign import end_by_signal, flags, verdict, working
from tests.campaigns.cluster import differences, nodes_of
from tests.campaigns.forking import Forker
from tests.campaigns.nodes import kill, wait_for_ends
from tests.campaigns.two_nodes import (
    MODES,
    NODES,
    START,
    TRAININGS,
    Job,
    TwoNodes,
    all_events,
    events,
    meeting_place,
    on_two_nodes,
    training_arguments,
)
from tests.support.head_in_process import consolidate_due, verify_next
from tests.support.vector import ROOT, bits

RANKS = 2  # on each node
PACE = "0.12"  # seconds that each file of a save takes, about
WORKER = {"quiet": "2s", "unmarked": "5s"}
DOUBTFUL = 50.0  # seconds: ten times unmarked
SCOPES = ("rank", "rank", "node", "all")
IMPORTS = (
    "torch.distributed.checkpoint",
    "transformers.trainer",
    "transformers.models.llama.modeling_llama",
    "ckptsync.hooks.hf",
)
ALL_MODES = tuple(mode for mode in TRAININGS if mode != "lora")
# seconds for those whose peer was killed to end by themselves, as torchrun would have them killed
LEFT = 6.0

TICK = 0.05  # seconds by which a file's time may be behind the clock
CLAIMS = ("COMPLETE", "CONSOLIDATED", "VERIFIED")
# seconds that a save needs where only time tells that it is finished: on a node of shards alone
LIVED = 12.0
Said = Mapping[str, Sequence[Mapping[str, Any]]]
"""What each rank said, by any name of it."""


@dataclass(frozen=True, slots=True)
class Kill:
    """``hit``: some rank was in the middle of a save, which was then never finished."""

    run: str
    mode: str
    hook: bool
    scope: str
    hit: bool
    after: float


def main(argv: Sequence[str] | None = None) -> int:
    """0 if the store told nothing but the truth, 1 if not."""
    args = _arguments().parse_args(argv)
    with (
        working("killed", args.home) as home,
        on_two_nodes(home, args.store, args.python, **WORKER) as nodes,
        contextlib.closing(Campaign(nodes, args)) as campaign,
    ):
        return 1 if campaign.run().wrong else 0


def _arguments() -> argparse.ArgumentParser:
    parser = training_arguments(__doc__, modes=ALL_MODES, default=MODES)
    parser.add_argument("--chains", type=int, default=3, help="trainings of each kind")
    parser.add_argument("--kills", type=int, default=3, help="of each training, at most")
    parser.add_argument("--seed", type=int, default=1)
    return parser


class Campaign:
    """All trainings, one after the other, and one judgement at the end."""

    def __init__(self, nodes: TwoNodes, args: argparse.Namespace) -> None:
        self._nodes, self._args, self._dice = nodes, args, random.Random(args.seed)
        self._ports = count(29500)
        self._saves: list[Written] = []
        self._kills: list[Kill] = []
        self._took = dict.fromkeys(args.modes, 1.0)
        modules = dict.fromkeys((*IMPORTS, *(m for k in args.modes for m in TRAININGS[k].needs)))
        self._forkers = [
            Forker(
                [*nodes.within(n), nodes.trainer, "-m", "tests.campaigns.forking", *modules],
                nodes.environment(),
                nodes.home / f"forker{n}.log",
            )
            for n in range(NODES)
        ]

    def run(self) -> Judgement:
        """A line for each kill; in the end what was found."""
        for n in range(NODES):
            self._nodes.begin(n)
        for forker in self._forkers:
            forker.ready()
        for chain in range(self._args.chains):
            for mode in self._args.modes:
                for hook in ("hook", "none"):
                    if hook == "none" or mode in MODES:
                        self._chain(f"{mode}-{hook}-{chain + 1}", mode, hook == "hook")
        return self._judged()

    def close(self) -> None:
        """With all that trains."""
        for forker in self._forkers:
            forker.close()

    def _chain(self, run: str, mode: str, hook: bool) -> None:  # noqa: FBT001
        kills = self._dice.randint(1, self._args.kills)
        for n in range(kills):
            self._segment(self._named(run, n, mode, hook), mode, is_killed=True)
            time.sleep(self._dice.choice((0.0, 0.0, 4.0)))
        if self._dice.random() < 0.3:
            self._segment(self._named(run, kills, mode, hook), mode, is_killed=False)

    def _named(self, run: str, n: int, mode: str, hook: bool) -> Segment:  # noqa: FBT001
        return Segment(run, n, hook, NODES * RANKS, TRAININGS[mode].stem)

    def _segment(self, segment: Segment, mode: str, *, is_killed: bool) -> None:
        """A training from where it may go on, to its end or to the middle of a save."""
        before = self._resumable(segment.run)
        at, whole = (
            before.step if before else 0,
            [w.step for w in self._saves if w.run == segment.run and w.finished],
        )
        step = max(whole) if whole and at < max(whole) else at + self._dice.choice((1, 1, 2, 2, 3))
        pids = self._begin(segment, mode, before, step + (2 if is_killed else 0))
        flat = [pid for node in pids for pid in node]
        if is_killed:
            scope, after = self._dice.choice(SCOPES), self._dice.uniform(0, 0.9) * self._took[mode]
            self._wait_for_save(segment, step, flat)
            time.sleep(after)
            kill(self._victims(segment, step, pids, scope))
            wait_for_ends(flat, LEFT)
        else:
            scope, after = "", 0.0
            wait_for_ends(flat, START)
        kill(flat)
        assert wait_for_ends(flat, 60), "killed, and still there"
        self._remember(segment, mode, scope, after)

    def _begin(
        self, segment: Segment, mode: str, before: Written | None, steps: int
    ) -> list[list[int]]:
        more = flags(
            slow=PACE, limit=3, flavour=segment.n + 1,
            resume=before is not None and self._brought(segment, before),
        )  # fmt: skip
        job = Job(
            segment.run, mode, segment.hook, steps, attempt=str(segment.n),
            more=more,
        )  # fmt: skip
        world = {
            "WORLD_SIZE": str(segment.ranks),
            "LOCAL_WORLD_SIZE": str(RANKS),
            "MASTER_ADDR": meeting_place(self._nodes.network)[0],
            "MASTER_PORT": str(next(self._ports)),
        }
        pids: list[list[int]] = [[], []]
        for n, local in ((n, local) for n in range(NODES) for local in range(RANKS)):
            home = self._nodes.node(n)
            (home / "truth" / segment.name).mkdir(parents=True, exist_ok=True)
            rank = {"RANK": n * RANKS + local, "LOCAL_RANK": local, "GROUP_RANK": n}
            env = world | {name: str(value) for name, value in rank.items()}
            script, log = TRAININGS[mode].script, home / f"{segment.name}.log"
            pids[n].append(self._forkers[n].fork(script, job.words(home), env, home, log))
        return pids

    def _wait_for_save(self, segment: Segment, step: int, pids: Sequence[int]) -> None:
        until = time.monotonic() + START
        truths = [self._nodes.node(n) / "truth" / segment.name for n in range(NODES)]
        while not any(e["step"] == step for t in truths for e in all_events(t, "saving")):
            assert time.monotonic() < until, f"{segment.name}: no save within {START} s"
            assert not wait_for_ends(pids, 0.02), (
                f"{segment.name}: ended by itself: {self._nodes.node(0)}/{segment.name}.log"
            )

    def _victims(
        self, segment: Segment, step: int, pids: Sequence[Sequence[int]], scope: str
    ) -> list[int]:
        """One that is in the middle of this save, if any still is; its whole node, or all."""
        said = {n: self._at(n, segment, step) for n in range(NODES)}
        busy = [
            (n, pid)
            for n, its in enumerate(pids)
            for rank, pid in enumerate(its, n * RANKS)
            if rank not in said[n]
        ]
        n, one = self._dice.choice(busy or [(n, pid) for n, its in enumerate(pids) for pid in its])
        return {"rank": [one], "node": list(pids[n]), "all": [pid for its in pids for pid in its]}[
            scope
        ]

    def _at(self, n: int, segment: Segment, step: int) -> set[int]:
        """Ranks of a node that have written all of their part."""
        return {
            int(name.rpartition("-")[2])
            for name, its in events(self._nodes.node(n) / "truth" / segment.name).items()
            if any((e["event"], e["step"]) == ("written", step) for e in its)
        }

    def _resumable(self, run: str) -> Written | None:
        """The newest save that is whole, or the one before it, so that a whole one is written over;
        ``None``: from the start.
        """
        newest = {w.step: w for w in self._saves if w.run == run}
        whole = [newest[step] for step in sorted(newest) if newest[step].finished]
        before = whole[-2] if len(whole) > 1 else None
        return self._dice.choice((whole[-1], before)) if whole else None

    def _brought(self, segment: Segment, before: Written) -> Path:
        """What all nodes have of a checkpoint, in one directory, as who goes on has to bring it
        together.
        """
        there = self._nodes.home / "resumed" / segment.name / before.checkpoint
        for part in before.parts.values():
            shutil.copytree(part, there, dirs_exist_ok=True)
        return there

    def _remember(self, segment: Segment, mode: str, scope: str, after: float) -> None:
        found = written(self._nodes.home, segment)
        begun = min((w.begun for w in found), default=float("inf"))
        mine = [w for w in self._saves if w.run == segment.run]
        self._saves = (
            [w for w in self._saves if w.run != segment.run] + overtaken(mine, begun) + found
        )
        self._took[mode] = max(
            [w.finished - w.begun for w in found if w.finished] or [self._took[mode]]
        )
        torn = [w.checkpoint for w in found if not w.finished]
        if scope:
            self._kills.append(Kill(segment.run, mode, segment.hook, scope, bool(torn), after))
        how = (
            f"{scope} killed {after:.2f} s into a save of {self._took[mode]:.2f} s"
            if scope
            else "to its end"
        )
        print(
            f"{segment.name}: {how}: {sum(bool(w.finished) for w in found)} finished, torn:"
            f" {', '.join(torn) or 'none'}",
            flush=True,
        )

    def _judged(self) -> Judgement:
        # what a crash left has to lie for so long until somebody might take it
        time.sleep(DOUBTFUL + 45)
        made = consolidate_due(
            self._nodes.store, HeadOptions(config_from={"*": str(ROOT / "base")})
        )
        for failed in made.failed:
            print(f"not consolidated: {failed.run}/{failed.location}: {failed.error}")
        for _ in read_state(self._nodes.store).readable:
            verify_next(self._nodes.store, VerifyPolicy(), time.time())
        seen = read_state(self._nodes.store).readable
        found = judged(self._nodes.store, seen, self._saves)
        (self._nodes.home / "kills.json").write_text(json.dumps([asdict(k) for k in self._kills]))
        for line in (*by_mode(self._kills), str(found)):
            print(line, flush=True)
        verdict(found.wrong)
        return found


# --- what was written, and what the store says of it


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
        for path, how in differences(store, seen, theirs, node, adds_configs=True):
            yield f"beside {_named(save)} on {node}, {path}: {how}"


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


def by_mode(kills: Iterable[Kill]) -> Iterator[str]:
    """Yield the kills, and those in the middle of a save, by mode, hook and what was killed."""
    hits: defaultdict[tuple[str, object], list[bool]] = defaultdict(list)
    for one in kills:
        for key in ("mode", "hook", "scope"):
            hits[key, getattr(one, key)].append(one.hit)
    for (key, value), its in sorted(hits.items(), key=str):
        yield f"{key} {value}: {len(its)} kills, {sum(its)} in the middle of a save"


if __name__ == "__main__":
    end_by_signal(main)
