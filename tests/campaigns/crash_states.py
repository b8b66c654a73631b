"""Cut the power at every moment of a store's work, and see that nothing it has promised is lost:
and that each fsync is needed for that.

    python -m tests.campaigns.crash_states --states 2000 --random 20

Nothing is switched off.  The system calls of a store at work (`tests.campaigns.crash_work`) say
what is durable at each moment: a file's bytes once it was synced, a directory's names once it was,
and nothing else.  Of the rest any part may be found afterwards, in any combination: names out of
order, files empty, short, with holes, or full of zeros.  That is more than one file system would do
(ext4 and XFS keep their names in order), and as much as POSIX lets it (Pillai et al., "All File
Systems Are Not Created Equal", OSDI 2014).  A rename is seen whole or not at all.

What must hold in each state: a name has the bytes of its last write that was acknowledged, or of
one that was going on; never others, or a part of them; a name whose delete was acknowledged stays
away.  Then each fsync is taken out in turn, and one state at least must break that.
"""

from __future__ import annotations

import argparse
import itertools
import math
import random
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ckptsync.stores.posix.draft import is_unfinished
from tests.campaigns.campaign import arguments
from tests.campaigns.crash_trace import Data, Mark, Names, Step, Sync, traced
from tests.campaigns.crash_work import CONTENDED, WORKS, content
from tests.campaigns.killing import can_trap

NEVER = 1 << 60


# --- what a store has promised at each moment of its work, by the marks of `crash_work`


@dataclass(frozen=True, slots=True)
class Call:
    """One call, from the mark ``begun`` to the mark ``ended``, if it came.

    ``effect``: the step that gave or took the name.

    ``content``: of a file, ``None`` of a delete; ``is_told``: it ended with Exists.
    """

    name: str
    content: bytes | None
    begun: int
    ended: int | None = None
    effect: int = -1
    is_told: bool = False


@dataclass(frozen=True, slots=True)
class Allowed:
    """For each name the contents that it may have now, ``None`` where it may be absent."""

    names: Mapping[str, frozenset[bytes | None]]

    def broken_by(self, found: Mapping[str, bytes]) -> Iterator[str]:
        """In words, what is found and was not promised."""
        for name in sorted({*found, *self.names}):
            may, has = self.names.get(name, frozenset({None})), found.get(name)
            if has in may:
                continue
            if has is None:
                yield f"{name}: acknowledged, and gone"
            elif may == {None}:
                yield (
                    f"{name}: acknowledged to be deleted, and back"
                    if name in self.names
                    else f"{name}: nobody wrote it"
                )
            else:
                yield f"{name}: {len(has)} bytes that nobody has written so, or that were replaced"


class Promises:
    """Of one work."""

    def __init__(self, steps: Sequence[Step]) -> None:
        self._calls = list(_calls(steps))

    def at(self, moment: int) -> Allowed:
        """Before the step ``moment``."""
        names: dict[str, list[Call]] = {}
        for call in self._calls:
            if call.begun < moment:
                names.setdefault(call.name, []).append(call)
        return Allowed({name: _allowed(calls, moment) for name, calls in names.items()})


def _allowed(calls: Sequence[Call], moment: int) -> frozenset[bytes | None]:
    """The last effect that was acknowledged, and those of calls that were not, and may have
    happened at any time.
    """
    acknowledged = [c for c in calls if c.ended is not None and c.ended < moment]
    last = max((c.effect for c in acknowledged if not c.is_told), default=-1)
    seen = max((c.ended for c in acknowledged if c.is_told and c.ended is not None), default=-1)
    effects = [(c.effect, c.content) for c in acknowledged if not c.is_told and c.effect >= last]
    effects += [(moment, c.content) for c in calls if c not in acknowledged]
    if last < 0:
        effects.append((-1, None))  # nothing was there at first
    if seen > last:  # who was told that the name is taken relies on it
        effects = [
            (effect, content)
            for effect, content in effects
            if content is not None or effect == moment
        ]
    return frozenset(content for _, content in effects)


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
        yield Call(name, data, start, end, _effect(steps, name, end), is_told)


