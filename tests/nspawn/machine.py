"""A machine that really boots: systemd in a container of this system's own files, which it sees
through an overlay and cannot change.

The mounts and the processes are of namespaces of their own, which end with the process that made
them: nothing stays behind.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from tests.support.waiting import until

ROOT = Path(__file__).parent.parent.parent
USERS = {"train": 64201, "other": 64202, "ckptsync": 64203}
WANTED = ("systemd-nspawn", "unshare", "nsenter", "setpriv", "runuser")
PATIENCE = 300.0
_REBOOT = 133  # EXIT_FORCE_RESTART of nspawn
ALONE = (
    *("setpriv", "--pdeathsig", "KILL", "unshare", "--mount", "--pid", "--fork"),
    *("--kill-child", "--mount-proc"),
)
_PATH = "PATH=/usr/sbin:/usr/bin:/sbin:/bin:/opt/ckptsync/bin"
_INSIDE = ("-m", "-u", "-i", "-n", "-p", "env", "-i", _PATH)
_CGROUPS = ("/sys/fs/cgroup", "/sys/fs/cgroup/unified", "/sys/fs/cgroup/systemd")

_NOT_OURS = ("system-generators", "system/multi-user.target.wants", "system/getty.target.wants")
_STARTED = ("systemd-logind.service", "systemd-user-sessions.service")

# Run in namespaces of its own.  $1: where to mount, $2: a name, $3: what is put over /, the rest:
# nspawn's command.
_BOOT = """\
set -eu
home=$1 name=$2 over=$3
shift 3
for top in /sys/fs/cgroup /sys/fs/cgroup/unified /sys/fs/cgroup/systemd; do
  if [ -w "$top/cgroup.procs" ]; then mkdir -p "$top/$name" && echo 0 > "$top/$name/cgroup.procs" \
|| true; fi
done
mount -t tmpfs -o mode=0755 tmpfs "$home"
mkdir "$home/upper" "$home/work" "$home/root" "$home/data"
mount -t overlay overlay -o "lowerdir=/,upperdir=$home/upper,workdir=$home/work" "$home/root"
rm -rf "$home/root/etc/systemd/system" "$home/root/etc/credstore" "$home/root/var/log/journal"
sh -eu "$over" "$home/root"
code=133
while [ "$code" = 133 ]; do
  code=0
  "$@" || code=$?
  echo "nspawn: $code"
done
"""


class CannotBootError(Exception):
    """Why there can be no container here."""


class Machine:
    """Booted when it is there; ``run`` runs a command in it as root, ``ckptsync`` as one of
    `USERS`.
    """

    def __init__(self, home: Path) -> None:
        missing = [tool for tool in WANTED if not shutil.which(tool)]
        if missing:
            raise CannotBootError(f"{', '.join(missing)} not installed")
        if os.geteuid() != 0:
            raise CannotBootError("only root can start containers")
        self._name = f"ckptsync-test-{secrets.token_hex(4)}"
        self._log = home / "console.log"
        mounted, over = home / "mounted", home / "over.sh"
        mounted.mkdir()
        over.write_text(_over())
        boot = ("sh", "-c", _BOOT, "sh", str(mounted), self._name, str(over))
        with self._log.open("wb") as console:
            self._process = subprocess.Popen(
                [*ALONE, *boot, *_nspawn(mounted, self._name)],
                stdin=subprocess.DEVNULL,
                stdout=console,
                stderr=subprocess.STDOUT,
            )
        try:
            self._leader = self._booted(after=0)
        except AssertionError as e:
            self.close()
            raise CannotBootError(f"{e}: {self._said()}") from e

    def run(self, *command: str, check: bool = True, given: str | None = None) -> str:
        """What it prints on stdout; raises with what it said if it fails."""
        done = subprocess.run(
            ["nsenter", "-t", str(self._leader), *_INSIDE, *command],
            input=given,
            capture_output=True,
            text=True,
            timeout=PATIENCE,
            check=False,
            cwd="/",
        )
        if check and done.returncode:
            said = f"{done.stdout}{done.stderr}\n{self.journal()}"
            raise AssertionError(f"{shlex.join(command)}: {done.returncode}\n{said}")
        return done.stdout

    def run_as(self, user: str, *command: str, check: bool = True) -> str:
        return self.run("runuser", "-u", user, "--", *command, check=check)

    def path(self, inside: str) -> Path:
        """A file of the machine's, as we see it."""
        return Path(f"/proc/{self._leader}/root{inside}")

    def write(self, path: str, text: str) -> None:
        self.path(path).parent.mkdir(parents=True, exist_ok=True)
        self.path(path).write_text(text)

    def wait_for(self, what: str, is_so: Callable[[], bool]) -> None:
        """Ask again and again until it is so.

        Raises, with the journal, if it does not come to be.
        """
        if not until(is_so, PATIENCE, 0.05):
            raise AssertionError(f"{what}\n{self.journal('-n', '60')}")

    def systemctl(self, *words: str, check: bool = True) -> str:
        return self.run("systemctl", "--no-pager", *words, check=check)

    def property(self, unit: str, name: str) -> str:
        """What systemd knows of a unit."""
        return self.systemctl("show", "--value", "-p", name, unit).strip()

    def journal(self, *words: str) -> str:
        """Plain messages, of ``-u UNIT`` or all."""
        return self.run("journalctl", "--no-pager", "-o", "cat", *words, check=False)

    def reboot(self) -> None:
        """Stop everything in order, and boot again with the same disks."""
        before = self._boots()
        self.systemctl("reboot", check=False)
        assert until(lambda: self._boots() > before, PATIENCE, 0.02), "the container does not stop"
        self._leader = self._booted(after=before + 1)

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        for top in _CGROUPS:
            _removed(Path(top, self._name))

    def _said(self) -> str:
        lines = [line.strip() for line in self._log.read_text("utf-8", "replace").splitlines()]
        said = [line for line in lines if line and not line.startswith("nspawn:")]
        return said[-1] if said else "it said nothing"

    def _boots(self) -> int:
        return self._log.read_text("utf-8", "replace").count(f"nspawn: {_REBOOT}")

    def _booted(self, after: int) -> int:
        """The process id of the container's systemd as we see it, once all that it starts is
        started.
        """

        def is_up() -> bool:
            assert self._process.poll() is None, "no container can be started here"
            self._leader = next(_inner(self._process.pid), 0)
            if not self._leader or self._boots() != after:
                return False
            state = self.run("systemctl", "is-system-running", check=False).strip()
            return state in ("running", "degraded")

        assert until(is_up, PATIENCE, 0.02), "the container does not boot"
        return self._leader


