"""Which file system a path is on, and how long that may hide what other machines wrote.

`mount_of` reads Linux's mount table and estimates from the kind and options of a mount how old a
client's cached names may be. `unmounted_on_way` finds directories that should be mounted and are
not, so that nothing is written below them.

Recommended reading: nfs(5), "Data and metadata coherence", and proc(5), mountinfo.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

TABLE = "/proc/self/mountinfo"
FSTAB = Path("/etc/fstab")
UNITS = tuple(map(Path, ("/etc/systemd/system", "/run/systemd/system", "/run/systemd/generator")))
_WHERE = re.compile(r"^\s*Where\s*=\s*(/.*?)\s*$", re.MULTILINE)
_ESCAPED = re.compile(r"\\([0-7]{3})")
_UNKNOWN = 60.0  # a program behind FUSE may cache anything for any time
_LATE = {
    "nfs": 60.0,
    "nfs4": 60.0,
    "cifs": 1.0,
    "smb3": 1.0,
    "9p": _UNKNOWN,
    "virtiofs": _UNKNOWN,
    "beegfs": _UNKNOWN,
}
# servers call back what a client holds before it changes
_COHERENT = frozenset({"lustre", "ceph", "gpfs", "ocfs2", "gfs2", "afs"})
_ONE_MACHINE = frozenset({"fuseblk", "fuse.fuse-overlayfs"})
# kinds on which other machines write without inotify's events here; fuse.* too
_BLIND = """
    9p acfs afs beegfs ceph cifs coda cvmfs fuse fuseblk gfs2 gpfs lustre nfs nfs4 ocfs2 orangefs
    pvfs2 smb3 smbfs vboxsf virtiofs wekafs
"""


@dataclass(frozen=True, slots=True)
class Mount:
    """The kind of a file system, and what follows from it.

    ``late``: seconds during which names or lengths that another machine has written may stay
    hidden. ``is_remote``: a server has the files. ``options``: those of the mount and of its file
    system, as mount(8) takes them.
    """

    kind: str
    is_remote: bool = False
    late: float = 0.0
    options: tuple[str, ...] = field(default=(), compare=False)


def read_table() -> list[str]:
    """Return the lines of this process's mount table; no lines if this is not Linux."""
    try:
        return Path(TABLE).read_text(encoding="utf-8", errors="surrogateescape").split("\n")
    except OSError:
        return []


def device_kinds() -> dict[int, str]:
    """Return the kind of file system of each mounted device; empty if this is not Linux."""
    return {device: kind for _, device, kind, _ in _entries(read_table())}


def mount_of(path: str) -> Mount:
    """Read the mount table; return the mount of ``path`` (links resolved), which need not exist.

    If this is not Linux, or no entry fits: a `Mount` with kind "" that counts as local.
    """
    return find_mount(read_table(), os.path.realpath(path))


def is_mounted(point: str) -> bool:
    """Return whether something is mounted on this very directory, with links resolved."""
    points = {point for point, *_ in _entries(read_table())}
    return os.path.realpath(point) in points if points else os.path.ismount(point)


@dataclass(frozen=True, slots=True)
class Unmounted:
    """A directory where something should be mounted, and nothing is.

    ``source`` says so: fstab(5), or a unit.
    """

    point: Path
    source: Path
    options: tuple[str, ...] = ()

    def __str__(self) -> str:
        """Return the text of an error about this missing mount."""
        return f"{self.point} is in {self.source}, and nothing is mounted there"


def unmounted_on_way(path: Path) -> list[Unmounted]:
    """Return the configured mount points that contain ``path`` or are it, and are not mounted.

    They are those of fstab(5) and of systemd's mount units, sorted by path, both above ``path`` as
    it is written and with its links resolved.
    """
    real = Path(os.path.realpath(path))
    ancestors = {path, *path.parents, real, *real.parents}
    unmounted = {entry.point: entry for entry in (*_units(), *_fstab()) if entry.point in ancestors}
    return [entry for point, entry in sorted(unmounted.items()) if not is_mounted(str(point))]


def _fstab() -> Iterator[Unmounted]:
    """Yield the mount points of fstab(5), except the root, with their options."""
    for parts in (line.split() for line in _lines(FSTAB) if not line.lstrip().startswith("#")):
        if len(parts) > 2 and parts[1].startswith("/") and parts[1] != "/":
            point = _ESCAPED.sub(lambda m: chr(int(m[1], 8)), parts[1])
            yield Unmounted(Path(point), FSTAB, tuple("".join(parts[3:4]).split(",")))


def _units() -> Iterator[Unmounted]:
    """Yield the mount points of mount units in `UNITS`, without options: systemd.mount(5)."""
    for unit in (unit for directory in UNITS for unit in directory.glob("*.mount")):
        for where in _WHERE.findall("\n".join(_lines(unit))):
            yield Unmounted(Path(where), unit)


def _lines(file: Path) -> list[str]:
    """Return the lines of a file; none if it cannot be read."""
    try:
        return file.read_text("utf-8", "replace").splitlines() if file.is_file() else []
    except OSError:
        return []


def find_mount(lines: Iterable[str], path: str) -> Mount:
    """Return the mount of an absolute ``path`` without links, from the lines of a mountinfo.

    It is the last mount on the longest directory that contains the path; `Mount("")` if there is
    none.
    """
    best, mount = "", Mount("")
    for point, _, kind, options in _entries(lines):
        if len(point) >= len(best) and f"{path}/".startswith(f"{point.rstrip('/')}/"):
            best, mount = point, _mount(kind, options)
    return mount


def _entries(lines: Iterable[str]) -> Iterator[tuple[str, int, str, list[str]]]:
    """Yield mount point, device, kind and options of each line of a mountinfo; skip short lines."""
    for line in lines:
        before, _, after = line.partition(" - ")
        parts, (kind, _, options) = before.split(" "), [*after.split(), "", "", ""][:3]
        if len(parts) >= 6 and kind:
            major, _, minor = parts[2].partition(":")
            point = _ESCAPED.sub(lambda m: chr(int(m[1], 8)), parts[4])
            yield (
                point,
                os.makedev(int(major), int(minor)),
                kind,
                f"{parts[5]},{options}".split(","),
            )


def _mount(kind: str, options: list[str]) -> Mount:
    """Return the mount of that kind.

    ``late`` is the longest of the caching options, else what is usual for the kind; 0 with ``noac``
    or for a local kind.
    """
    late = _LATE.get(kind, _UNKNOWN if kind.startswith("fuse") else 0.0)
    is_remote = (late > 0 or kind in _COHERENT) and kind not in _ONE_MACHINE
    if not is_remote or "noac" in options:
        return Mount(kind, is_remote, options=tuple(options))
    timeouts = {
        key: float(value)
        for key, _, value in (o.partition("=") for o in options)
        if value.isdecimal()
    }
    # seconds for files and for directories; what is not shown has the kind's own value
    usual = timeouts.get("actimeo", late)
    return Mount(
        kind,
        is_remote,
        max(timeouts.get("acregmax", usual), timeouts.get("acdirmax", usual)),
        tuple(options),
    )


def is_blind(kind: str) -> bool:
    """Return whether inotify may miss changes on a file system of this kind."""
    return kind in _BLIND.split() or kind.startswith("fuse.")
