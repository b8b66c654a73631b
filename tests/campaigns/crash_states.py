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
from pathlib import Path

from ckptsync.stores.posix.draft import is_unfinished
from tests.campaigns.campaign import arguments
from tests.campaigns.crash_works import (
    CONTENDED,
    WORKS,
    Call,
    Data,
    Do,
    Names,
    Recorder,
    Step,
    Sync,
    at_random,
)

NEVER = 1 << 60
Allowed = Mapping[str, frozenset[bytes | None]]
"""For each name the contents that it may have, ``None`` where it may be absent."""


def main(argv: Sequence[str] | None = None) -> int:
    """0 if nothing is lost as the store is, and something without each fsync."""
    parser = arguments(__doc__)
    parser.add_argument("--states", type=int, default=300, help="tried at most for each moment")
    drawn = "works drawn at random, beside those that are written down"
    parser.add_argument("--random", type=int, default=4, help=drawn)
    args = parser.parse_args(argv)
    works = {**WORKS, **{f"at_random {n}": at_random(f"{n}") for n in range(1, args.random + 1)}}
    wrong, lost, spared = list[str](), Counter[str](), Counter[str]()
    for name, work in works.items():
        wrong += judged(name, work, args.states, lost, spared)
    wrong += needless(lost, spared)
    well = "nothing acknowledged was lost, no part of a file was seen, and no fsync can be spared"
    print("\n".join(wrong) or well)
    return 1 if wrong else 0


def judged(
    name: str, work: Sequence[Do], states: int, lost: Counter[str], spared: Counter[str]
) -> Iterator[str]:
    """Yield what is wrong with a work as it is, and without each of its fsyncs.

    Count where fsync is called: in ``lost``, how often something was lost without that one, in
    ``spared``, how often nothing was.  Works that are drawn at random are judged as they are.
    """
    with tempfile.TemporaryDirectory(prefix="ckptsync-crash-") as home:
        recorder = Recorder(Path(home))
        recorder.record(work)
    simulation = Simulation(recorder.steps, recorder.calls, states)
    for text in itertools.islice(simulation.violations(), 5):
        yield f"VIOLATED {name}: {text}"
    print(f"{name}: {len(recorder.steps)} steps, {simulation.tried} states after a power cut")
    for n, sync in simulation.syncs() if name in WORKS else ():
        is_lost = next(simulation.violations(without=n), None) is not None
        (lost if is_lost else spared)[sync.where] += 1
        if not is_lost and name not in CONTENDED:
            yield f"NEEDLESS {name}: step {n}, an fsync in {sync.where}: nothing is lost"


def needless(lost: Mapping[str, int], spared: Mapping[str, int]) -> list[str]:
    """Return places in the code whose fsyncs could be spared wherever they were called."""
    places = sorted(spared.keys() - lost.keys())
    return [f"NEEDLESS every fsync in {where}: nothing is lost" for where in places]


def _effect(call: Call, steps: Sequence[Step]) -> int:
    """Return the last step before a call's end that gave or took its name, told by its last part.

    -1 if there is none.
    """
    last = call.name.rpartition("/")[2]
    effects = (
        n
        for n, step in enumerate(steps[: call.ended])
        if isinstance(step, Names) and last in (step.gone, step.name)
    )
    return max(effects, default=-1)


def _allowed(calls: Sequence[Call], steps: Sequence[Step], moment: int) -> frozenset[bytes | None]:
    """Return what a name may hold before a step: the last effect that was acknowledged, and those
    of calls that were not, and may have happened at any time.
    """
    acknowledged = [call for call in calls if call.is_over(moment)]
    effects = [(_effect(c, steps), c.content) for c in acknowledged if not c.is_told]
    last = max((effect for effect, _ in effects), default=-1)
    told = max((c.ended for c in acknowledged if c.is_told and c.ended is not None), default=-1)
    effects = [(effect, content) for effect, content in effects if effect >= last]
    effects += [(moment, call.content) for call in calls if call not in acknowledged]
    if last < 0:
        effects.append((-1, None))  # nothing was there at first
    if told > last:  # who was told that the name is taken relies on it
        effects = [(at, data) for at, data in effects if data is not None or at == moment]
    return frozenset(data for _, data in effects)


def _broken(allowed: Allowed, files: Mapping[str, bytes]) -> Iterator[str]:
    """Yield what is there and was not promised."""
    for name in sorted({*files, *allowed}):
        contents, content = allowed.get(name, frozenset({None})), files.get(name)
        if content in contents:
            continue
        if content is None:
            yield f"{name}: acknowledged, and gone"
        elif contents == {None}:
            back = "acknowledged to be deleted, and back"
            yield f"{name}: {back if name in allowed else 'nobody wrote it'}"
        else:
            yield f"{name}: {len(content)} bytes that nobody has written so, or that were replaced"