def _inner(pid: int) -> Iterator[int]:
    """The first process of the container, which nspawn starts in a namespace within ours."""
    for child in _children(pid):
        with contextlib.suppress(OSError):
            status = Path(f"/proc/{child}/status").read_text("ascii", "replace")
            ids = next(line.split()[1:] for line in status.splitlines() if line[:6] == "NSpid:")
            name = Path(f"/proc/{child}/comm").read_text().strip()
            if len(ids) >= 3 and ids[-1] == "1" and name == "systemd":
                yield child
        yield from _inner(child)


def _children(pid: int) -> list[int]:
    try:
        return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []  # it has ended


def _removed(folder: Path) -> None:
    """Remove a control group's folders, once its last process has ended."""

    def is_gone() -> bool:
        for path, _, _ in os.walk(folder, topdown=False):
            with contextlib.suppress(OSError):  # not empty yet
                Path(path).rmdir()
        return not folder.is_dir()

    until(is_gone, 60, 0.02)


def _seen() -> list[str]:
    """Where Python, its packages and this project lie."""
    found = {
        str(Path(p).resolve())
        for p in (sys.prefix, sys.base_prefix, ROOT, Path(sys.executable).resolve().parent)
    }
    return sorted(
        p
        for p in found
        if not p.startswith("/usr") or Path(p).stat().st_dev != Path("/usr").stat().st_dev
    )


def _nspawn(mounted: Path, name: str) -> list[str]:
    binds = [f"--bind-ro={path}" for path in _seen()]
    words = (
        "systemd-nspawn --quiet --register=no --keep-unit --boot --hostname=node-a --console=pipe"
        " --link-journal=no --private-network"
    )
    mine = (f"--machine={name}", f"--directory={mounted}/root", f"--bind={mounted}/data:/data")
    return [*words.split(), "--timezone=off", "--resolv-conf=off", *mine, *binds]


def _over() -> str:
    """A script that makes of this system's files a machine of its own: users, what is started, this
    project as an operator installs it.
    """
    lines = [
        "root=$1",
        'mkdir -p "$root/etc/systemd/system" "$root/opt/ckptsync/bin" "$root/data" "$root/mnt"',
    ]
    lines.append(
        f'echo {secrets.token_hex(16)} > "$root/etc/machine-id"; rm -f "$root/etc/hostname"'
    )
    for user, number in USERS.items():
        lines.append(f'echo {user}:x:{number}:{number}::/home/{user}:/bin/sh >> "$root/etc/passwd"')
        lines.append(
            f'echo {user}:x:{number}: >> "$root/etc/group"; echo "{user}:*:19000::::::" >>'
            ' "$root/etc/shadow"'
        )
        lines.append(f'install -d -m 0750 -o {number} -g {number} "$root/home/{user}"')
    for path in _seen():
        lines.append(f'mkdir -p "$root{path}"')
        lines += [
            f'chmod a+rx "$root{parent}"' for parent in Path(path).parents if str(parent) != "/"
        ]
    program = (
        f"#!{sys.executable}\n"
        "import sys\n"
        f"sys.path.insert(0, {str(ROOT)!r})\n"
        "from ckptsync.cli.main import main\n"
        "sys.exit(main())\n"
    )
    ours = '"$root/opt/ckptsync/bin/ckptsync"'
    lines.append(f"printf %s {shlex.quote(program)} > {ours}; chmod 755 {ours}")
    units = '"$root/usr/lib/systemd'
    # what this system starts beside systemd itself
    lines += [f'rm -rf {units}/{folder}"' for folder in _NOT_OURS]
    lines.append(f'mkdir {units}/system/multi-user.target.wants"')
    lines += [f'ln -s ../{unit} {units}/system/multi-user.target.wants/"' for unit in _STARTED]
    lines.append(
        'ln -s /usr/lib/systemd/system/multi-user.target "$root/etc/systemd/system/default.target"'
    )
    return "\n".join(lines) + "\n"
