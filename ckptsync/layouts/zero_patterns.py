r"""Patterns of parameter names as DeepSpeed's checkpoints carry them, without ever running a file's regular expression as it stands.

AutoTP writes ``^name$`` with escapes; Megatron-DeepSpeed writes a few ``\\d+`` and ``.*`` (matched from the start, as ``re.match`` does).
Those are matched; anything else could take for ever, and is refused.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from ckptsync.errors import Corrupt, Unsupported
from ckptsync.formats.pickles import brief

_LONGEST = 512
_TOKEN = re.compile(r"(?P<repeat>\\d\+|\.\*|\\d\*|\.\+)|\\(?P<escaped>[^A-Za-z0-9])|(?P<any>\.)|(?P<plain>[\w\-:/ ])")
_MOST_REPEATS = 3


class Patterns:
    """Values by the pattern of a name.  Raises Unsupported for a pattern of another kind."""

    def __init__(self, told: Mapping[Any, Any], where: str) -> None:
        self._exact: dict[str, Any] = {}
        self._open: list[tuple[re.Pattern[str], Any]] = []
        for pattern, value in told.items():
            exact, literal = _read(pattern, where)
            if exact:
                self._exact[literal] = (value,)
            else:
                self._open.append((re.compile(pattern), (value,)))

    def find(self, name: str) -> Any:
        """The value of the pattern that matches; ``None`` if none does.  Raises Corrupt if several do."""
        found = self._found(name)
        return found[0][0] if found else None

    def finds(self, name: str) -> bool:
        """Whether a pattern matches."""
        return bool(self._found(name))

    def _found(self, name: str) -> list[Any]:
        found = [self._exact[name]] if name in self._exact else []
        found += [value for pattern, value in self._open if pattern.match(name)]
        if len(found) > 1:
            raise Corrupt(f"{name}: {len(found)} patterns of one kind match it")
        return found


def _read(pattern: Any, where: str) -> tuple[bool, str]:
    """Whether a pattern means one name alone, and that name.  Raises Unsupported unless it is made of the few things that are known."""
    if not isinstance(pattern, str) or len(pattern) > _LONGEST:
        raise Unsupported(f"{where}: a pattern of names that is none: {brief(pattern)}")
    body = pattern.removeprefix("^")
    is_closed = pattern.startswith("^") and body.endswith("$") and not body.endswith("\\$")
    body = body[:-1] if body.endswith("$") and not body.endswith("\\$") else body
    at, literal, repeats = 0, [], 0
    while at < len(body):
        token = _TOKEN.match(body, at)
        if token is None:
            raise Unsupported(f"{where}: a pattern of names of a kind that is not known: {brief(pattern)}")
        repeats += token["repeat"] is not None
        is_closed = is_closed and (token["escaped"] or token["plain"]) is not None
        literal.append(token["escaped"] or token["plain"] or "")
        at = token.end()
    if repeats > _MOST_REPEATS:
        raise Unsupported(f"{where}: a pattern of names with {repeats} repetitions: {brief(pattern)}")
    return is_closed, "".join(literal)
