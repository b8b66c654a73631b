"""A small SFTP server on standard input and output, with faults that OpenSSH's has not: ``python
tests/support/faulty_sftp_server.py FAULT…``.

Honest, and different: plain (no extensions), reorder (what came last is answered first), short
(READ brings 20,000 bytes at most), replaces (rename replaces), halfway (rename leaves both names),
unsynced (no fsync of directories), limits=N (READ and WRITE may have so many bytes). In trouble:
full (no WRITE succeeds), denied (no file is opened to be written), unreadable (no directory but the
first is listed), lose=KIND=MARKER (the first request of that kind is done, but not answered, and
the connection ends; the file MARKER tells that it was). log=FILE tells what changes something, or
makes it durable. Lying: size=N (of each answer), strange, names, modeless, endless, bottomless,
branching, noisy, chatty, old, answer=KIND=TYPE=HEX (requests of that kind are answered so).
"""

# ruff: noqa: PTH104, PTH108, PTH112, PTH116, PTH118, PTH115, PTH119, PTH123, PTH208  paths are bytes here

from __future__ import annotations

import os
import select
import struct
import sys
from collections.abc import Callable
from pathlib import Path

FAULTS = frozenset(sys.argv[1:])
VALUES = dict(f.split("=", 1) for f in sys.argv[1:] if "=" in f)
OFFERED = (
    "posix-rename@openssh.com",
    "fsync@openssh.com",
    "limits@openssh.com",
)
FILES: dict[bytes, int] = {}
LISTINGS: dict[bytes, list[bytes]] = {}
HANDLES = iter(range(1 << 30))
Fields = tuple[bytes, ...]
EXTENDED, STATUS, HANDLE, DATA, NAME, ATTRS, EXTENDED_REPLY = 200, 101, 102, 103, 104, 105, 201


def text(value: bytes) -> bytes:
    return struct.pack(">I", len(value)) + value


def take(body: bytes) -> tuple[bytes, bytes]:
    size = int.from_bytes(body[:4], "big")
    return body[4 : 4 + size], body[4 + size :]


def status(code: int) -> tuple[int, bytes]:
    return STATUS, struct.pack(">I", code) + text(b"words") + text(b"")


def attributes(info: os.stat_result) -> bytes:
    if "modeless" in FAULTS:
        return struct.pack(">IQ", 1, info.st_size)
    return struct.pack(
        ">IQIII", 1 | 4 | 8, info.st_size, info.st_mode, int(info.st_atime), int(info.st_mtime)
    )


def opened(body: bytes) -> tuple[int, bytes]:
    path, rest = take(body)
    modes = int.from_bytes(rest[:4], "big")
    if "denied" in FAULTS and modes & 2:
        return status(3)
    flags = {1: os.O_RDONLY, 2: os.O_WRONLY, 3: os.O_RDWR}[modes & 3]
    flags |= (
        os.O_CREAT * bool(modes & 8) | os.O_TRUNC * bool(modes & 16) | os.O_EXCL * bool(modes & 32)
    )
    handle = b"%0256d" % next(HANDLES)  # the longest permitted
    FILES[handle] = os.open(path, flags, 0o666)
    return HANDLE, text(handle)


def closed(body: bytes) -> tuple[int, bytes]:
    handle, _ = take(body)
    LISTINGS.pop(handle, None)
    if handle in FILES:
        os.close(FILES.pop(handle))
    return status(0)


def read(body: bytes) -> tuple[int, bytes]:
    handle, rest = take(body)
    start, size = struct.unpack(">QI", rest)
    data = os.pread(FILES[handle], min(size, 20_000) if "short" in FAULTS else size, start)
    return (DATA, text(data)) if data else status(1)


def write(body: bytes) -> tuple[int, bytes]:
    handle, rest = take(body)
    if "full" in FAULTS:
        return status(4)
    os.pwrite(FILES[handle], rest[12:], int.from_bytes(rest[:8], "big"))
    return status(0)


def listed(body: bytes) -> tuple[int, bytes]:
    handle, (path, _) = b"%d" % next(HANDLES), take(body)
    if "unreadable" in FAULTS and handle != b"0":
        return status(3)
    names = (
        [path]
        if FAULTS & {"bottomless", "branching"}
        else [os.path.join(path, name) for name in os.listdir(path)]
    )
    LISTINGS[handle] = names
    return HANDLE, text(handle)


def entries(body: bytes) -> tuple[int, bytes]:
    handle, _ = take(body)
    names = LISTINGS[handle]
    if "endless" in FAULTS:
        more = b"".join(
            text(b"n%d" % next(HANDLES)) + text(b"") + attributes(os.lstat("/dev/null"))
            for _ in range(2000)
        )
        return NAME, struct.pack(">I", 2000) + more
    if not names:
        return status(1)
    if FAULTS & {"bottomless", "branching"}:
        LISTINGS[handle] = []
        below = (b"a", b"b") if "branching" in FAULTS else (b"a",)
        found = b"".join(text(name) + text(b"") + attributes(os.lstat("/")) for name in below)
        return NAME, struct.pack(">I", len(below)) + found
    out = [(os.path.basename(path), os.lstat(path)) for path in names]
    names.clear()
    if "names" in FAULTS:
        hostile = [b"..", b".", b"", b"../x", b"/etc/passwd", b"a/b", b"\xff", b"a\nb"]
        hostile += [b"a\\b", b"x" * 300, b"nul\0"]
        out += [(name, out[0][1]) for name in hostile]
    return NAME, struct.pack(">I", len(out)) + b"".join(
        text(name) + text(b"-rw") + attributes(found) for name, found in out
    )