def _effect(steps: Sequence[Step], name: str, end: int | None) -> int:
    """The last step before ``end`` that gave or took this name.

    Names are told apart by their last part here.
    """
    part = name.rpartition("/")[2]
    before = range((end if end is not None else len(steps)) - 1, -1, -1)
    return next(
        (
            n
            for n in before
            if isinstance(step := steps[n], Names) and part in (step.gone, step.name)
        ),
        -1,
    )


# --- what may be found instead


@dataclass(frozen=True, slots=True)
class Violation:
    """What is found after a power cut before step ``moment``."""

    moment: int
    text: str


class Work:
    """The steps of a work, and what they leave behind wherever they end.

    ``states`` at most are tried for each moment.
    """

    def __init__(self, steps: Sequence[Step], states: int, seed: int = 1) -> None:
        self.steps, self._states, self._seed = steps, states, seed
        self._promises = Promises(steps)
        self._directories = {step.directory for step in steps if isinstance(step, Names)}
        self.tried = 0

    def violations(self, without: int = -1) -> Iterator[Violation]:
        """In the order of moments; ``without`` is the step of an fsync that is taken out."""
        durable = [self._durable_at(n, without) for n in range(len(self.steps))]
        for moment in range(len(self.steps) + 1):
            allowed = self._promises.at(moment)
            for found in self._found(moment, durable):
                self.tried += 1
                yield from (Violation(moment, text) for text in allowed.broken_by(found))

    def syncs(self) -> Iterator[tuple[int, Sync]]:
        """Those that make something durable which was not."""
        for n, step in enumerate(self.steps):
            if isinstance(step, Sync) and any(self._durable_at(k, -1) == n for k in range(n)):
                yield n, step

    def _durable_at(self, n: int, without: int) -> int:
        """The fsync after which step ``n`` cannot be lost."""
        step = self.steps[n]
        inode = (
            step.inode
            if isinstance(step, Data)
            else step.directory
            if isinstance(step, Names)
            else None
        )
        later = (
            k
            for k in range(n + 1, len(self.steps))
            if k != without and isinstance(s := self.steps[k], Sync) and s.inode == inode
        )
        return next(later, NEVER)

    def _found(self, moment: int, durable: Sequence[int]) -> Iterator[dict[str, bytes]]:
        """What the store may hold after a power cut just before the step ``moment``."""
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
        for kept, chosen in self._choices(loose, contents, moment):
            tree = self._tree([n for n in names if n not in loose or n in kept])
            yield dict(
                _listed(tree, 0, "", {inode: contents[inode][k] for inode, k in chosen.items()})
            )

    def _choices(
        self, loose: list[int], contents: dict[int, list[bytes]], moment: int
    ) -> Iterator[tuple[frozenset[int], dict[int, int]]]:
        """Which steps survived, and which content each file has: all there are, or the plainest and
        then some at random.
        """
        inodes = list(contents)
        counts = [len(contents[inode]) for inode in inodes]
        if 2 ** len(loose) * math.prod(counts) <= self._states:
            for kept in (
                frozenset(c)
                for k in range(len(loose) + 1)
                for c in itertools.combinations(loose, k)
            ):
                for chosen in itertools.product(*(range(count) for count in counts)):
                    yield kept, dict(zip(inodes, chosen, strict=True))
            return
        dice = random.Random(f"{self._seed} {moment}")
        plain = [
            frozenset(loose),
            frozenset[int](),
            *(frozenset({n}) for n in loose),
            *(frozenset(loose) - {n} for n in loose),
        ]
        for kept in plain:
            for k in range(max(counts, default=1)):
                yield (
                    kept,
                    {inode: min(k, count - 1) for inode, count in zip(inodes, counts, strict=True)},
                )
        for _ in range(self._states - len(plain)):
            kept = frozenset(n for n in loose if dice.random() < 0.5)
            yield (
                kept,
                {inode: dice.randrange(count) for inode, count in zip(inodes, counts, strict=True)},
            )

    def _contents(self, steps: Sequence[int], is_durable: Sequence[bool]) -> list[bytes]:
        """What a file may hold: all of it first."""
        written = [step for n in steps if isinstance(step := self.steps[n], Data)]
        whole = _filled(written)
        if all(is_durable):
            return [whole]
        kept = [step for step, durable in zip(written, is_durable, strict=True) if durable]
        first = is_durable.index(False)
        base = _filled(kept)
        zeros = [
            step if durable else _zeroed(step)
            for step, durable in zip(written, is_durable, strict=True)
        ]
        half = len(base) + (len(whole) - len(base)) // 2
        found = [
            whole,
            base,
            _filled(zeros),
            whole[:half],
            whole[:half].ljust(len(whole), b"\0"),
            _filled([*written[:first], *written[first + 1 :]]),
        ]
        return list(dict.fromkeys(found))

    def _tree(self, names: Sequence[int]) -> dict[int, dict[str, int]]:
        tree: dict[int, dict[str, int]] = {directory: {} for directory in self._directories}
        for n in names:
            step = self.steps[n]
            assert isinstance(step, Names)
            directory = tree[step.directory]
            if step.gone:
                directory.pop(step.gone, None)
            if step.name:
                directory[step.name] = step.inode
        return tree


