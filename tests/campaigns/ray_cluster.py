"""Two Ray nodes on one machine that share nothing: each has a network, and a directory of Ray's
sessions, of its own.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import subprocess
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

from ckptsync.stores.contract import Store
from ckptsync.stores.opening import create_store
from tests.campaigns.cluster import CLEAN
from tests.campaigns.lives import Mortal
from tests.campaigns.nodes import Network, kill_tree, start
from tests.campaigns.two_nodes import NODES, PROJECT, START
from tests.support.vector import ROOT

PORT = 6399


class RayNodes:
    """``home`` is short: the paths of Ray's sockets are in it.

    ``served``: a worker of ours is installed on each node, and looks into Ray's sessions.
    """

    def __init__(self, home: Path, python: str, network: Network, *, served: bool) -> None:
        self.home, self._python, self._network, self._served = home, python, network, served
        self.store: Store = create_store(str(home / "store"))
        self._temp = home / "t"
        self._temp.mkdir()
        self.workers = [self._worker(n, "none") for n in range(NODES)]
        self._ray: list[subprocess.Popen[bytes]] = []

    def node(self, n: int) -> Path:
        """What would be its disk."""
        return self.home / f"node{n}"

    @property
    def session(self) -> str:
        """Ray's name of this cluster's life."""
        (found,) = {
            path.name for path in (self.node(0) / "t").glob("session_2*") if not path.is_symlink()
        }
        return found

    def artifacts(self, n: int, run: str) -> Path:
        """A run's working directory on a node."""
        return self.node(n) / "t" / self.session / "artifacts" / run

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Ray, and the workers of ours, on both nodes."""
        try:
            for n in range(NODES):
                self._ray.append(self._begun(n))
                if n == 0:
                    self._wait_for_head()
                if self._served:
                    # what session_latest names can only be seen in a node's own namespace
                    self.workers[n] = self._worker(n, self.session)
                    self.workers[n].start(self._network.nodes[n].within())
            yield
        finally:
            for one in self._ray:
                kill_tree(one)
            for worker in self.workers if self._served else ():
                worker.kill()

    def restart(self, n: int) -> None:
        """All that is Ray's on a node dies at once (SIGKILL), and the node joins the cluster again;
        not the first, which is the head.
        """
        kill_tree(self._ray[n])
        self._ray[n] = self._begun(n)

    def driver(
        self, mode: str, run: str, truth: str, *words: str, told: Mapping[str, str]
    ) -> subprocess.Popen[bytes]:
        """A user's script on the first node, with these variables."""
        address = f"{self._network.trainer(0)}:{PORT}"
        locations = [
            "--address",
            address,
            "--run",
            run,
            "--home",
            str(self.home),
            "--base",
            str(ROOT / "base"),
            "--truth",
            truth,
        ]
        command = [self._python, "-m", "tests.campaigns.ray_driver", mode, *locations, *words]
        environment = {**self._environment(0), **told}
        return start(
            self._bound(0, *command),
            self.home / f"{truth}.log",
            env=environment,
            cwd=str(self.node(0)),
        )

    def _bound(self, n: int, *command: str) -> list[str]:
        """In the node's network, and with its own directory where Ray has its sessions."""
        script = (
            f"mount --bind {shlex.quote(str(self.node(n) / 't'))} {shlex.quote(str(self._temp))} &&"
            f" exec {shlex.join(command)}"
        )
        return self._network.nodes[n].within("unshare", "--mount", "sh", "-c", script)

    def _begun(self, n: int) -> subprocess.Popen[bytes]:
        return start(
            self._bound(n, *self._start(n)),
            self.node(n) / "ray.log",
            env=self._environment(n),
            cwd=str(self.node(n)),
        )

    def _start(self, n: int) -> list[str]:
        ray = str(Path(self._python).parent / "ray")
        address = [
            "--head",
            f"--port={PORT}",
            f"--temp-dir={self._temp}",
            "--include-dashboard=false",
        ]
        joined = [f"--address={self._network.trainer(0)}:{PORT}"]
        own = [
            f"--node-ip-address={self._network.trainer(n)}",
            "--num-cpus=1",
            "--object-store-memory=100000000",
            "--disable-usage-stats",
        ]
        return [ray, "start", *(joined if n else address), *own, "--block"]

    def _environment(self, n: int) -> dict[str, str]:
        quiet = {
            "TRANSFORMERS_VERBOSITY": "error",
            "HF_HUB_OFFLINE": "1",
            "OMP_NUM_THREADS": "1",
            "PYTHONDONTWRITEBYTECODE": "1",
        }
        quiet["RAY_AUTH_MODE"] = "disabled"  # a network that nobody else is in
        return {
            **CLEAN,
            **quiet,
            "GLOO_SOCKET_IFNAME": "train",
            "PYTHONPATH": str(PROJECT),
            "CKPTSYNC_NODE": f"node{n}",
        }

    def _wait_for_head(self) -> None:
        until = time.monotonic() + START
        while "Ray runtime started" not in (self.node(0) / "ray.log").read_text("utf-8", "replace"):
            assert time.monotonic() < until, f"{self.node(0)}/ray.log: no head"
            assert self._ray[0].poll() is None, (self.node(0) / "ray.log").read_text(
                "utf-8", "replace"
            )
            time.sleep(0.2)

    def _worker(self, n: int, session: str) -> Mortal:
        for name in ("t", "out", "truth"):
            (self.node(n) / name).mkdir(parents=True, exist_ok=True)
        sessions = f"{self.node(n)}/t/{session}/artifacts"
        runs = [{"path": f"{sessions}/*"}, {"path": f"{sessions}/*/*"}]
        told = {"node": f"node{n}", "roles": ["worker"], "store": {"url": str(self.home / "store")}}
        worker = Mortal(
            self.home,
            f"node{n}",
            {**told, "worker": {"runs": runs, "quiet": "2s", "unmarked": "10s"}},
        )
        worker.log.touch()
        return worker


def alive(pid: int) -> bool:
    """Whether there is such a process."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, 0)
        return True
    return False
