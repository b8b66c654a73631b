"""A store in a process of its own, whose system calls fail as they are told to by strace: the nth
one of a kind that meets the store's files.

    python -m tests.support.strace_faults ROOT MOUNT CALL...

does each call in turn and says of each, as JSON, what came of it.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ckptsync.errors import CkptsyncError
from ckptsync.mounts import Mount
from ckptsync.stores.contract import About, Store, read_all
from ckptsync.stores.posix.draft import part_of
from ckptsync.stores.posix.store import PosixStore

NEW, OTHER = b"n" * 5000, b"o" * 3000
CALLS: dict[str, Callable[[Store], object]] = {
    "write run/a": lambda store: store.write("run/a", [NEW], About(len(NEW), "us")),
    "replace run/a": lambda store: store.write("run/a", [OTHER], About(len(OTHER), "us again")),
    "create run/dir/b": lambda store: store.create("run/dir/b", [NEW], About(len(NEW), "us")),
    "delete run/a": lambda store: store.delete("run/a"),
    "size run/a": lambda store: store.size("run/a"),
    "read run/a": lambda store: read_all(store, "run/a").decode(),
    "names": lambda store: [entry.name for entry in store.names("")],
}
MOUNTS = {"local": Mount("ext4"), "nfs": Mount("nfs4", is_remote=True, late=60.0)}


@dataclass(frozen=True, slots=True)
class Outcome:
    """``error`` is the class of what was raised, ``text`` its words and remedy, ``value`` what was
    given back.
    """

    call: str
    error: str = ""
    text: str = ""
    hint: str = ""
    value: Any = None


def injected(
    root: Path, fault: str, calls: Sequence[str], mount: str = "local"
) -> tuple[list[Outcome], bool]:
    """Do ``calls``, with the fault ``openat:error=EIO:when=3`` of strace's in the third openat that
    has to do with the store; and whether it was met.
    """
    log = root.with_name(f"{root.name}.strace")
    paths = [root, root / "run", root / "run/a", root / "run/dir", root / "run/dir/b"]
    drafts = [("run", "a", "us"), ("run", "a", "us again"), ("run/dir", "b", "us")]
    paths += [root / folder / part_of(name, origin) for folder, name, origin in drafts]
    only = [word for path in paths for word in ("-P", str(path))]
    strace = ["strace", "-f", "-qq", "-o", str(log), *only]
    strace += ["-e", f"trace={fault.partition(':')[0]}", "-e", f"inject={fault}"]
    program = [sys.executable, "-m", "tests.support.strace_faults", str(root), mount, *calls]
    done = subprocess.run([*strace, *program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    outcomes = [Outcome(**json.loads(line)) for line in done.stdout.splitlines()]
    return outcomes, "INJECTED" in log.read_text()


def outcomes_of(root: Path, calls: Iterable[str], mount: str = "local") -> Iterator[Outcome]:
    """Do each call; yield what came of it."""
    store = PosixStore(str(root), mount=MOUNTS[mount])
    for call in calls:
        try:
            outcome = Outcome(call, value=CALLS[call](store))
        except CkptsyncError as e:
            outcome = Outcome(call, type(e).__name__, str(e), e.hint)
        yield outcome


if __name__ == "__main__":
    for each in outcomes_of(Path(sys.argv[1]), sys.argv[3:], sys.argv[2]):
        print(json.dumps(asdict(each)), flush=True)
