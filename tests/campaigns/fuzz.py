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
from dataclasses import dataclass
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
SECRET = b"what lies outside is nobody's business"
FOUND = "FOUND"

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


DOORS = {"merge-structure": "fuzz_structure", "records": "fuzz_local", "argv": "fuzz_local"}
"""Door → the module that has it in its table ``DOORS``."""


def main(argv: Sequence[str] | None = None) -> int:
    """Return 0 if nothing was found."""
    parser = arguments(__doc__)
    doors = "may be repeated (default: all in turn)"
    parser.add_argument("--door", action="append", choices=DOORS, help=doors)
    seconds = "for all doors together (default: 60)"
    parser.add_argument("--seconds", type=float, default=60.0, help=seconds)
    seed = str(random.SystemRandom().randrange(1 << 32))
    parser.add_argument("--seed", default=seed, help="(default: another one each time)")
    args = parser.parse_args(argv)
    names = args.door or list(DOORS)
    print(f"seed {args.seed}, {args.seconds:.0f} s, doors {', '.join(names)}", flush=True)
    count = 0
    for name in names:
        words, findings = search(name, args.seed, args.seconds / len(names))
        count += len(findings)
        tally = ", ".join(f"{n} {word}" for word, n in words.most_common())
        print(f"{name}: {words.total()} inputs, {tally}", flush=True)
        for kind, (case, report) in findings.items():
            path = keep(name, case, report)
            print(f"FOUND {kind}, kept as {os.path.relpath(path, ROOT)}\n{report}", flush=True)
    print(f"{count} findings, seed {args.seed}")
    return 1 if count else 0


def door_of(name: str) -> Door:
    """Return a door, ready to be tried."""
    door: Door = import_module(f"tests.campaigns.{DOORS[name]}").DOORS[name]
    door.ready()
    return door


def search(
    name: str, seed: str, seconds: float
) -> tuple[Counter[str], Mapping[str, tuple[Case, str]]]:
    """Try cases of one door until the time is over.

    Returns the words that cases are counted under, and for each kind of finding the smallest case,
    with the report of what it did.
    """
    door, end = door_of(name), time.monotonic() + seconds
    words, findings = Counter[str](), dict[str, tuple[Case, str]]()
    with working("fuzz", in_memory=True) as home:
        while not words or time.monotonic() < end:
            case = door.make(random.Random(f"{seed} {name} {words.total()}"))
            word, report = judge(door, case, home.resolve())
            words[word] += 1
            if word == FOUND:
                kind = _kind(report)
                smallest = findings.setdefault(kind, (case, report))[0]
                if len(encoded(case)) < len(encoded(smallest)):
                    findings[kind] = case, report
    return words, findings


def keep(name: str, case: Case, report: str) -> Path:
    """Write a finding where `tests/test_fuzz_findings.py` tries it again."""
    path = KEPT / name / f"{digest(encoded(case).encode())[:12]}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(encoded({"door": name, "found": report[-2000:], "case": case}) + "\n")
    return path


def again(path: Path) -> str:
    """Return what is wrong with a kept finding now; empty if nothing is."""
    kept = decoded(path.read_text())
    with working("fuzz", in_memory=True) as home:
        word, report = judge(door_of(kept["door"]), kept["case"], home.resolve())
    return report if word == FOUND else ""


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


def _kind(report: str) -> str:
    """Return what findings of one cause have in common.

    That is the last line of ours in a traceback, or the words without names and numbers.
    """
    frames = re.findall(r'File "[^"]*/(ckptsync/[^"]+)", line \d+, in (\S+)', report)
    last = report.strip().rpartition("\n")[2].partition(":")[0]
    return f"{frames[-1]} {last}" if frames else re.sub(r"'[^']*'|\d+", "#", report)[:120]


def judge(door: Door, case: Case, home: Path) -> tuple[str, str]:
    """Try a case in a child; return the word to count it under, and the report of a finding.

    A child that dies, or does not come back, is a finding.
    """
    ours, theirs = Pipe(duplex=False)
    shutil.rmtree(home / "case", onerror=_forced)
    (home / "log").write_text("")
    pid = os.fork()
    if not pid:
        os.setsid()  # whatever it starts ends with it
        try:
            theirs.send(_judged(door, case, home))
        except BaseException:  # noqa: BLE001 - the campaign itself has failed
            theirs.send(("campaign", traceback.format_exc()))
        os._exit(0)
    theirs.close()
    _wait(ours, pid)
    try:
        word, report = ours.recv()
    except EOFError:
        text = (home / "log").read_text("utf-8", "replace")
        word, report = FOUND, f"the process died or did not come back\n{text[-3000:]}"
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    ours.close()
    if word == "campaign":
        raise RuntimeError(report)
    return word, report if len(report) < 8000 else f"{report[:3000]}\n…\n{report[-5000:]}"


def _wait(answer: Connection[Any, Any], pid: int) -> None:
    """Wait for a child's answer or its end; abort a child that does no work for `HANGS` seconds."""
    idle, used = 0.0, 0.0
    while not answer.poll(5.0):
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        now = sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")
        idle, used = idle + 5.0 if now - used < 0.05 else 0.0, now
        if idle >= HANGS:
            os.kill(pid, signal.SIGABRT)  # by which it says where it is


