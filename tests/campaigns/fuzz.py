"""Try inputs that nobody would write at entry points of ckptsync, and keep each that does harm.

    python -m tests.campaigns.fuzz --seconds 600 --door records --seed 7

A door makes cases by chance (a few plain values, so that a case can be kept as a file) and gives
each case to a public function or a command, in a process of its own.  Right answers are a right
result and a `CkptsyncError` with an exit code of docs/cli.md.  A finding is anything else: another
exception, a process that dies or does not come back, too much memory or time, a wrong result
(`Wrong`), something read or written outside of the directories that were given.  Of findings of one
kind the smallest is kept.
"""

from __future__ import annotations

import argparse
import base64
import contextlib
import faulthandler
import io
import json
import os
import random
import re
import resource
import shutil
import signal
import sys
import tempfile
import time
import traceback
import zlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from ckptsync.cli.main import main as ckptsync
from ckptsync.digest import digest
from ckptsync.errors import CkptsyncError
from tests.campaigns.campaign import arguments, working

ROOT = Path(__file__).parent.parent.parent
KEPT = ROOT / "tests" / "fuzz_findings"
CODES = frozenset({2, 3, 4, 5, 10})
"""Exit codes of errors; 1 is a bug, or what ``status --check`` says of an alarm."""
SECONDS = 5.0  # of CPU for one case
HANGS = 30.0  # seconds without any work after which a process does not come back
MEMORY = 300 << 20  # bytes that one case may need beyond what the process had
ADDRESSES = 4 << 30  # bytes of address space, so that a runaway case ends in its own process
BATCH = 200  # cases of one process
SECRET = b"what lies outside is nobody's business"

Case = dict[str, Any]
"""Text, numbers, bytes, and lists and dictionaries of them."""


class Wrong(Exception):
    """A result that is not right; says why."""


@dataclass(frozen=True, slots=True)
class Door:
    """``make`` makes a case; ``run`` tries one in an empty directory, and returns a word to count.

    ``run`` raises `Wrong`, or whatever the product raises.  Only what is below one of ``given`` in
    that directory may be read or written, and ``own``, which is home and temporary. ``ready`` is
    called before the first case, in the process that all others are forked from.
    """

    make: Callable[[random.Random], Case]
    run: Callable[[Case, Path], str]
    given: tuple[str, ...] = ()
    ready: Callable[[], object] = lambda: None
    seconds: float = SECONDS
    memory: int = MEMORY


DOORS = {
    "merge-structure": "fuzz_structure",
    "records": "fuzz_local",
    "argv": "fuzz_local",
    "sftp-answers": "fuzz_servers",
}
"""Door → the module that has it in its table ``DOORS``."""


@dataclass
class Finding:
    """The smallest case of those with the same ``kind``, and how often there was one."""

    kind: str
    said: str
    case: Case
    count: int = 1


@dataclass
class Tally:
    """What came of the cases of a door."""

    words: Counter[str] = field(default_factory=Counter)
    findings: dict[str, Finding] = field(default_factory=dict)

    def add(self, word: str, said: str, case: Case) -> None:
        """Count a case."""
        self.words[word] += 1
        if word != "FOUND":
            return
        kind = _kind(said)
        finding = self.findings.setdefault(kind, Finding(kind, said, case, 0))
        finding.count += 1
        if len(encoded(case)) < len(encoded(finding.case)):
            finding.said, finding.case = said, case


def main(argv: Sequence[str] | None = None) -> int:
    """Return 0 if nothing was found."""
    args = _arguments().parse_args(argv)
    doors = args.door or list(DOORS)
    print(f"seed {args.seed}, {args.seconds:.0f} s, doors {', '.join(doors)}", flush=True)
    count = 0
    for name in doors:
        tally = search(name, args.seed, args.seconds / len(doors))
        count += len(tally.findings)
        words = ", ".join(f"{n} {word}" for word, n in tally.words.most_common())
        print(f"{name}: {tally.words.total()} inputs, {words}", flush=True)
        for finding in tally.findings.values():
            path = os.path.relpath(keep(name, finding), ROOT)
            said = _indented(finding.said)
            print(f"FOUND {finding.count} times, kept as {path}\n  {said}", flush=True)
    print(f"{count} findings, seed {args.seed}")
    return 1 if count else 0


def _arguments() -> argparse.ArgumentParser:
    parser = arguments(__doc__)
    told = "for all doors together (default: 60)"
    parser.add_argument("--seconds", type=float, default=60.0, help=told)
    seed = str(random.SystemRandom().randrange(1 << 32))
    parser.add_argument("--seed", default=seed, help="(default: another one each time)")
    told = "may be repeated (default: all in turn)"
    parser.add_argument("--door", action="append", choices=DOORS, help=told)
    return parser


