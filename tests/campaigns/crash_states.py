"""Cut the power at every moment of a store's work, and see that nothing it has promised is lost:
and that each fsync is needed for that.

    python -m tests.campaigns.crash_states --states 2000 --random 20

Nothing is switched off. The changes of files by a store at work (`tests.campaigns.crash_works`)
say what is durable at each moment: a file's bytes once it was synced, a directory's names once it
was, and nothing else. Of the rest any part may be found afterwards, in any combination: names out
of order, files empty, short, with holes, or full of zeros. That is more than one file system would
do (ext4 and XFS keep their names in order), and as much as POSIX lets it (Pillai et al., "All File
Systems Are Not Created Equal", OSDI 2014). A rename is seen whole or not at all.

What must hold in each state: a name has the bytes of its last write that was acknowledged, or of
one that was going on; never others, or a part of them; a name whose delete was acknowledged stays
away.  Then each fsync is taken out in turn, and one state at least must break that.
"""

from __future__ import annotations

import itertools
import math
import random
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ckptsync.stores.posix.draft import is_unfinished
from tests.campaigns.campaign import arguments
from tests.campaigns.crash_works import (
    CONTENDED,
    WORKS,
    Data,
    Mark,
    Names,
    Step,
    Sync,
    content,
    recorded,
)

NEVER = 1 << 60
Allowed = Mapping[str, frozenset[bytes | None]]
"""For each name the contents that it may have, ``None`` where it may be absent."""


@dataclass(frozen=True, slots=True)
class Call:
    """One call, from the mark ``begun`` to the mark ``ended``, if it came.

    ``content``: of a file, ``None`` of a delete.  ``effect``: the step that gave or took the name.
    ``is_told``: it ended with Exists.
    """

    name: str
    content: bytes | None
    begun: int
    ended: int | None
    effect: int
    is_told: bool


def _calls(steps: Sequence[Step]) -> Iterator[Call]:
    begun: dict[int, tuple[int, str, bytes | None]] = {}
    ended: dict[int, tuple[int, bool]] = {}
    for n, step in enumerate(steps):
        if isinstance(step, Mark):
            said = step.said
            if "begin" in said:
                data = content(said["seed"], said["size"]) if said["kind"] == "put" else None
                begun.setdefault(said["begin"], (n, said["name"], data))
            else:
                ended[said["done"] if "done" in said else said["exists"]] = (n, "exists" in said)
    for key, (start, name, data) in begun.items():
        end, is_told = ended.get(key, (None, False))
        # the last step before the end that gave or took this name, told by its last part
        last = name.rpartition("/")[2]
        effects = (
            n
            for n, step in enumerate(steps[:end])
            if isinstance(step, Names) and last in (step.gone, step.name)
        )
        yield Call(name, data, start, end, max(effects, default=-1), is_told)


def _allowed(calls: Iterable[Call], moment: int) -> frozenset[bytes | None]:
    """Return what a name may hold before a step: the last effect that was acknowledged, and those
    of calls that were not, and may have happened at any time.
    """
    acknowledged = [c for c in calls if c.ended is not None and c.ended < moment]
    last = max((c.effect for c in acknowledged if not c.is_told), default=-1)
    told = max((c.ended for c in acknowledged if c.is_told and c.ended is not None), default=-1)
    effects = [(c.effect, c.content) for c in acknowledged if not c.is_told and c.effect >= last]
    effects += [(moment, c.content) for c in calls if c not in acknowledged]
    if last < 0:
        effects.append((-1, None))  # nothing was there at first
    if told > last:  # who was told that the name is taken relies on it
        effects = [(at, data) for at, data in effects if data is not None or at == moment]
    return frozenset(data for _, data in effects)


def _broken(allowed: Allowed, found: Mapping[str, bytes]) -> Iterator[str]:
    """Yield what is found and was not promised."""
    for name in sorted({*found, *allowed}):
        may, has = allowed.get(name, frozenset({None})), found.get(name)
        if has in may:
            continue
        if has is None:
            yield f"{name}: acknowledged, and gone"
        elif may == {None}:
            back = "acknowledged to be deleted, and back"
            yield f"{name}: {back if name in allowed else 'nobody wrote it'}"
        else:
            yield f"{name}: {len(has)} bytes that nobody has written so, or that were replaced"


