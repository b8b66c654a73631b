"""A child that is killed, hangs, or cannot start is told apart, and none of it goes unsaid."""

from __future__ import annotations

import ctypes
import json
import socket
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from ckptsync.errors import CkptsyncError, Unsupported
from ckptsync.install_commands import install_extra
from ckptsync.verifier import level_load
from ckptsync.verifier.level_load import Died, LoaderProcess

REQUEST = {"wall": 20, "cpu": 20, "memory": 1 << 30}
READ = "head -n 1 <&0 >/dev/null;"


def child(path: Path, program: str, told: list[int] | None = None) -> LoaderProcess:
    """An interpreter that does something else.

    Its standard input is the socket, which it answers, too.
    """
    file = path / "python"
    file.write_text(f"#!/bin/sh\n{program}\n")
    file.chmod(file.stat().st_mode | stat.S_IXUSR)
    return LoaderProcess((lambda n: None) if told is None else told.append, str(file))


def test_a_request_has_its_answer_and_the_child_stays(tmp_path: Path) -> None:
    with child(
        tmp_path, "echo ready x >&0; while read -r line; do echo '{\"n\": 1}' >&0; done"
    ) as asked:
        assert [asked.ask(REQUEST) for _ in range(2)] == [{"n": 1}] * 2
        assert asked.loader == "x"


@pytest.mark.parametrize(
    ("program", "fault"),
    [
        ("kill -SEGV $$", "killed by SIGSEGV"),
        ("kill -XCPU $$", "20 s of CPU time"),
        ("kill -ALRM $$", "not done in 20 s"),
        ("echo odd >&2; exit 1", "status 1: odd"),
        ("exit 0", "status 0"),
    ],
)
def test_a_death_is_told_by_its_cause_and_another_child_is_started(
    tmp_path: Path, program: str, fault: str
) -> None:
    with child(tmp_path, f"echo ready x >&0; {READ} {program}") as asked:
        for _ in range(2):
            with pytest.raises(Died, match=fault):
                asked.ask(REQUEST)


def test_a_child_that_somebody_else_kills_is_no_damage_and_another_is_started(
    tmp_path: Path,
) -> None:
    with child(tmp_path, f"echo ready x >&0; {READ} kill -KILL $$") as asked:
        for _ in range(2):
            with pytest.raises(CkptsyncError, match="killed by SIGKILL") as raised:
                asked.ask(REQUEST)
            assert "memory" in raised.value.hint


def test_a_child_that_hangs_shows_life_until_it_is_ended_and_another_is_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(level_load, "_GRACE", 0)
    monkeypatch.setattr(level_load, "_SLICE", 0.01)
    told: list[int] = []
    program = "echo begun >> $0.log; echo ready x >&0; exec sleep 100"
    with child(tmp_path, program, told) as asked:
        for _ in range(2):
            with pytest.raises(Died, match="not done in 1 s"):
                asked.ask(REQUEST | {"wall": 1})
    assert (tmp_path / "python.log").read_text() == "begun\n" * 2, "its late answer is to nobody"
    assert len(told) > 2
    assert set(told) == {0}


def test_what_never_got_ready_is_no_damage(tmp_path: Path) -> None:
    with (
        child(tmp_path, "echo no torch library >&2; exit 1") as asked,
        pytest.raises(CkptsyncError, match="no torch library") as raised,
    ):
        asked.ask(REQUEST)
    assert raised.value.exit_code == 1


def test_without_its_libraries_it_is_unsupported_and_says_what_to_install(tmp_path: Path) -> None:
    with (
        child(tmp_path, "echo nothing here >&2; exit 3") as asked,
        pytest.raises(Unsupported, match="nothing here") as raised,
    ):
        asked.ask(REQUEST)
    assert raised.value.hint == install_extra("load")


def test_a_large_request_and_a_large_answer_pass(tmp_path: Path) -> None:
    long = "x" * 300_000
    program = """exec 3>&0; echo ready x >&3; read -r line; { printf '{"n": "'; head -c 300000 \
/dev/zero | tr '\\0' x; echo '"}'; } >&3"""
    with child(tmp_path, program) as asked:
        assert asked.ask(REQUEST | {"more": long}) == {"n": long}


def test_nonsense_is_no_answer(tmp_path: Path) -> None:
    with (
        child(tmp_path, "echo ready x >&0; read -r line; echo hello >&0") as asked,
        pytest.raises(Died, match="hello"),
    ):
        asked.ask(REQUEST)


def landlock() -> bool:
    """Whether the kernel has it."""
    return ctypes.CDLL(None).syscall(444, None, 0, 1) >= 3  # type: ignore[no-any-return]


