"""Nodes of their own on one machine: each a network namespace, one link to the store, another to
the other nodes.

Everything lives in namespaces without a name, held by processes that die with this one: nothing is
left behind, however it ends. The link to the store can be cut without the trainers noticing.  Needs
root and iproute2; where they are not, `can_isolate` says so.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import signal
import socket
import subprocess
import threading
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from tests.support.seaweedfs import die_with_parent
from tests.support.waiting import until

STORE, TRAIN = "store", "train"  # what a node calls its interfaces
_CLONE_NEWNET = 0x40000000


def can_isolate() -> bool:
    """Whether namespaces with links between them can be made here."""
    if os.geteuid() or not all(map(shutil.which, ("unshare", "nsenter", "ip"))):
        return False
    trial = ["unshare", "--net", "ip", "link", "add", "one", "type", "veth"]
    return subprocess.run(trial, capture_output=True, check=False).returncode == 0


def has_user_namespaces() -> bool:
    """Whether a user may be root in a namespace of his own."""
    trial = ["unshare", "--user", "--map-root-user", "true"]
    return subprocess.run(trial, capture_output=True, check=False).returncode == 0


class Namespace:
    """A network of its own, as long as it is open."""

    def __init__(self) -> None:
        self._holder = subprocess.Popen(
            ["unshare", "--net", "sleep", "infinity"],
            preexec_fn=die_with_parent,  # noqa: PLW1509
        )
        self.path = Path(f"/proc/{self._holder.pid}/ns/net")
        ours = Path("/proc/self/ns/net").readlink()
        assert until(lambda: self.path.readlink() != ours, 10), "unshare --net did not"
        self.ip("link", "set", "lo", "up")

    @property
    def pid(self) -> int:
        """Of a process in it."""
        return self._holder.pid

    def within(self, *command: str) -> list[str]:
        """The command that runs in it."""
        return ["nsenter", f"--net={self.path}", "--", *command]

    def ip(self, *words: str) -> None:
        """Ask iproute2 within, where nothing else is seen."""
        subprocess.run(self.within("ip", *words), check=True, capture_output=True)

    def listener(self) -> socket.socket:
        """A socket that listens in it, on all its addresses; whoever accepts may be elsewhere."""
        listeners: list[socket.socket] = []
        # the network namespace is a thread's: setns(2)
        thread = threading.Thread(target=self._listen, args=(listeners,))
        thread.start()
        thread.join()
        assert listeners, "no socket could be made there"
        return listeners[0]

    def _listen(self, listeners: list[socket.socket]) -> None:
        libc = ctypes.CDLL(None, use_errno=True)
        with self.path.open("rb") as namespace:
            if libc.setns(namespace.fileno(), _CLONE_NEWNET):
                raise OSError(ctypes.get_errno(), "setns")
        listeners.append(socket.create_server(("0.0.0.0", 0), backlog=64))

    def close(self) -> None:
        """With it go its links; processes that are still in it keep it."""
        self._holder.kill()
        self._holder.wait()


class Network:
    """``count`` nodes around a hub where the store is reached: ``address`` is the hub's, for the
    nodes.
    """

    def __init__(self, count: int) -> None:
        self._stack = contextlib.ExitStack()
        self.hub = self._namespace()
        self.nodes = tuple(self._namespace() for _ in range(count))
        self.address = "198.18.0.1"
        for bridge, port in ((STORE, "s"), (TRAIN, "t")):
            self.hub.ip("link", "add", bridge, "type", "bridge")
            self.hub.ip("link", "set", bridge, "up")
            for n, node in enumerate(self.nodes):
                self._join(node, f"{port}{n}", bridge, n)
        self.hub.ip("address", "add", f"{self.address}/24", "dev", STORE)

    def trainer(self, node: int) -> str:
        """A node's address for the others."""
        return f"198.18.1.{10 + node}"

    def cut(self, node: int) -> None:
        """What it sends to the store gets lost, and nothing comes back: no reset, no refusal."""
        self.hub.ip("link", "set", f"s{node}", "down")

    def mend(self, node: int) -> None:
        """As before."""
        self.hub.ip("link", "set", f"s{node}", "up")

    def close(self) -> None:
        """Of all namespaces."""
        self._stack.close()

    def _namespace(self) -> Namespace:
        return self._stack.enter_context(contextlib.closing(Namespace()))

    def _join(self, node: Namespace, port: str, bridge: str, n: int) -> None:
        self.hub.ip(
            "link", "add", port, "type", "veth", "peer", "name", bridge, "netns", str(node.pid)
        )
        self.hub.ip("link", "set", port, "master", bridge, "up")
        node.ip("address", "add", f"198.18.{int(bridge == TRAIN)}.{10 + n}/24", "dev", bridge)
        node.ip("link", "set", bridge, "up")


def kill_tree(process: subprocess.Popen[Any]) -> None:
    """Kill a process, all below it, whatever sessions these have made, and all of its session.

    Its session is killed also where the process itself has ended before.  Then wait for it.
    """
    if process.poll() is None:
        kill(below(process.pid))
    process.wait()
    kill(pid for pid, _ in command_lines() if _session(pid) == process.pid)


def kill(pids: Iterable[int]) -> None:
    """Send SIGKILL to those that are still there, and wait until none is."""
    victims = [*pids]
    for pid in victims:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    until(lambda: not any(map(_is_alive, victims)))


def command_lines() -> Iterator[tuple[int, bytes]]:
    """Yield each process of this machine and its command line; a zero byte ends each word."""
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended meanwhile
            yield int(path.name), (path / "cmdline").read_bytes()


def _session(pid: int) -> int:
    with contextlib.suppress(OSError):  # it has ended meanwhile
        return os.getsid(pid)
    return 0


def _is_alive(pid: int) -> bool:
    """Return whether there is such a process, and no zombie."""
    with contextlib.suppress(OSError):  # it has ended meanwhile
        stat = Path(f"/proc/{pid}/stat").read_text(errors="replace")
        return stat.rpartition(")")[2].split()[0] not in ("Z", "X")
    return False


def below(pid: int) -> Iterator[int]:
    """Yield a process and all below it."""
    yield pid
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):  # it has ended meanwhile
            for child in task.read_text().split():
                yield from below(int(child))


def start(command: Sequence[str], log: Path, **rest: object) -> subprocess.Popen[bytes]:
    """A process in a session of its own, whose words go to a file."""
    with log.open("ab") as out:
        return subprocess.Popen(  # type: ignore[call-overload, no-any-return]
            command,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=out,
            start_new_session=True,
            **rest,
        )