class Work:
    """The steps of a work, and what they leave behind wherever they end.

    ``states`` at most are tried for each moment.
    """

    def __init__(self, steps: Sequence[Step], states: int, seed: int = 1) -> None:
        self.steps, self._states, self._seed = steps, states, seed
        self._calls = list(_calls(steps))
        self.tried = 0

    def violations(self, without: int = -1) -> Iterator[str]:
        """Yield what breaks a promise, by moment; ``without``: the step of an fsync taken out."""
        durable = [self._durable_at(n, without) for n in range(len(self.steps))]
        for moment in range(len(self.steps) + 1):
            calls = [call for call in self._calls if call.begun < moment]
            names = {call.name for call in calls}
            allowed = {n: _allowed([c for c in calls if c.name == n], moment) for n in names}
            for found in self.left(moment, durable):
                self.tried += 1
                yield from _broken(allowed, found)

    def syncs(self) -> Iterator[tuple[int, Sync]]:
        """Yield those that make something durable which was not."""
        for n, step in enumerate(self.steps):
            if isinstance(step, Sync) and any(self._durable_at(k, -1) == n for k in range(n)):
                yield n, step

    def _durable_at(self, n: int, without: int) -> int:
        """Return the fsync after which step ``n`` cannot be lost."""
        step = self.steps[n]
        if isinstance(step, Sync | Mark):
            return NEVER
        inode = step.inode if isinstance(step, Data) else step.directory
        for k in range(n + 1, len(self.steps)):
            later = self.steps[k]
            if k != without and isinstance(later, Sync) and later.inode == inode:
                return k
        return NEVER

    def left(self, moment: int, durable: Sequence[int]) -> Iterator[dict[str, bytes]]:
        """Yield what the store may hold after a power cut just before the step ``moment``."""
        names = [n for n in range(moment) if isinstance(self.steps[n], Names)]
        loose = [n for n in names if durable[n] >= moment]
        files: dict[int, list[int]] = {}
        for n in range(moment):
            if isinstance(step := self.steps[n], Data):
                files.setdefault(step.inode, []).append(n)
        contents = {
            inode: self._contents(steps, [durable[n] < moment for n in steps])
            for inode, steps in files.items()
        }
        for kept, chosen in self._choices(loose, [*map(len, contents.values())], moment):
            tree = self._tree([n for n in names if n not in loose or n in kept])
            pairs = zip(contents.items(), chosen, strict=True)
            yield dict(_listed(tree, 0, "", {inode: its[k] for (inode, its), k in pairs}))

    def _choices(
        self, loose: Sequence[int], counts: Sequence[int], moment: int
    ) -> Iterator[tuple[frozenset[int], Sequence[int]]]:
        """Yield which steps survived, and which content each file has: all there are, or the
        plainest and then some at random.
        """
        if 2 ** len(loose) * math.prod(counts) <= self._states:
            sizes = range(len(loose) + 1)
            subsets = (s for k in sizes for s in itertools.combinations(loose, k))
            every = [*itertools.product(*map(range, counts))]
            yield from ((frozenset(s), chosen) for s in subsets for chosen in every)
            return
        all_, none = frozenset(loose), frozenset[int]()
        plain = [all_, none, *(frozenset({n}) for n in loose), *(all_ - {n} for n in loose)]
        for kept in plain:
            for k in range(max(counts, default=1)):
                yield kept, [min(k, count - 1) for count in counts]
        dice = random.Random(f"{self._seed} {moment}")
        for _ in range(self._states - len(plain)):
            kept = frozenset(n for n in loose if dice.random() < 0.5)
            yield kept, [dice.randrange(count) for count in counts]

    def _contents(self, steps: Sequence[int], is_durable: Sequence[bool]) -> list[bytes]:
        """Return what a file may hold: all of it first."""
        written = [step for n in steps if isinstance(step := self.steps[n], Data)]
        whole = _filled(written)
        if all(is_durable):
            return [whole]
        pairs = [*zip(written, is_durable, strict=True)]
        base = _filled([step for step, durable in pairs if durable])
        zeros = _filled([step if durable else _zeroed(step) for step, durable in pairs])
        first = is_durable.index(False)
        without = _filled([*written[:first], *written[first + 1 :]])
        half = whole[: len(base) + (len(whole) - len(base)) // 2]
        return [*dict.fromkeys((whole, base, zeros, half, half.ljust(len(whole), b"\0"), without))]

    def _tree(self, names: Sequence[int]) -> dict[int, dict[str, int]]:
        tree: dict[int, dict[str, int]] = {}
        for step in self.steps:
            if isinstance(step, Names):
                tree.setdefault(step.directory, {})
        for n in names:
            step = self.steps[n]
            assert isinstance(step, Names)
            tree[step.directory].pop(step.gone, None)
            if step.name:
                tree[step.directory][step.name] = step.inode
        return tree


def _listed(
    tree: Mapping[int, Mapping[str, int]], at: int, prefix: str, contents: Mapping[int, bytes]
) -> Iterator[tuple[str, bytes]]:
    """As the store would list it; a file of which no byte was written is empty."""
    for name, inode in tree[at].items():
        if inode in tree:
            yield from _listed(tree, inode, f"{prefix}{name}/", contents)
        elif not is_unfinished(name):
            yield prefix + name, contents.get(inode, b"")


def _filled(steps: Sequence[Data]) -> bytes:
    result = bytearray()
    for step in steps:
        if step.data is None:
            result = result[: step.start]
        result = result.ljust(step.start, b"\0")
        if step.data is not None:
            result[step.start : step.start + len(step.data)] = step.data
    return bytes(result)


def _zeroed(step: Data) -> Data:
    return Data(step.inode, step.start, step.data and bytes(len(step.data)))


@dataclass(frozen=True, slots=True)
class Verdict:
    """``lost``: for each location in the code that calls fsync, how often something was lost
    without one, and ``spared`` how often nothing was.
    """

    line: str
    wrong: tuple[str, ...]
    lost: Counter[str]
    spared: Counter[str]


def judged(name: str, states: int) -> Verdict:
    """Judge a work as it is, and without each of its fsyncs, but for works drawn at random."""
    with tempfile.TemporaryDirectory(prefix="ckptsync-crash-") as home:
        work = Work(recorded(name, Path(home)), states)
    wrong = [f"VIOLATED {name}: {text}" for text in itertools.islice(work.violations(), 5)]
    line = f"{name}: {len(work.steps)} steps, {work.tried} states after a power cut"
    lost, spared = Counter[str](), Counter[str]()
    for n, sync in work.syncs() if name in WORKS else ():
        is_lost = next(work.violations(without=n), None) is not None
        (lost if is_lost else spared)[sync.where] += 1
        if not is_lost and name not in CONTENDED:
            wrong.append(f"NEEDLESS {name}: step {n}, an fsync in {sync.where}: nothing is lost")
    line += f"; without one of {(lost + spared).total()} fsyncs, {lost.total()} lose something"
    return Verdict(line, tuple(wrong), lost, spared)


def needless(verdicts: Sequence[Verdict]) -> list[str]:
    """Return locations in the code whose fsyncs could be spared wherever they were called."""
    lost = {where for verdict in verdicts for where in verdict.lost}
    spared = {where for verdict in verdicts for where in verdict.spared}
    return [f"NEEDLESS every fsync in {where}: nothing is lost" for where in sorted(spared - lost)]


def main(argv: Sequence[str] | None = None) -> int:
    """0 if nothing is lost as the store is, and something without each fsync."""
    parser = arguments(__doc__)
    parser.add_argument("--states", type=int, default=300, help="tried at most for each moment")
    told = "works drawn at random, beside those that are written down"
    parser.add_argument("--random", type=int, default=4, help=told)
    args = parser.parse_args(argv)
    drawn = [f"at_random {1 + n}" for n in range(args.random)]
    verdicts = [judged(name, args.states) for name in (*WORKS, *drawn)]
    print("\n".join(verdict.line for verdict in verdicts))
    wrong = [*(line for verdict in verdicts for line in verdict.wrong), *needless(verdicts)]
    well = "nothing acknowledged was lost, no part of a file was seen, and no fsync can be spared"
    print("\n".join(wrong) or well)
    return 1 if wrong else 0


if __name__ == "__main__":
    raise SystemExit(main())
