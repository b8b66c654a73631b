"""Two Ray nodes on one machine that share nothing: each has a network, and a directory of Ray's
sessions, of its own.
"""

from __future__ import annotations

import contextlib
import shlex
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from ckptsync.stores.contract import Store
from ckptsync.stores.opening import create_store
from tests.campaigns.campaign import CLEAN, flags
from tests.campaigns.cluster import Service
from tests.campaigns.nodes import TRAIN, Network, kill_tree, start
from tests.campaigns.two_nodes import NODES, PROJECT, QUIET, START
from tests.support.vector import ROOT
from tests.support.waiting import until

PORT = 6399
NOTHING: Mapping[str, str] = {}


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
                self._ray.append(self._ray_node(n))
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
        self._ray[n] = self._ray_node(n)

    def driver(
        self, mode: str, run: str, truth: str, *words: str, told: Mapping[str, str]
    ) -> subprocess.Popen[bytes]:
        """A user's script on the first node, with these variables."""
        address = f"{self._network.trainer(0)}:{PORT}"
        where = flags(address=address, run=run, home=self.home, base=ROOT / "base", truth=truth)
        driver = [self._python, "-m", "tests.campaigns.ray_driver", mode, *where, *words]
        return self._begun(0, self.home / f"{truth}.log", driver, told)

    def _bound(self, n: int, *command: str) -> list[str]:
        """In the node's network, and with its own directory where Ray has its sessions."""
        script = (
            f"mount --bind {shlex.quote(str(self.node(n) / 't'))} {shlex.quote(str(self._temp))} &&"
            f" exec {shlex.join(command)}"
        )
        return self._network.nodes[n].within("unshare", "--mount", "sh", "-c", script)

    def _begun(
        self, n: int, log: Path, command: Sequence[str], told: Mapping[str, str] = NOTHING
    ) -> subprocess.Popen[bytes]:
        environment = {**self._environment(n), **told}
        return start(self._bound(n, *command), log, env=environment, cwd=str(self.node(n)))

    def _ray_node(self, n: int) -> subprocess.Popen[bytes]:
        joined = flags(address=f"{self._network.trainer(0)}:{PORT}")
        head = flags(head=True, port=PORT, temp_dir=self._temp, include_dashboard="false")
        own = flags(node_ip_address=self._network.trainer(n), num_cpus=1, block=True)
        more = flags(object_store_memory=100_000_000, disable_usage_stats=True)
        ray = str(Path(self._python).parent / "ray")
        command = [ray, "start", *(joined if n else head), *own, *more]
        return self._begun(n, self.node(n) / "ray.log", command)

    def _environment(self, n: int) -> dict[str, str]:
        return {
            **CLEAN,
            **QUIET,
            "TRANSFORMERS_VERBOSITY": "error",
            "RAY_AUTH_MODE": "disabled",  # a network that nobody else is in
            "GLOO_SOCKET_IFNAME": TRAIN,
            "PYTHONPATH": str(PROJECT),
            "CKPTSYNC_NODE": f"node{n}",
        }

    def _wait_for_head(self) -> None:
        def said() -> str:
            return (self.node(0) / "ray.log").read_text("utf-8", "replace")

        until(lambda: "Ray runtime started" in said() or self._ray[0].poll() is not None, START)
        assert "Ray runtime started" in said(), said()

    def _worker(self, n: int, session: str) -> Service:
        for name in ("t", "out", "truth"):
            (self.node(n) / name).mkdir(parents=True, exist_ok=True)
        sessions = f"{self.node(n)}/t/{session}/artifacts"
        runs = [{"path": f"{sessions}/*"}, {"path": f"{sessions}/*/*"}]
        told = {"runs": runs, "quiet": "2s", "unmarked": "10s"}
        worker = Service(
            self.home, f"node{n}", "worker", store={"url": self.store.url}, worker=told
        )
        worker.log.touch()
        return worker