def _listed(
    tree: dict[int, dict[str, int]], at: int, prefix: str, contents: dict[int, bytes]
) -> Iterator[tuple[str, bytes]]:
    """As the store would list it; a file of which no byte was written is empty."""
    for name, inode in tree[at].items():
        if is_unfinished(name):
            continue
        if inode in tree:
            yield from _listed(tree, inode, f"{prefix}{name}/", contents)
        else:
            yield prefix + name, contents.get(inode, b"")


def _filled(steps: Sequence[Data]) -> bytes:
    content = bytearray()
    for step in steps:
        if step.data is None:
            content = content[: step.start].ljust(step.start, b"\0")
        else:
            content = content.ljust(step.start, b"\0")
            content[step.start : step.start + len(step.data)] = step.data
    return bytes(content)


def _zeroed(step: Data) -> Data:
    return Data(step.inode, step.start, step.data and bytes(len(step.data)))


def main(argv: Sequence[str] | None = None) -> int:
    """0 if nothing is lost as the store is, and something without each fsync."""
    args = _arguments().parse_args(argv)
    if not can_trap():
        print("strace is not here, or may not trace: nothing was simulated")
        return 1
    verdicts = [
        judged(name, args.states)
        for name in (*WORKS, *(f"at_random {1 + n}" for n in range(args.random)))
    ]
    print("\n".join(verdict.line for verdict in verdicts))
    wrong = [*(line for verdict in verdicts for line in verdict.wrong), *needless(verdicts)]
    print(
        "\n".join(wrong)
        if wrong
        else "nothing acknowledged was lost, no part of a file was seen, and no fsync can be spared"
    )
    return 1 if wrong else 0


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
    """Of a work as it is, and without each of its fsyncs, but for works drawn at random."""
    with tempfile.TemporaryDirectory(prefix="ckptsync-crash-") as home:
        root = Path(home, "store")
        root.mkdir()
        work = Work(traced(name, root), states)
    wrong = [
        f"VIOLATED {name}: {violation.text}" for violation in itertools.islice(work.violations(), 5)
    ]
    line = f"{name}: {len(work.steps)} steps, {work.tried} states after a power cut"
    lost, spared = Counter[str](), Counter[str]()
    for n, sync in work.syncs() if name in WORKS else ():
        is_lost = next(work.violations(without=n), None) is not None
        (lost if is_lost else spared)[sync.where] += 1
        if not is_lost and name not in CONTENDED:
            wrong.append(
                f"NEEDLESS {name}: step {n}, an fsync in {sync.where}: without it nothing is lost"
            )
    return Verdict(
        f"{line}; {lost.total()} of {(lost + spared).total()} fsyncs, taken out one by one, lose"
        " something",
        tuple(wrong),
        lost,
        spared,
    )


def needless(verdicts: Sequence[Verdict]) -> list[str]:
    """Locations in the code whose fsyncs could be spared wherever they were called."""
    lost, spared = (
        sum(counts, Counter())
        for counts in ([v.lost for v in verdicts], [v.spared for v in verdicts])
    )
    return [
        f"NEEDLESS every fsync in {where}: without it nothing is lost"
        for where in spared
        if not lost[where]
    ]


def _arguments() -> argparse.ArgumentParser:
    parser = arguments(__doc__)
    parser.add_argument("--states", type=int, default=300, help="tried at most for each moment")
    parser.add_argument(
        "--random",
        type=int,
        default=4,
        help="works drawn at random, beside those that are written down",
    )
    return parser


if __name__ == "__main__":
    raise SystemExit(main())
