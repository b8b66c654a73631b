"""`ckptsync.mark_saved`: one line of any training script, where no callback of ours hears of a save.

It needs the standard library, and torch only where the script has it.  What it does is a few system calls on the trainer's own disk: links,
as the hook for Hugging Face's Trainer makes them (`ckptsync.hooks.pinning`).
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import secrets
import threading
import time
from collections import Counter
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Literal
from urllib.parse import quote

from ckptsync.errors import CkptsyncError, ConfigError, Incomplete, StoreError
from ckptsync.hooks import agreed, leaving
from ckptsync.hooks.seat import Meet, Rank, Seat, this_rank
from ckptsync.scan import FINAL, Spot, homes
from ckptsync.spool import marks
from ckptsync.walk import OURS, walk

Part = Literal["mine", "all"]
_log = logging.getLogger("ckptsync.hook")
_lock = threading.Lock()
_seats: dict[tuple[int, Path], Seat] = {}
_meetings: Counter[str] = Counter()  # ranks that save into several directories of one name begin with them in the same order
_told: set[str] = set()


def mark_saved(path: str | os.PathLike[str], *, part: Part = "mine", strict: bool = False) -> bool:
    """See `ckptsync.mark_saved`, which is this."""
    try:
        with _lock:
            return _marked(os.fspath(path), part)
    except Exception as e:  # training comes first: what went wrong is said, and the worker judges the files
        if strict:
            raise _ours(path, e) from e
        _say(None, f"could not mark {path}: {type(e).__name__}: {e}{_hint(e)}")
        return False


def located(path: Path) -> tuple[Path, Spot] | None:
    """The output directory of a checkpoint, and what a worker calls it; ``None`` if none would find it.

    Where several would do (``checkpoints/checkpoint_3``), the one that has a spool, since a worker looks there; else the uppermost in
    which links can be made.
    """
    found = list(homes(path)) or list(homes(path.resolve()))
    of_steps = [each for each in found if each[1].family != FINAL] or found
    with_spool = next((each for each in of_steps if (each[0] / OURS).is_dir()), None)
    return with_spool or next((each for each in reversed(of_steps) if _is_near(each[0], path)), of_steps[0] if of_steps else None)


def _is_near(home: Path, path: Path) -> bool:
    """Whether names in ``home`` can be given to files at ``path``.  Nobody trains into the root of a system, which a container's user may write."""
    return home != home.parent and os.access(home, os.W_OK) and home.stat().st_dev == path.stat().st_dev


def _marked(given: str, part: Part) -> bool:
    if part not in ("mine", "all"):
        raise ConfigError(f"part: {part!r}", hint='"mine" if this rank has written its part, "all" if every rank has')
    if "://" in given:
        raise ConfigError(f"{given}: not a path of this machine", hint="what is written straight into a store needs no worker")
    path, rank = Path(given).absolute(), this_rank()
    is_asked = part == "mine" and rank.world > 1
    if is_asked and not rank.is_met:
        raise ConfigError(f"rank {rank.rank} of {rank.world}: torch has no process group to ask the others in", hint=_ONE_FOR_ALL)
    found = located(path)
    seat = _seat(path if found and found[1].family == FINAL else path.parent, rank)
    if found is None:
        return _nothing(path, seat, is_asked=is_asked)
    if is_asked and found[1].family == FINAL:
        raise ConfigError(f"{path}: a final model is whole when all ranks are done", hint=_ONE_FOR_ALL)
    if found[1].only and found[1].family == "lightning":
        _check_end(path)
    done = (seat.save_mine if part == "mine" else seat.save_all)(*found, _saying(seat))
    if seat.waiting > 1:
        _say(seat, f"{path}: other ranks have never said that they saved beside it; {_ONE_FOR_ALL}")
    return done


_ONE_FOR_ALL = 'call it on every rank, or on one that knows that all are done, with part="all"'


