"""What a store has promised at each moment of its work, by the marks of
`tests.campaigns.crash_work`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from tests.campaigns.crash_trace import Mark, Names, Step
from tests.campaigns.crash_work import content


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