class Simulation:
    """The steps and calls of a work, and what they leave behind wherever they end.

    ``states`` at most are tried for each moment; ``tried`` counts them.
    """

    def __init__(self, steps: Sequence[Step], calls: Sequence[Call], states: int) -> None:
        self._steps, self._calls, self._states = steps, calls, states
        self.tried = 0

    def violations(self, without: int = -1) -> Iterator[str]:
        """Yield what breaks a promise, by moment; ``without``: the step of an fsync taken out."""
        durable = [self._durable_at(n, without) for n in range(len(self._steps))]
        for moment in range(len(self._steps) + 1):
            calls = [call for call in self._calls if call.begun < moment or call.is_over(moment)]
            by_name = {call.name: [c for c in calls if c.name == call.name] for call in calls}
            allowed = {n: _allowed(its, self._steps, moment) for n, its in by_name.items()}
            for files in self.left(moment, durable):
                self.tried += 1
                yield from _broken(allowed, files)

    def syncs(self) -> Iterator[tuple[int, Sync]]:
        """Yield those that make something durable which was not."""
        for n, step in enumerate(self._steps):
            if isinstance(step, Sync) and any(self._durable_at(k) == n for k in range(n)):
                yield n, step

    def _durable_at(self, n: int, without: int = -1) -> int:
        """Return the fsync after which step ``n`` cannot be lost."""
        step = self._steps[n]
        if isinstance(step, Sync):
            return NEVER
        inode = step.inode if isinstance(step, Data) else step.directory
        for k in range(n + 1, len(self._steps)):
            later = self._steps[k]
            if k != without and isinstance(later, Sync) and later.inode == inode:
                return k
        return NEVER

    def left(self, moment: int, durable: Sequence[int]) -> Iterator[dict[str, bytes]]:
        """Yield what the store may hold after a power cut just before the step ``moment``."""
        names = [n for n in range(moment) if isinstance(self._steps[n], Names)]
        loose = [n for n in names if durable[n] >= moment]
        writes: dict[int, list[tuple[Data, bool]]] = {}
        for n in range(moment):
            if isinstance(step := self._steps[n], Data):
                writes.setdefault(step.inode, []).append((step, durable[n] < moment))
        contents = {inode: _contents(its) for inode, its in writes.items()}
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
        dice = random.Random(moment)
        for _ in range(self._states - len(plain)):
            kept = frozenset(n for n in loose if dice.random() < 0.5)
            yield kept, [dice.randrange(count) for count in counts]

    def _tree(self, names: Sequence[int]) -> dict[int, dict[str, int]]:
        changes = [step for step in self._steps if isinstance(step, Names)]
        tree: dict[int, dict[str, int]] = {step.directory: {} for step in changes}
        for n in names:
            step = self._steps[n]
            assert isinstance(step, Names)
            tree[step.directory].pop(step.gone, None)
            if step.name:
                tree[step.directory][step.name] = step.inode
        return tree


def _contents(writes: Sequence[tuple[Data, bool]]) -> list[bytes]:
    """Return what a file may hold, all of it first; of each write, whether it is durable."""
    whole = _filled(step for step, _ in writes)
    loose = [n for n, (_, is_durable) in enumerate(writes) if not is_durable]
    if not loose:
        return [whole]
    base = _filled(step for step, is_durable in writes if is_durable)
    zeros = _filled(step if is_durable else _zeroed(step) for step, is_durable in writes)
    without = _filled(step for n, (step, _) in enumerate(writes) if n != loose[0])
    half = whole[: len(base) + (len(whole) - len(base)) // 2]
    return [*dict.fromkeys((whole, base, zeros, half, half.ljust(len(whole), b"\0"), without))]


def _filled(steps: Iterable[Data]) -> bytes:
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


def _listed(
    tree: Mapping[int, Mapping[str, int]], at: int, prefix: str, contents: Mapping[int, bytes]
) -> Iterator[tuple[str, bytes]]:
    """As the store would list it; a file of which no byte was written is empty."""
    for name, inode in tree[at].items():
        if inode in tree:
            yield from _listed(tree, inode, f"{prefix}{name}/", contents)
        elif not is_unfinished(name):
            yield prefix + name, contents.get(inode, b"")


if __name__ == "__main__":
    raise SystemExit(main())