def _judged(door: Door, case: Case, home: Path) -> tuple[str, str]:
    """Try a case within limits, in this process, which ends afterwards."""
    root = home / "case"
    outside, own = root / "outside", root / "own"
    for folder in (root, outside, own, *(root / name for name in door.given if name)):
        folder.mkdir()
    (outside / "secret").write_bytes(SECRET)
    log = (home / "log").open("w")
    os.dup2(log.fileno(), 2)
    faulthandler.enable(log)
    faulthandler.register(signal.SIGXCPU, log, chain=True)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    most = pages * resource.getpagesize() + ADDRESSES
    seconds = int(time.process_time() + 2 * door.seconds) + 1
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, resource.RLIM_INFINITY))
    os.environ |= {"HOME": str(own), "XDG_CACHE_HOME": str(own), "PATH": str(own)}
    os.chdir(own)
    tempfile.tempdir = str(own)
    used, before = time.process_time(), _resident()
    sys.addaudithook(guard := Guard(root, door.given))
    try:
        word, report = door.run(case, root), ""
    except Wrong as e:
        word, report = FOUND, f"wrong: {e}"
    except BaseException as e:  # noqa: BLE001 - what is no CkptsyncError is what this looks for
        word, report = FOUND, traceback.format_exc()
        if isinstance(e, CkptsyncError) and e.exit_code in CODES:
            word, report = f"refused {e.exit_code}", ""
    guard.is_on = False
    used, peak = time.process_time() - used, _resident("VmHWM") - before
    left = {path.name: path.is_file() and path.read_bytes() for path in outside.rglob("*")}
    harms = {
        f"escaped: {guard.escapes[:1]}": guard.escapes,
        f"slow: {used:.1f} s of CPU": used > door.seconds,
        f"memory: {peak >> 20} MB": peak > MEMORY,
        f"wrong: what lies outside has changed: {[*left]}": left != {"secret": SECRET},
    }
    harm = next((harm for harm, is_done in harms.items() if is_done), "")
    return (FOUND, harm) if harm and word != FOUND else (word, report)


def _forced(_: object, path: str, error: Any) -> None:
    if not isinstance(error[1], FileNotFoundError):
        os.chmod(os.path.dirname(path), 0o700)  # noqa: PTH101, PTH120
        (shutil.rmtree(path, ignore_errors=True) if os.path.isdir(path) else os.unlink(path))  # noqa: PTH108, PTH112


def _resident(what: str = "VmRSS") -> int:
    """Bytes; asking for ``VmRSS`` begins the next peak."""
    if what == "VmRSS":
        with contextlib.suppress(OSError):
            Path("/proc/self/clear_refs").write_text("5")
    match = re.search(rf"{what}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    return int(match[1]) << 10 if match else 0


class Guard:
    """An audit hook that refuses, and remembers, what a case may not do: leave its directories,
    start programs, speak to other machines.
    """

    def __init__(self, root: Path, given: Sequence[str]) -> None:
        self.escapes: list[str] = []
        self.is_on = True
        self._root, self._process = str(root), os.getpid()
        self._given = tuple(f"{root}/{name}" for name in ("own", *given))
        # modules that a case imports late are Python's own writes, outside of the given directories
        sys.dont_write_bytecode = True

    def __call__(self, event: str, args: tuple[Any, ...]) -> None:
        if not self.is_on or os.getpid() != self._process:
            return
        if event == "open":
            flags = args[2] if isinstance(args[2], int) else 0
            is_write = bool(flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT))
            self._check(event, args[0], is_write=is_write)
        elif event in _WRITES:
            for path in args[1:2] if event == "os.symlink" else args[: _WRITES[event]]:
                self._check(event, path, is_write=True)
        elif event in _PROGRAMS and args[0] != sys.executable and "/" in os.fsdecode(args[0]):
            self._refuse(f"{event} {args[:2]!r:.200}", FileNotFoundError)
        elif event == "socket.connect" and isinstance(args[1], tuple):
            self._check_host(str(args[1][0]))
        elif event == "socket.getaddrinfo":
            self._check_host(str(args[0]))

    def _check_host(self, host: str) -> None:
        if not host.startswith(("127.", "::1", "localhost")):
            raise OSError(101, "no network here")

    def _check(self, event: str, path: object, *, is_write: bool) -> None:
        """Refuse a path that a case may not write, or has no business to read."""
        if not isinstance(path, str | bytes | os.PathLike):
            return
        text = _BY_DESCRIPTOR.sub(lambda match: os.readlink(match[0]), os.fsdecode(path))  # noqa: PTH115
        if not text.startswith("/") and ".." not in text.split("/"):
            return  # below a directory that was opened
        text = os.path.normpath(os.path.join(self._root, "own", text))  # noqa: PTH118
        is_given = text.startswith((*self._given, "/dev/null")) or self._root.startswith(text)
        is_outside = text.startswith((f"{self._root}/outside", "/outside"))
        if is_outside or (not is_given and (is_write or text.startswith(self._root))):
            self._refuse(f"{event} {text!r:.200}", PermissionError)

    def _refuse(self, what: str, error: type[OSError]) -> None:
        stack = [f for f in traceback.extract_stack() if "/ckptsync/" in f.filename]
        where = f"{stack[-1].filename}:{stack[-1].lineno} {stack[-1].name}" if stack else "?"
        self.escapes.append(f"{what} at {where}")
        raise error(1, "not in this case", what)


# what is below a directory that was opened, for a call that takes no descriptor
_BY_DESCRIPTOR = re.compile(r"^/proc/self/fd/[0-9]+")
_ON_ONE_PATH = ("os.remove", "os.mkdir", "os.rmdir", "os.symlink", "os.truncate", "os.chmod",
    "os.chown", "os.utime", "shutil.rmtree")  # fmt: skip
_WRITES = {"os.rename": 2, "os.link": 2, **dict.fromkeys(_ON_ONE_PATH, 1)}
"""Event → how many of its arguments are paths."""
_PROGRAMS = ("subprocess.Popen", "os.posix_spawn", "os.system", "os.exec", "pty.spawn")


def command(*argv: str) -> tuple[int, str]:
    """Return exit code and output (where there is none, the error) of a command.

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