ATTEMPTS = """
import ctypes, json, os, resource, signal, socket, subprocess, sys, threading

def attempt(what):
    try:
        return str(what())
    except PermissionError:
        return "no"
    except Exception as e:
        return type(e).__name__

def connected():
    with socket.create_connection(("127.0.0.1", int(os.environ["TZ"])), 5) as found:
        return found

def raised():
    resource.setrlimit(resource.RLIMIT_AS, (resource.getrlimit(resource.RLIMIT_AS)[0] + 4096, -1))

def threaded():
    found = []
    thread = threading.Thread(target=found.append, args=(1,))
    thread.start()
    thread.join()
    return found

def own():
    with open("/proc/self/status") as status:
        return next(line.split()[1] for line in status if line.startswith("NoNewPrivs"))

TRIED = {
    "network": connected, "local socket": lambda: socket.socket(socket.AF_UNIX), "program": \
lambda: subprocess.run(["true"]), "process": os.fork,
    "limit": raised, "core": lambda: resource.getrlimit(resource.RLIMIT_CORE), "file": lambda: \
open(os.environ["TMPDIR"] + "/left", "w").write("x" * 99999),
    "other": lambda: os.kill(os.getppid(), 0), "variables of others": lambda: \
len(open(f"/proc/{os.getppid()}/environ").read()),
    "made": lambda: open(os.environ["TMPDIR"] + "/empty", "w"), "removed": lambda: \
os.unlink(os.environ["TMPDIR"] + "/f"), "cut": lambda: os.truncate(os.environ["TMPDIR"] + "/f", \
0), "mode": lambda: os.chmod(os.environ["TMPDIR"] + "/f", 0o4777), "time": lambda: \
os.utime(os.environ["TMPDIR"] + "/f"), "attribute": lambda: os.setxattr(os.environ["TMPDIR"] + \
"/f", "user.a", b"x"),
    "privileges": own, "thread": threaded, "variables": lambda: sorted(n for n in set(os.environ) \
- KNOWN if not n.startswith("LC_")),
    "descriptors": lambda: sorted(os.path.basename(os.readlink(f"/proc/self/fd/{n}")) for n in \
os.listdir("/proc/self/fd") if int(n) > 2 and os.path.exists(f"/proc/self/fd/{n}")),
}

def all():
    return json.dumps({name: attempt(what) for name, what in TRIED.items()})
"""


def test_a_child_is_shut_in_and_knows_no_secrets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Libraries stand for code that a file has brought to run: they try all of it when they are
    imported, and again when they are used.
    """
    libraries = tmp_path / "libraries"
    libraries.mkdir()
    known = {
        "PATH",
        "HOME",
        "USER",
        "LOGNAME",
        "LANG",
        "TZ",
        "TMPDIR",
        "PYTHONPATH",
        *level_load.QUIET,
    }
    (libraries / "attempts.py").write_text(ATTEMPTS.replace("KNOWN", repr(known)))
    using = "    def __init__(self, *_, **__):\n        raise ValueError(attempts.all())\n"
    for name, more in {
        "safetensors": f"class safe_open:\n{using}",
        "torch": "set_num_threads = print",
    }.items():
        (libraries / f"{name}.py").write_text(
            f"import attempts, os\n__version__ = attempts.attempt(attempts.connected)\n{more}\n"
        )
    (tmp_path / "f").write_bytes(b"x")
    with socket.create_server(("127.0.0.1", 0)) as server:
        for name, value in {
            "PYTHONPATH": str(libraries),
            "TZ": str(server.getsockname()[1]),
            "TMPDIR": str(tmp_path),
        }.items():
            monkeypatch.setenv(name, value)
        for secret in (
            "AWS_SECRET_ACCESS_KEY",
            "AWS_PROFILE",
            "CKPTSYNC_ALERTS_URLS",
            "HF_TOKEN",
            "SSH_AUTH_SOCK",
            "HTTPS_PROXY",
            "SECRET",
        ):
            monkeypatch.setenv(secret, "hunter2")
        child = LoaderProcess()
        with (tmp_path / "f").open("rb") as file, child as asked:
            answer = asked.ask(REQUEST | {"kind": "safetensors", "items": []}, [file.fileno()])
            libraries_said = asked.loader
    said = answer["fault"]
    found = json.loads(said[said.index("{") :])
    assert " no" in libraries_said, "not even while libraries are imported"
    refused = (
        "network",
        "local socket",
        "program",
        "process",
        "other",
        "mode",
        "time",
        "attribute",
        *(["variables of others", "made", "removed", "cut", "file"] if landlock() else []),
    )
    assert found["limit"] == "ValueError", "which is what `resource` makes of EPERM"
    assert {name: found[name] for name in refused} == dict.fromkeys(refused, "no")
    assert (found["core"], found["privileges"], found["thread"]) == ("(0, 0)", "1", "[1]")
    assert found["file"] in ("OSError", "no")
    assert found["descriptors"] in ("[]", "['f']")
    assert found["variables"] == "[]"


def test_what_could_not_be_had_is_said_with_what_was_found(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with child(tmp_path, "printf 'ready x\\tnot sandboxed: why\\n' >&0; read -r line") as asked:
        asked.start()
    assert asked.loader == "x (not sandboxed: why)"
    assert f"{level_load.LOAD_CHILD}: not sandboxed: why" in caplog.text


def test_a_system_without_filters_is_said_to_have_none() -> None:
    program = (
        "import platform; platform.machine = lambda: 'vax'; from ckptsync.verifier import sandbox;"
        " print(sandbox.enter())"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert done.stdout == "not sandboxed: no filter of system calls is known for vax\n"


def test_without_landlock_no_program_can_be_started_all_the_same() -> None:
    program = (
        "import os; from ckptsync.verifier import sandbox\n"
        "sandbox._give_up_privileges = sandbox._change_nothing = lambda: 'why'\n"
        "print(sandbox.enter(), sandbox.close(), flush=True)\n"
        "os.execv('/bin/echo', ['echo', 'started'])"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )
    assert done.stdout == "why why\n"
    assert "PermissionError" in done.stderr
