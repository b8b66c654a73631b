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
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import count
from pathlib import Path

from ckptsync.catalogue.uncached import read_state
from ckptsync.head.consolidate import HeadOptions
from ckptsync.head.due_jobs import VerifyPolicy
from tests.campaigns.campaign import end_by_signal, flags, verdict, working
from tests.campaigns.forking import Forker, kill, wait_for_ends
from tests.campaigns.killed_judge import (
    Judgement,
    Segment,
    Written,
    by_mode,
    judged,
    overtaken,
    written,
)
from tests.campaigns.two_nodes import (
    MODES,
    NODES,
    SCRIPT,
    START,
    TwoNodes,
    events,
    meeting_place,
    on_two_nodes,
    training_arguments,
)
from tests.support.head_in_process import consolidate_due, verify_next
from tests.support.vector import ROOT

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
RAW = Path(__file__).with_name("raw_training.py")
STEMS = {
    "raw-zero2": "global_step",
    "raw-zero3": "global_step",
    "raw-accelerate": "checkpoint_",
    "raw-dcp": "step-",
}
RAW_MODES = tuple(STEMS)
# seconds for those whose peer was killed to end by themselves, as torchrun would have them killed
LEFT = 6.0


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
    parser = training_arguments(__doc__, modes=(*MODES, *RAW_MODES))
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
        self._took = dict.fromkeys((*MODES, *RAW_MODES), 1.0)
        with_deepspeed = any("zero" in mode for mode in args.modes)
        modules = [*IMPORTS, *(["deepspeed"] if with_deepspeed else [])]
        self._forkers = [
            Forker(
                nodes.python(n, "-m", "tests.campaigns.forking", *modules),
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
        return Segment(run, n, hook, NODES * RANKS, STEMS.get(mode, "checkpoint-"))

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
        resumed = flags(resume=before is not None and self._brought(segment, before))
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
            words = [mode.removeprefix("raw-"), *self._words(home, segment, steps), *resumed]
            script = RAW if mode in RAW_MODES else SCRIPT
            log = home / f"{segment.name}.log"
            pids[n].append(self._forkers[n].fork(script, words, env, home, log))
        return pids

    def _words(self, home: Path, segment: Segment, steps: int) -> list[str]:
        out, truth = home / "out" / segment.run, home / "truth" / segment.name
        return [
            *flags(out=out, truth=truth, base=ROOT / "base", steps=steps, slow=PACE, limit=3),
            *flags(flavour=segment.n + 1, hook=segment.hook),
        ]

    def _wait_for_save(self, segment: Segment, step: int, pids: Sequence[int]) -> None:
        until = time.monotonic() + START
        while not any((e["event"], e["step"]) == ("saving", step) for e in self._said(segment)):
            assert time.monotonic() < until, f"{segment.name}: no save within {START} s"
            assert not wait_for_ends(pids, 0.02), (
                f"{segment.name}: ended by itself: {self._nodes.node(0)}/{segment.name}.log"
            )

    def _said(self, segment: Segment) -> Iterator[dict[str, object]]:
        for n in range(NODES):
            with contextlib.suppress(json.JSONDecodeError):  # the last line is being written
                for said in events(self._nodes.node(n) / "truth" / segment.name).values():
                    yield from said

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
        with contextlib.suppress(json.JSONDecodeError):  # the last line is being written
            found = events(self._nodes.node(n) / "truth" / segment.name)
            return {
                int(name.rpartition("-")[2])
                for name, its in found.items()
                if any((e["event"], e["step"]) == ("written", step) for e in its)
            }
        return set()

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
        for line in (
            *by_mode([asdict(k) for k in self._kills]),
            str(found),
        ):
            print(line, flush=True)
        verdict(found.wrong)
        return found


if __name__ == "__main__":
    end_by_signal(main)
