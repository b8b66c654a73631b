"""The pipes to and from one ``ssh``: bytes in, bytes out, never for ever; and what ssh said when it is over."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import select
import subprocess
import time
from collections.abc import Sequence

from ckptsync.errors import ConfigError, StoreError, Transient
from ckptsync.stores.sftp.failures import what_ssh_said
from ckptsync.stores.sftp.place import Place

_PIPE = 1 << 20  # fewer, larger turns between ssh and us; Linux gives this much to any user
_AHEAD = 64 << 10  # bytes that are taken out of the pipe before they are asked for: many small answers for one system call
_VECTOR = 512  # buffers of one system call; Linux takes 1024
_HEARD = 8 << 10  # of what ssh says, the last
_DYING_S = 2.0


class Link:
    """One running ``ssh``, for one thread at a time.  ``stall``: seconds without a byte after which it is given up."""

    def __init__(self, place: Place, stall: float) -> None:
        self.place, self.stall = place, stall
        self.is_broken = self.has_answered = False
        self._heard = b""
        self._ahead = memoryview(bytearray(_AHEAD))
        self._next = self._end = 0  # of what is in it
        self._process = _started(place.command)
        self._pipes = [p for p in (self._process.stdin, self._process.stdout, self._process.stderr) if p]
        self._to, self._from, self._said = (p.fileno() for p in self._pipes)
        for fd in (self._to, self._from, self._said):
            os.set_blocking(fd, False)
        for fd in (self._to, self._from):
            with contextlib.suppress(
                OSError, AttributeError
            ):  # not Linux, or the user's pipes have their limit: slower, that is all
                fcntl.fcntl(fd, fcntl.F_SETPIPE_SZ, _PIPE)

    @property
    def is_over(self) -> bool:
        """Whether nothing can be asked any more."""
        return self.is_broken or self._process.poll() is not None

    def send(self, *buffers: bytes | memoryview, wait: float = 0.0) -> None:
        """All of them."""
        views = [memoryview(b) for b in buffers]
        while views:
            try:
                count = os.writev(self._to, views[:_VECTOR])
            except BlockingIOError:
                self._wait(self._to, select.POLLOUT, wait)
                continue
            except OSError as e:
                raise self._ended() from e
            while views and count >= len(views[0]):
                count -= len(views.pop(0))
            if views:
                views[0] = views[0][count:]

    def receive(self, out: memoryview, wait: float = 0.0) -> None:
        """Fill ``out``; ``wait`` are further seconds of patience."""
        done = min(len(out), self._end - self._next)
        out[:done] = self._ahead[self._next : self._next + done]
        self._next += done
        while done < len(out):  # nothing is left of what was taken before
            try:
                count = os.readv(self._from, [out[done:], self._ahead])
            except BlockingIOError:
                self._wait(self._from, select.POLLIN, wait)
                continue
            if not count:
                raise self._ended()
            self._next, self._end = 0, max(0, count - (len(out) - done))
            done += count
        self.has_answered = True

    def taken(self, size: int, wait: float = 0.0) -> bytes:
        """The same for a few bytes, which mostly are there."""
        start, end = self._next, self._next + size
        if end <= self._end:
            self._next = end
            return bytes(self._ahead[start:end])
        out = bytearray(size)
        self.receive(memoryview(out), wait)
        return bytes(out)

    def close(self) -> None:
        """End ssh, and wait for it."""
        self.is_broken = True
        self._process.kill()
        self._process.wait()
        for pipe in self._pipes:
            pipe.close()

    def _wait(self, fd: int, event: int, more: float) -> None:
        """Until ``fd`` is ready, reading meanwhile what ssh says: with a full pipe it would stand still."""
        deadline = time.monotonic() + self.stall + more
        watched = select.poll()
        watched.register(fd, event)
        watched.register(self._said, select.POLLIN)
        while True:
            ready = [at for at, _ in watched.poll(max(0.0, deadline - time.monotonic()) * 1000)]
            if not ready or (fd not in ready and time.monotonic() > deadline):  # what it says meanwhile is no answer
                self.is_broken = True
                raise Transient(f"{self.place.url}: not a byte came for {self.stall + more:.0f} s")
            if self._said in ready and not self._listen():
                watched.unregister(self._said)
            if fd in ready:
                return

    def _listen(self) -> bool:
        """Whether there may be more."""
        try:
            found = os.read(self._said, 4096)
        except BlockingIOError:
            return True
        self._heard = (self._heard + found)[-_HEARD:]
        return bool(found)

    def _ended(self) -> ConfigError | StoreError:
        """Why there is no connection any more."""
        self.is_broken = True
        code = self._code()
        with contextlib.suppress(OSError):
            for _ in range(_HEARD):  # enough: a server may talk for ever
                if not self._listen_on():
                    break
        return what_ssh_said(self.place, self._heard, code, has_answered=self.has_answered)

    def _code(self) -> int | None:
        try:
            return self._process.wait(_DYING_S)
        except subprocess.TimeoutExpired:
            return None

    def _listen_on(self) -> bool:
        found = os.read(self._said, 4096)  # raises where there is nothing more, for now or for ever
        self._heard = (self._heard + found)[-_HEARD:]
        return bool(found)


def _started(command: Sequence[str]) -> subprocess.Popen[bytes]:
    environment = {**os.environ, "LC_ALL": "C", "SSH_ASKPASS_REQUIRE": "never"}
    try:
        return subprocess.Popen(  # noqa: S603 (every word of it is made in `sftp.place`)
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            bufsize=0,
            env=environment,
            start_new_session=True,  # no terminal to ask at; and Ctrl-C is ours to answer
        )
    except FileNotFoundError as e:
        raise ConfigError(
            f"no program {command[0]} here", hint="stores on sftp:// need OpenSSH's client: install openssh-client"
        ) from e
    except OSError as e:
        if e.errno in (errno.EAGAIN, errno.ENOMEM, errno.EMFILE, errno.ENFILE):
            raise Transient(f"{command[0]} could not be started: {(e.strerror or str(e)).lower()}") from e
        raise ConfigError(f"{command[0]} could not be started: {(e.strerror or str(e)).lower()}") from e
