"""The file system that a path is on: whether it answers, whether it is the one that is meant, and how it is mounted."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

from ckptsync.doctor.asking import Asked, fail, warn
from ckptsync.doctor.findings import STORAGE, Finding
from ckptsync.stores.mounts import is_mounted, mount_of
from ckptsync.units import show_duration
from ckptsync.watch import is_blind

FSTAB = Path("/etc/fstab")
PATIENCE = 20.0  # seconds: a server that is well answers within one
_LATEST = 60.0  # seconds that NFS may hide what is new by its own defaults
_MAGIC = frozenset("*?[")
_ASK = "import os, sys\ntry:\n    os.statvfs(sys.argv[1])\nexcept OSError:\n    pass"
_ESCAPED = re.compile(r"\\([0-7]{3})")


def silent(paths: Iterable[Path]) -> list[Path]:
    """Those whose file system says nothing for `PATIENCE` seconds, as a hard NFS mount does whose server is dead.

    Each is asked by a child: whoever asks waits for ever, and cannot always be killed.
    """
    until = time.monotonic() + PATIENCE
    quiet = subprocess.DEVNULL
    asking = {
        path: subprocess.Popen([sys.executable, "-I", "-S", "-c", _ASK, str(path)], stdin=quiet, stdout=quiet, stderr=quiet)  # noqa: S603 - ourselves
        for path in dict.fromkeys(paths)
    }
    return [path for path, child in asking.items() if not _ended(child, until)]


def _ended(child: subprocess.Popen[bytes], until: float) -> bool:
    try:
        child.wait(max(until - time.monotonic(), 0.0))
    except subprocess.TimeoutExpired:
        child.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):  # it is left behind, and ends with the mount
            child.wait(0.2)
        return False
    return True


def fixed(path: Path) -> Path:
    """What stands before the first wildcard."""
    end = next((n for n, part in enumerate(path.parts) if _MAGIC & set(part)), len(path.parts))
    return Path(*path.parts[:end])


def unmounted(path: Path, asked: Asked) -> Iterator[Finding]:
    """A file system that fstab(5) puts above it, and that is not there."""
    above = {path, *path.parents, *Path(os.path.realpath(path)).parents, Path(os.path.realpath(path))}
    for point, options in sorted(_table()):
        if point in above and not is_mounted(str(point)):
            why = "what is written goes to this machine's own disk: no other node sees it, and the mount will hide it"
            say = warn if "noauto" in options else fail
            what = f"{point} is in {FSTAB}, and nothing is mounted there"
            yield say("not-mounted", asked, path, what, why, f"mount {point}", code=STORAGE)


def _table() -> Iterator[tuple[Path, tuple[str, ...]]]:
    """Mount points below the root, and their options."""
    try:
        lines = FSTAB.read_text("utf-8", "replace").splitlines()
    except OSError:
        return  # nothing is said of mounts
    fields = [line.split() for line in lines if line.strip() and not line.lstrip().startswith("#")]
    for field in fields:
        if len(field) > 2 and field[1].startswith("/") and field[1] != "/":
            yield Path(_ESCAPED.sub(lambda m: chr(int(m[1], 8)), field[1])), tuple("".join(field[3:4]).split(","))


def mounted(path: Path, asked: Asked) -> Iterator[Finding]:
    """What kind of file system it is on; a store's directory may be asked, too."""
    mount = mount_of(str(path))
    for option in ("soft", "softerr"):
        if option in mount.options:
            why = "when the server does not answer in time, writes are given up: a file that was closed without an error may lack bytes (nfs(5))"
            yield warn("nfs-soft", asked, path, f"{mount.kind}, mounted {option}", why, "mount it hard", code=STORAGE)
    if mount.late > _LATEST:
        what = f"{mount.kind}: what other machines write may be seen {show_duration(mount.late)} later"
        why = "so long nothing is said to be missing, and all that waits for it waits"
        yield warn("late-names", asked, path, what, why, "mount it with actimeo=60 or less", code=STORAGE)


def unheard(path: Path, asked: Asked) -> Iterator[Finding]:
    """An output directory of which the kernel tells no events."""
    mount = mount_of(str(path))
    if is_blind(mount.kind):
        what = f"on {mount.kind}, which tells no events"
        why = "the worker looks every few seconds instead of at once: a checkpoint that rotates sooner is lost without the hook"
        yield warn("no-events", asked, path, what, why, "use the hook (`ckptsync help hook`), or a local disk", code=STORAGE)