def door_of(name: str) -> Door:
    """Return a door, ready to be tried."""
    door: Door = import_module(f"tests.campaigns.{DOORS[name]}").DOORS[name]
    door.ready()
    return door


def search(name: str, seed: str, seconds: float) -> Tally:
    """Try cases of one door until the time is over."""
    door, tally, end = door_of(name), Tally(), time.monotonic() + seconds
    with contextlib.closing(Runner(door)) as runner:
        while not tally.words or time.monotonic() < end:
            case = door.make(random.Random(f"{seed} {name} {tally.words.total()}"))
            tally.add(*runner.judge(case), case)
    return tally


def keep(name: str, finding: Finding) -> Path:
    """Write a finding where `tests/test_fuzz_findings.py` tries it again."""
    text = encoded({"door": name, "found": finding.said[-2000:], "case": finding.case})
    path = KEPT / name / f"{digest(encoded(finding.case).encode())[:12]}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text + "\n")
    return path


def again(path: Path) -> str:
    """Return what is wrong with a kept finding now; empty if nothing is."""
    kept = decoded(path.read_text())
    with contextlib.closing(Runner(door_of(kept["door"]))) as runner:
        word, said = runner.judge(kept["case"])
    return said if word == "FOUND" else ""


def encoded(case: Mapping[str, Any]) -> str:
    """Return a case as JSON; bytes are packed."""

    def packed(value: bytes) -> dict[str, str]:
        if len(value) < 2000 and value.isascii():
            return {"text of bytes": value.decode("ascii")}
        return {"packed": base64.b64encode(zlib.compress(value, 9)).decode()}

    return json.dumps(case, indent=1, default=packed)


def decoded(text: str) -> Case:
    """Return what `encoded` wrote."""

    def unpacked(value: dict[str, Any]) -> Any:
        if value.keys() == {"text of bytes"}:
            return value["text of bytes"].encode()
        is_packed = value.keys() == {"packed"}
        return zlib.decompress(base64.b64decode(value["packed"])) if is_packed else value

    case: Case = json.loads(text, object_hook=unpacked)
    return case


def _kind(said: str) -> str:
    """Return what findings of one cause have in common.

    That is the last line of ours in a traceback, or the words without names and numbers.
    """
    frames = re.findall(r'File "[^"]*/(ckptsync/[^"]+)", line \d+, in (\S+)', said)
    last = said.strip().rpartition("\n")[2].partition(":")[0]
    return f"{frames[-1]} {last}" if frames else re.sub(r"'[^']*'|\d+", "#", said)[:120]


def _indented(said: str) -> str:
    lines = [line[:400] for line in said.strip().splitlines()]
    return "\n  ".join(lines if len(lines) < 30 else [*lines[:4], "…", *lines[-20:]])


class Runner:
    """A child process that tries cases of a door; another replaces it when it dies.

    A process that dies, or does not come back, is the finding of the case that it was at.
    """

    def __init__(self, door: Door) -> None:
        self._door, self._pid, self._count = door, 0, 0
        self._stack = contextlib.ExitStack()
        self._home = self._stack.enter_context(working("fuzz", in_memory=True)).resolve()
        self._log = self._home / "log"
        self._connection: Connection[Any, Any] | None = None

    def judge(self, case: Case) -> tuple[str, str]:
        """Return the word that a case is counted under, and what was said of a finding."""
        if self._count % BATCH == 0:
            self._end()
        self._count += 1
        connection = self._connection or self._fork()
        connection.send(case)
        idle, used = 0.0, 0.0
        while not connection.poll(5.0):
            now = _used(self._pid)
            idle, used = idle + 5.0 if now - used < 0.05 else 0.0, now
            if idle >= HANGS:
                os.kill(self._pid, signal.SIGABRT)  # by which it says where it is
        try:
            word, said = connection.recv()
        except (EOFError, ConnectionResetError):
            self._end()
            text = self._log.read_text("utf-8", "replace") if self._log.exists() else ""
            if text.startswith(_OURS):
                raise RuntimeError(text) from None
            return "FOUND", f"the process died or did not come back\n{text[-3000:]}"
        return word, said

    def close(self) -> None:
        """End the process and remove its directory."""
        self._end()
        self._stack.close()

    def _fork(self) -> Connection[Any, Any]:
        shutil.rmtree(self._home / "case", ignore_errors=True)
        ours, theirs = Pipe()
        self._pid = os.fork()
        if not self._pid:
            try:
                ours.close()
                os.setsid()  # whatever it starts ends with it
                _serve(self._door, theirs, self._home, self._log)
            except BaseException:  # noqa: BLE001 - the parent tells, as of any death
                self._log.write_text(_OURS + traceback.format_exc())
            finally:
                os._exit(0)
        theirs.close()
        self._connection = ours
        return ours

    def _end(self) -> None:
        if self._connection:
            self._connection.close()
            self._connection = None
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._pid, signal.SIGKILL)
            os.waitpid(self._pid, 0)