def _check_end(file: Path) -> None:
    """Lightning may write its file in a thread (``AsyncCheckpointIO``), and has then not ended it: its directory is a zip's last."""
    with file.open("rb") as opened:
        begins, size = opened.read(2), opened.seek(0, os.SEEK_END)
        opened.seek(max(0, size - 22))
        is_ended = size >= 22 and (begins != b"PK" or opened.read(4) == b"PK\x05\x06")
    if not is_ended:
        raise Incomplete(
            f"{file}: it is still being written", hint="mark it when it is saved; with AsyncCheckpointIO leave it to the worker"
        )


def _nothing(path: Path, seat: Seat, *, is_asked: bool) -> bool:
    """Where this rank has written nothing, the others need not wait for it, and learn so."""
    if is_asked:
        seat.save_nothing(path)
    if path.is_file() or walk(path).files:
        raise ConfigError(
            f"{path}: no checkpoint that a worker would find",
            hint="call it checkpoint-N, a file NAME.ckpt, or step-N with a distributed checkpoint or safetensors in it: `ckptsync help trainers`",
        )
    if not is_asked:
        raise Incomplete(f"{path}: nothing is there", hint="it is to be marked when it is written")
    return False


def _seat(folder: Path, rank: Rank) -> Seat:
    key = (os.getpid(), folder)
    if key not in _seats:
        token = secrets.token_hex(8)
        train = token if rank.world == 1 else _agreed(token) if rank.is_met else ""
        if not any(pid == os.getpid() for pid, _ in _seats):
            leaving.at_end(partial(_leave, os.getpid()))
        _seats[key] = Seat(rank, train, _meeting(rank, folder.name))
    return _seats[key]


def _agreed(token: str) -> str:
    """What names the training on every rank; empty where the process group has no store, and files' times tell what belongs together."""
    try:
        return agreed.first_word(token)
    except Exception:  # noqa: BLE001  # whatever torch's backends raise; one rank may speak for all without it
        return ""


def _meeting(rank: Rank, name: str) -> Meet:
    """Ranks meet where they call a directory by one name: where they do not, or several of it in another order, files decide."""
    number = cache(lambda: _counted(name))
    return lambda word, level: agreed.agree(rank.rank, rank.world, word, f"marked-{number()}-{level}-{quote(name)}")


def _counted(name: str) -> int:
    _meetings[name] += 1
    return _meetings[name]


def _leave(pid: int) -> None:
    """When the script is over; a process that it forked is not ours to speak of."""
    for (owner, _), seat in _seats.items():
        if owner == pid == os.getpid():
            with contextlib.suppress(OSError, CkptsyncError):  # the worker sees that the process has gone
                seat.leave(has_failed=leaving.has_failed())


def _ours(path: object, error: Exception) -> CkptsyncError:
    if isinstance(error, CkptsyncError):
        return error
    if isinstance(error, OSError):
        return StoreError(f"{path}: {error.strerror or error}", hint="look at the disk that the trainer writes to")
    return CkptsyncError(f"{path}: could not be marked: {type(error).__name__}: {error}")


def _hint(error: Exception) -> str:
    hint = getattr(error, "hint", "")
    return f"; {hint}" if hint else ""


def _saying(seat: Seat) -> Callable[[str], None]:
    return lambda text: _say(seat, text)


def _say(seat: Seat | None, text: str) -> None:
    """Each time in the spool's log, where the worker reads it; the first time of its kind in the trainer's, too."""
    if seat is not None and seat.spool is not None:
        with contextlib.suppress(OSError):  # the spool may be what is wrong
            marks.say(seat.spool, f"{time.strftime('%Y-%m-%dT%H:%M:%SZ', time.gmtime())} rank {seat.rank}: {text}")
    kind = re.sub(r"[0-9]+", "", text)[:80]
    if kind not in _told:
        _told.add(kind)
        _log.warning("ckptsync: %s", text)
