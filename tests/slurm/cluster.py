"""A Slurm cluster on this machine: slurmctld, and two slurmd that believe in machines of their own.

Each node has a host name, and its own directory under one path: a disk.  Daemons and jobs live in
one PID namespace, which ends with the process that made it: nothing stays behind.
"""

from __future__ import annotations

import os
import shlex
import shutil
import socket
import subprocess
from collections.abc import Callable, Mapping
from pathlib import Path

from tests.nspawn.machine import ALONE
from tests.support.ports import free_port
from tests.support.waiting import until

NODES = ("node0", "node1")
PATIENCE = 180.0  # seconds
KILL_WAIT = 60  # seconds between SIGTERM and SIGKILL
_WANTED = ("slurmctld", "slurmd", "sbatch", "scontrol", "unshare", "setpriv")
_SPOOL = "/srv"  # within the namespace: a path of a socket has at most 107 bytes
# $1: where each node's disk is, $2: the directory of all disks, $3: of the spools, the rest: names
_START = f"""\
disk=$1 disks=$2
mount --bind "$3" {_SPOOL}
shift 3
slurmctld -D & controller=$!
for node; do
  unshare --mount --uts sh -eu -c 'hostname "$1"; mount --bind "$2" "$3"; exec slurmd -D -N "$1"' \
    sh "$node" "$disks/$node" "$disk" &
done
wait "$controller"
"""
_CONFIG = """\
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmUser=root
SlurmdUser=root
AuthType=auth/none
CredType=cred/none
StateSaveLocation={home}/state
SlurmdSpoolDir={spool}/%n
SlurmctldPidFile={home}/slurmctld.pid
SlurmdPidFile={home}/slurmd-%n.pid
SlurmctldLogFile={home}/slurmctld.log
SlurmdLogFile={home}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerType=sched/builtin
SchedulerParameters=sched_interval=1,sched_min_interval=100000
MpiDefault=none
ReturnToService=2
SlurmdParameters=config_overrides
SlurmdTimeout=600
MessageTimeout=60
KillWait={kill_wait}
PlugStackConfig=/dev/null
NodeName=node0 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[1]} CPUs=1 State=UNKNOWN
NodeName=node1 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[2]} CPUs=1 State=UNKNOWN
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


class CannotStartError(Exception):
    """Why there can be no cluster here."""


class Cluster:
    """Its nodes wait for jobs when it is there.

    `home`: a directory for its files.  On each node `disk` is another directory.
    """

    def __init__(self, home: Path, disk: Path) -> None:
        missing = [tool for tool in _WANTED if not shutil.which(tool)]
        if missing:
            raise CannotStartError(f"{', '.join(missing)} not installed (Debian: slurm-wlm)")
        if os.geteuid() != 0:
            raise CannotStartError("only root can give each node a host name and a disk")
        self.home = home
        for folder in ("state", "spool", *(f"disks/{node}" for node in NODES)):
            (home / folder).mkdir(parents=True)
        ports = [free_port() for _ in range(3)]
        host = socket.gethostname().partition(".")[0]
        config = _CONFIG.format(
            home=home, spool=_SPOOL, host=host, ports=ports, kill_wait=KILL_WAIT
        )
        (home / "slurm.conf").write_text(config)
        self.environment = {"SLURM_CONF": str(home / "slurm.conf")}
        with (home / "daemons.log").open("wb") as log:
            self._process = subprocess.Popen(
                [*ALONE, "sh", "-c", _START, "sh", disk, home / "disks", home / "spool", *NODES],
                env={**_without_slurm(os.environ), **self.environment},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
            )
        if not until(self._is_idle, PATIENCE, 0.1):
            self.close()
            raise CannotStartError(f"no Slurm can be started here:\n{self.logs()}")

    def disk_of(self, node: str) -> Path:
        """Return where this process finds a node's disk."""
        return self.home / "disks" / node

    def run(self, *command: str, check: bool = True) -> str:
        done = self._done(os.environ, *command)
        if check and done.returncode:
            said = f"{done.stdout}{done.stderr}\n{self.logs()}"
            raise AssertionError(f"{shlex.join(command)}: exit code {done.returncode}\n{said}")
        return done.stdout

    def submit(self, script: Path, environment: dict[str, str]) -> str:
        """Submit a batch script from its own directory; return the job's id."""
        done = self._done(environment, "sbatch", "--parsable", script.name, cwd=script.parent)
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    def _done(
        self, environment: Mapping[str, str], *command: str, cwd: Path | None = None
    ) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            command,
            cwd=cwd,
            env={**_without_slurm(environment), **self.environment},
            capture_output=True,
            text=True,
            timeout=PATIENCE,
            check=False,
        )

    def state(self, job: str) -> str:
        return self._value(job, "JobState")

    def restarts(self, job: str) -> int:
        return int(self._value(job, "Restarts"))

    def start_now(self, job: str) -> None:
        """Start a requeued job, which Slurm would let wait for two minutes."""
        self.wait(job, lambda: self.state(job) == "PENDING", "be queued again")
        self.run("scontrol", "update", f"JobId={job}", "StartTime=now")

    def wait(self, job: str, is_so: Callable[[], bool], what: str) -> None:
        """Wait until a condition holds.  Raises AssertionError, with the logs, if it never does."""
        if not until(is_so, PATIENCE, 0.2):
            raise AssertionError(f"job {job} does not {what}\n{self.logs()}")

    def logs(self) -> str:
        paths = sorted(self.home.glob("*.log"))
        return "\n".join(f"{p.name}:\n{p.read_text(errors='replace')[-2000:]}" for p in paths)

    def close(self) -> None:
        self._process.kill()
        self._process.wait()

    def _is_idle(self) -> bool:
        if self._process.poll() is not None:
            return False
        nodes = self.run("sinfo", "--noheader", "--format=%D %t", check=False)
        return nodes.split() == [str(len(NODES)), "idle"]

    def _value(self, job: str, name: str) -> str:
        words = self.run("scontrol", "--oneliner", "show", "job", job).split()
        return next(word for word in words if word.startswith(f"{name}=")).partition("=")[2]


def _without_slurm(environment: Mapping[str, str]) -> dict[str, str]:
    """Return an environment that belongs to no job of another cluster."""
    return {k: v for k, v in environment.items() if not k.startswith(("SLURM", "SBATCH_"))}