def _used(pid: int) -> float:
    """Return seconds of CPU of a process and of those that it has waited for."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")


_OURS = "the campaign itself failed\n"


def _serve(door: Door, cases: Connection[Any, Any], home: Path, log: Path) -> None:
    """Judge each case that comes, until the parent is gone."""
    guard = Guard(home)
    sys.addaudithook(guard)
    with log.open("w") as file, contextlib.suppress(EOFError):
        faulthandler.enable(file)
        os.dup2(file.fileno(), 2)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        most = pages * resource.getpagesize() + ADDRESSES
        resource.setrlimit(resource.RLIMIT_AS, (most, most))
        faulthandler.register(signal.SIGXCPU, file, chain=True)
        own = str(home / "case" / "own")
        os.environ |= {"HOME": own, "XDG_CACHE_HOME": own, "PATH": own}
        while True:
            case = cases.recv()
            limit = int(time.process_time() + 2 * door.seconds) + 1
            resource.setrlimit(resource.RLIMIT_CPU, (limit, resource.RLIM_INFINITY))
            word, said = _judged(door, case, home / "case", guard)
            cases.send((word, said if len(said) < 8000 else f"{said[:3000]}\n…\n{said[-5000:]}"))


def _judged(door: Door, case: Case, home: Path, guard: Guard) -> tuple[str, str]:
    outside = home / "outside"
    for folder in (home, outside, *(home / name for name in ("own", *filter(None, door.given)))):
        folder.mkdir()
    (outside / "secret").write_bytes(SECRET)
    os.chdir(home / "own")
    used, before = time.process_time(), _resident()
    tempfile.tempdir = str(home / "own")
    guard.begin(door.given)
    try:
        word, said = door.run(case, home), ""
    except Wrong as e:
        word, said = "FOUND", f"wrong: {e}"
    except CkptsyncError as e:
        word, said = f"refused {e.exit_code}", ""
        if e.exit_code not in CODES:
            word, said = "FOUND", traceback.format_exc()
    except BaseException:  # noqa: BLE001 - what is no CkptsyncError is what this looks for
        word, said = "FOUND", traceback.format_exc()
    guard.end()
    tempfile.tempdir = str(home.parent)
    seconds, peak = time.process_time() - used, _resident("VmHWM") - before
    if word != "FOUND":
        if guard.escapes:
            word, said = "FOUND", f"escaped: {guard.escapes[0]}"
        elif seconds > door.seconds:
            word, said = "FOUND", f"slow: {seconds:.1f} s of CPU"
        elif peak > door.memory:
            word, said = "FOUND", f"memory: {peak >> 20} MB"
        elif [p.name for p in outside.rglob("*")] != ["secret"] or (
            outside / "secret"
        ).read_bytes() != SECRET:
            word, said = (
                "FOUND",
                f"wrong: what lies outside has changed: {[p.name for p in outside.rglob('*')]}",
            )
    os.chdir("/")
    shutil.rmtree(home, onerror=_forced)
    return word, said


def _forced(_: object, path: str, __: object) -> None:
    os.chmod(os.path.dirname(path), 0o700)  # noqa: PTH101, PTH120
    (shutil.rmtree(path, ignore_errors=True) if os.path.isdir(path) else os.unlink(path))  # noqa: PTH108, PTH112


def _resident(what: str = "VmRSS") -> int:
    """Bytes; asking for ``VmRSS`` begins the next peak."""
    if what == "VmRSS":
        with contextlib.suppress(OSError):
            Path("/proc/self/clear_refs").write_text("5")
    found = re.search(rf"{what}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    return int(found[1]) << 10 if found else 0


class Guard:
    """An audit hook that refuses, and remembers, what a case may not do: leave its directories,
    start programs, speak to other machines.
    """

    def __init__(self, home: Path) -> None:
        self.escapes: list[str] = []
        self._home, self._given, self._is_on = str(home / "case"), tuple[str, ...](), False
        self._mine = os.getpid()
        # modules that a case imports late are Python's own writes, outside of the given directories
        sys.dont_write_bytecode = True
        self._may_read = (
            "/proc",
            "/sys",
            "/dev/null",
            "/dev/urandom",
            "/etc",
            "/usr",
            "/lib",
            str(ROOT),
            sys.prefix,
            sys.base_prefix,
            *filter(None, sys.path),
        )

    def begin(self, given: Sequence[str]) -> None:
        """A case begins."""
        self.escapes.clear()
        self._given = tuple(f"{self._home}/{name}" for name in ("own", *given))
        self._is_on = True

    def end(self) -> None:
        """It is over."""
        self._is_on = False

    def __call__(self, event: str, args: tuple[Any, ...]) -> None:
        if not self._is_on or os.getpid() != self._mine:
            return
        paths, writes = _CHANGES.get(event, (0, False))
        if event == "open":
            flags = args[2] if isinstance(args[2], int) else 0
            self._check(
                args[0], writes=bool(flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)), event=event
            )
        for path in args[1:2] if event == "os.symlink" else args[:paths]:
            self._check(path, writes=writes, event=event)
        if (
            event in ("subprocess.Popen", "os.posix_spawn", "os.system", "os.exec", "pty.spawn")
            and args[0] != sys.executable
            and "/" in os.fsdecode(args[0])
        ):
            self._refuse(f"{event} {args[:2]!r:.200}", FileNotFoundError)
        if (
            event == "socket.connect"
            and isinstance(args[1], tuple)
            and not str(args[1][0]).startswith(("127.", "::1", "localhost"))
        ):
            raise OSError(101, "no network here")
        if event == "socket.getaddrinfo" and args[0] not in ("127.0.0.1", "localhost", "::1"):
            raise OSError(101, "no network here")

    def _check(self, path: object, *, writes: bool, event: str) -> None:
        if not isinstance(path, str | bytes | os.PathLike):
            return
        text = _BY_DESCRIPTOR.sub(lambda found: os.readlink(found[0]), os.fsdecode(path))  # noqa: PTH115
        if not text.startswith("/") and ".." not in text.split("/"):
            return  # below a directory that was opened
        text = os.path.normpath(os.path.join(self._home, "own", text))  # noqa: PTH118
        allowed = (*self._given, "/dev/null", *(() if writes else self._may_read))
        # `push DIR` looks for a run's other saves in the directory above
        is_listed = event in ("os.scandir", "os.listdir")
        if (text.startswith(f"{self._home}/outside") and not is_listed) or not (
            text.startswith(allowed) or self._home.startswith(text)
        ):
            self._refuse(f"{event} {text!r:.200}", PermissionError)

    def _refuse(self, what: str, error: type[OSError]) -> None:
        where = [
            f"{f.filename}:{f.lineno} {f.name}"
            for f in traceback.extract_stack()
            if "/ckptsync/" in f.filename
        ]
        self.escapes.append(f"{what} at {where[-1] if where else '?'}")
        raise error(1, "not in this case", what)


# what is below a directory that was opened, for a call that takes no descriptor
_BY_DESCRIPTOR = re.compile(r"^/proc/self/fd/[0-9]+")
_CHANGES: Mapping[str, tuple[int, bool]] = {
    "os.remove": (1, True),
    "os.rename": (2, True),
    "os.mkdir": (1, True),
    "os.rmdir": (1, True),
    "os.link": (2, True),
    "os.symlink": (2, True),
    "os.truncate": (1, True),
    "os.chmod": (1, True),
    "os.chown": (1, True),
    "os.utime": (1, True),
    "shutil.rmtree": (1, True),
    "os.listdir": (1, False),
    "os.scandir": (1, False),
}


def command(*argv: str) -> tuple[int, str]:
    """Exit code and output (where there is none, the error) of a command.

    A wrong code, or what moves a terminal's cursor, is `Wrong`.
    """
    streams = [
        io.TextIOWrapper(io.BytesIO(), "utf-8", "surrogateescape", write_through=True)
        for _ in range(2)
    ]
    with contextlib.redirect_stdout(streams[0]), contextlib.redirect_stderr(streams[1]):
        try:
            code = ckptsync(list(argv))
        except SystemExit as e:
            code = e.code if isinstance(e.code, int) else 1
    out, err = (stream.buffer.getvalue().decode("utf-8", "surrogateescape") for stream in streams)
    if code not in (0, *CODES) and not (code == 1 and {"--check", "--strict"} & {*argv}):
        raise Wrong(f"{argv[0]}: exit code {code}: {(out + err)[-500:]}")
    if any(c in out + err for c in "\x1b\x07\x9b\r\0"):
        raise Wrong(f"{argv[0]}: prints control characters: {out + err!r:.500}")
    if SECRET.decode() in out + err:
        raise Wrong(f"{argv[0]}: shows what lies outside")
    return code, out or err


if __name__ == "__main__":
    # and not this copy of the module: the doors import that one
    sys.exit(import_module("tests.campaigns.fuzz").main())