def renamed(body: bytes) -> tuple[int, bytes]:
    old, rest = take(body)
    new, _ = take(rest)
    if "replaces" in FAULTS:
        os.rename(old, new)
        return status(0)
    try:
        os.link(old, new, follow_symlinks=False)  # as OpenSSH does it: of two clients one gets it
    except FileExistsError:
        return status(4)
    if "halfway" not in FAULTS:
        os.unlink(old)
    return status(0)


def extended(body: bytes) -> tuple[int, bytes]:
    name, rest = take(body)
    if name == b"posix-rename@openssh.com":
        old, rest = take(rest)
        os.rename(old, take(rest)[0])
        return status(0)
    if name == b"fsync@openssh.com":
        fd = FILES[take(rest)[0]]
        if "unsynced" in FAULTS and os.path.isdir(f"/proc/self/fd/{fd}"):
            return status(4)
        os.fsync(fd)
        return status(0)
    if name == b"limits@openssh.com":
        size = int(VALUES.get("limits", 0))
        return EXTENDED_REPLY, struct.pack(">4Q", 0, size, size, 0)
    return status(8)


def do(act: Callable[[bytes], object], body: bytes) -> tuple[int, bytes]:
    act(take(body)[0])
    return status(0)


ACTS: dict[int, Callable[[bytes], tuple[int, bytes]]] = {
    3: opened,
    4: closed,
    5: read,
    6: write,
    11: listed,
    12: entries,
    18: renamed,
    EXTENDED: extended,
    7: lambda body: (ATTRS, attributes(os.lstat(take(body)[0]))),
    13: lambda body: do(os.unlink, body),
    14: lambda body: do(os.mkdir, body),
    15: lambda body: do(os.rmdir, body),
    17: lambda body: (ATTRS, attributes(os.stat(take(body)[0]))),
}


def log(kind: int, body: bytes) -> None:
    verb = {
        6: "write",
        13: "remove",
        14: "mkdir",
        18: "rename",
        EXTENDED: take(body)[0].decode().partition("@")[0],
    }.get(kind, "")
    subject = os.path.basename(take(body)[0]).decode("utf-8", "replace") if kind in (13, 14) else ""
    if verb == "fsync":
        subject = os.path.basename(os.readlink(f"/proc/self/fd/{FILES[take(take(body)[1])[0]]}"))
    if verb:
        with open(VALUES["log"], "a") as file:
            file.write(f"{verb} {'part' if subject.endswith('.part') else subject}".strip() + "\n")


def answer(kind: int, body: bytes) -> tuple[int, bytes]:
    if "log" in VALUES:
        log(kind, body)
    lie = VALUES.get("answer", "0=").split("=")
    if kind == int(lie[0]):
        return int(lie[1]), bytes.fromhex(lie[2])
    try:
        return ACTS[kind](body)
    except (FileNotFoundError, NotADirectoryError):
        return status(2)
    except PermissionError:
        return status(3)
    except OSError:
        return status(4)


def received(size: int) -> bytes:
    out = b""
    while len(out) < size:
        more = os.read(0, size - len(out))
        if not more:
            sys.exit(0)
        out += more
    return out


def send(data: bytes) -> None:
    while data:
        data = data[os.write(1, data) :]


def say(packet: bytes) -> None:
    """Send a packet, with its length before it."""
    send(struct.pack(">I", len(packet)) + packet)


def request() -> tuple[int, int, bytes]:
    body = received(int.from_bytes(received(4), "big"))
    return body[0], int.from_bytes(body[1:5], "big"), body[5:]


def is_lost(kind: int) -> bool:
    lost, _, marker = VALUES.get("lose", "0=").partition("=")
    if kind != int(lost) or Path(marker).exists():
        return False
    Path(marker).touch()
    return True


def main() -> None:
    while "noisy" in FAULTS:
        os.write(2, b"x" * 4096)
    if "chatty" in FAULTS:
        send(b"Welcome to this machine!\n")
    received(9)
    offered = (
        b"" if "plain" in FAULTS else b"".join(text(name.encode()) + text(b"1") for name in OFFERED)
    )
    say(b"\2" + struct.pack(">I", 2 if "old" in FAULTS else 3) + offered)
    while True:
        waiting = [request()]
        while "reorder" in FAULTS and select.select([0], [], [], 0.002)[0]:
            waiting.append(request())
        answers = [(number, kind, answer(kind, body)) for kind, number, body in waiting]
        for number, request_kind, (kind, body) in reversed(answers):
            if is_lost(request_kind):
                return
            if "size" in VALUES:
                send(struct.pack(">I", int(VALUES["size"])))
            say(bytes([kind]) + struct.pack(">I", number + ("strange" in FAULTS)) + body)


if __name__ == "__main__":
    main()
