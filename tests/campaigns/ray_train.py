"""Ray Train with two workers on two Ray nodes that share nothing, every step saved and one kept:
all of them in the store, and the training as without us.

    python -m tests.campaigns.ray_train --python /path/to/python --modes ddp fsdp2

That Python has Ray (``ray[default,train]``), torch, transformers, accelerate, and what ckptsync
needs.  The user's script knows nothing of ckptsync: the callback comes by RAY_TRAIN_CALLBACKS.  Of
each mode:

plain     nothing of ours, for comparison
service   a worker is installed on each node, and finds relative outputs in Ray's session
          directories by a pattern
embedded  CKPTSYNC_STORE is all there is: the callback starts a worker on each node
raise     the training destroys its process group and raises after the last save, as LLaMA-Factory
          0.9.2 and Ray up to 2.54 do together
kill      a Ray worker is killed (SIGKILL) in the middle, and Ray begins the worker group again:
          what both lives have saved is in the store
node      the same, but all of Ray on that node is killed, and the node joins again

Every file of every node is compared with what the trainer wrote, every step's merged model with
what the framework gathered, bit for bit; losses, final model, number of steps and exit codes with
those of ``plain``.  Wants root: the nodes are namespaces.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shlex
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from ckptsync.records.location_status import LocationState
from ckptsync.stores.contract import Store
from ckptsync.stores.opening import create_store
from tests.campaigns.campaign import CLEAN, arguments, end_by_signal, flags, verdict
from tests.campaigns.cluster import Service
from tests.campaigns.judged import Judge, Tally
from tests.campaigns.nodes import TRAIN, Network, can_isolate, kill_tree, start
from tests.campaigns.two_nodes import (
    NODES,
    PROJECT,
    QUIET,
    START,
    Job,
    default_python,
    events,
    finish,
    losses,
    wait_for,
)
from tests.support.vector import ROOT
from tests.support.waiting import until

PORT = 6399
NOTHING: Mapping[str, str] = {}
KINDS = ("plain", "service", "embedded", "raise", "kill", "node")
STEPS = 5
PATIENCE = 120.0  # seconds for the store to have everything
KILLED = ("kill", "node")
CALLBACK = {"RAY_TRAIN_CALLBACKS": "ckptsync.hooks.ray.CkptSyncRayCallback"}


def main(argv: Sequence[str] | None = None) -> int:
    """0 if every promise was kept, 1 if not."""
    args = _arguments().parse_args(argv)
    if not can_isolate():
        print("wants root, iproute2 and util-linux: each Ray node is a namespace")
        return 2
    with tempfile.TemporaryDirectory(prefix="ckr-") as temporary:  # its path must be short
        home = Path(temporary)
        python = str(Path(args.python).absolute())  # nodes have working directories of their own
        wrong = sum(_all(home / mode[0], mode, python) for mode in args.modes)
    print(f"{wrong} wrong")
    return 1 if wrong else 0


def _arguments() -> argparse.ArgumentParser:
    parser = arguments(__doc__)
    parser.add_argument("--modes", nargs="+", choices=("ddp", "fsdp2"), default=["ddp"])
    parser.add_argument("--python", default=default_python(), help="of the trainers")
    return parser


def _all(home: Path, mode: str, python: str) -> int:
    """Two clusters: one where workers are installed, one where they are not."""
    wrong = 0
    plain: Path | None = None
    for number, served in enumerate((True, False)):
        kinds = [kind for kind in KINDS if (kind in ("plain", "service")) == served]
        (home / str(number)).mkdir(parents=True)
        with contextlib.closing(Network(NODES)) as network:
            nodes = RayNodes(home / str(number), python, network, served=served)
            with nodes.running():
                for kind in kinds:
                    run = Run(nodes, mode, kind)
                    tally = run.judged(plain)
                    plain = run.kept() if kind == "plain" else plain
                    wrong += len(tally.wrong)
                    print(f"{mode} {kind}: {tally}; {run.took:.0f} s", flush=True)
                    verdict(tally.wrong)
    return wrong


class Run:
    """One Ray run, from its start to the last look at the store."""

    def __init__(self, nodes: RayNodes, mode: str, kind: str) -> None:
        self._nodes, self._mode, self._kind = nodes, mode, kind
        self._name = f"{mode}-{kind}"
        self._prefix = self._name
        self.took = 0.0

    def truth(self, n: int, life: int = 0) -> Path:
        """What a node kept of a life of the worker group."""
        return self._nodes.node(n) / "truth" / f"{self._prefix}-out{life}"

    def first(self, life: int = 0) -> int:
        """On which node Ray has put rank 0: it orders workers as it has placed them."""
        return next((n for n in range(NODES) if "events-0" in events(self.truth(n, life))), 0)

    def kept(self, life: int = 0) -> Path:
        """By the node of rank 0."""
        return self.truth(self.first(life), life)

    def judged(self, plain: Path | None) -> Tally:
        """Train, wait for the store, compare."""
        begun = time.monotonic()
        driver = self._nodes.driver(
            self._mode, self._name, self._prefix, *self._words(), told=self._told()
        )
        with self._killing():
            (code,) = finish([driver], START + 60)
        tallies = [self._judge(life, code) for life in range(2 if self._kind in KILLED else 1)]
        self.took = time.monotonic() - begun
        wrong = [line for tally in tallies for line in tally.wrong]
        if (code == 0) == (self._kind == "raise"):
            wrong.append(f"{self._name}: the script ended with {code}")
        if plain and self._kind not in KILLED:
            wrong += self._unlike(plain)
        saved, wanted, whole = (
            sum(getattr(t, name) for t in tallies) for name in ("saved", "wanted", "whole")
        )
        return Tally(saved, wanted, whole, tuple(wrong))

    def _words(self) -> list[str]:
        words = ["--steps", str(STEPS)]
        if self._kind in KILLED:
            words += ["--failures", "1", "--pause", "0.5"]
        return words + (["--ending", "raise"] if self._kind == "raise" else [])

    def _told(self) -> Mapping[str, str]:
        if self._kind == "plain":
            return {}
        return (
            CALLBACK
            if self._kind == "service"
            else {**CALLBACK, "CKPTSYNC_STORE": str(self._nodes.home / "store")}
        )

    def _judge(self, life: int, code: int | None) -> Tally:
        for n in range(NODES):
            link = self._nodes.node(n) / "out" / f"{self._prefix}-out{life}"
            link.symlink_to(self._nodes.artifacts(n, self._name) / f"out{life}")
        hook = self._kind != "plain"
        job = Job(f"{self._prefix}-out{life}", self._mode, hook, STEPS, ranks=1)
        if self._kind == "plain":
            return Tally(
                len([e for e in events(self.kept()).get("events-0", []) if e["event"] == "saved"]),
                0,
                0,
                (),
            )
        judge = (Cut if self._kind in KILLED and life == 0 else Judge)(
            self._nodes,  # type: ignore[arg-type]
            job,
            self.first(life),
        )  # of a node it asks no more than ours have
        judge.wait(PATIENCE)
        return judge.tally([0 if self._kind == "raise" else code])

    def _unlike(self, plain: Path) -> Iterator[str]:
        """What is not as without us: what each step's training came to, and the model in the
        end.
        """
        theirs, ours = losses(plain), losses(self.kept())
        if theirs != ours or len(theirs) != STEPS:
            yield f"{self._name}: losses {ours}, without us {theirs}"
        roots = [
            {p.name: p.read_bytes() for p in (at / "root").iterdir() if p.suffix != ".bin"}
            for at in (plain, self.kept())
        ]
        if roots[0].keys() != roots[1].keys() or roots[0].get("model.safetensors") != roots[1].get(
            "model.safetensors"
        ):
            yield (
                f"{self._name}: the final model is {sorted(roots[1])}, without us"
                f" {sorted(roots[0])}, or has other weights"
            )

    @contextlib.contextmanager
    def _killing(self) -> Iterator[None]:
        thread = threading.Thread(target=self._kill)
        if self._kind in KILLED:
            thread.start()
        yield
        if self._kind in KILLED:
            thread.join()

    def _kill(self) -> None:
        assert wait_for(self.truth(1), "begin", STEPS - 1, START), "it never came so far"
        if self._kind == "node":
            self._nodes.restart(1)
            return
        for told in (self._nodes.artifacts(1, self._name) / "out0" / "_ckptsync" / "trains").glob(
            "*.json"
        ):
            os.kill(json.loads(told.read_text())["pid"], signal.SIGKILL)


class RayNodes:
    """Two Ray nodes on one machine, each with a network and session directories of its own.

    ``home`` is short: the paths of Ray's sockets are in it.

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


class Cut(Judge):
    """Of a training that was killed: what was saved when a rank on each node had gone on must be in
    the store, and nothing else is judged.
    """

    def _wanted(self, n: int) -> set[int]:
        gone_on = [
            {e["step"] - 1 for e in said if e["event"] == "begin"}
            for m in range(NODES)
            for said in events(self._truth(m)).values()
        ]
        return set.intersection(*gone_on) - {0}

    def _trainer(self, codes: list[int | None]) -> Iterator[str]:
        if max(self._wanted(0), default=0) < 2:
            yield f"{self._job.run}: it was killed too early to say anything"

    def _location(self, location: str, snapshot: LocationState) -> Iterator[str]:
        # else it was killed before that was kept for comparison
        if all((self._truth(n) / location).is_dir() for n in range(NODES)):
            yield from super()._location(location, snapshot)

    def _undisturbed(self) -> Iterator[str]:
        there = self._snapshots()
        yield from (
            f"{self._job.run}/checkpoint-{step}: not in the store"
            for step in self._wanted(0)
            if f"checkpoint-{step}" not in there
        )


if __name__ == "__main__":
    end_by_signal(main)
