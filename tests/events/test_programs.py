"""An event's command, and its POST: limits, output, metrics, secrets; each really run."""

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ckptsync.events.definitions import Definition
from ckptsync.events.programs import ProgramEnd, post, read_metrics, run_command
from tests.support.ports import unused_port
from tests.support.waiting import until
from tests.support.webhook_server import hook


def run(
    script: str, *words: str, timeout: float = 600.0, data: bytes = b"{}", **more: object
) -> ProgramEnd:
    event = Definition("e", ("verified",), timeout=timeout, **more)  # type: ignore[arg-type]
    command = ["/bin/sh", "-c", script, "sh", *words]
    return run_command(event, command, data, {"CKPTSYNC_STORAGE_OPTIONS": "key"}, lambda: None)


@pytest.mark.parametrize(
    ("script", "end"),
    [
        ("exit 0", ProgramEnd()),
        ("""echo '{"eval/acc": 0.5, "n": 3}'""", ProgramEnd(metrics={"eval/acc": 0.5, "n": 3.0})),
        ("""printf '{"a": 1}'""", ProgramEnd(metrics={"a": 1.0})),
        ("""echo '{"a": 1}'; echo; echo""", ProgramEnd(metrics={"a": 1.0})),
        ("""echo '{"a": 1}'; echo done""", ProgramEnd()),
        ("""echo '{"a": NaN}'""", ProgramEnd(note="metrics refused: a is nan")),
        ("""echo '{"a": 1}'; echo bad >&2; exit 3""", ProgramEnd("ended with status 3: bad")),
        ("kill -9 $$", ProgramEnd("was killed by SIGKILL")),
        ("exec /nowhere/x", None),
        ("head -c 300000 /dev/urandom; exit 0", ProgramEnd()),
        ("cat; true", ProgramEnd(metrics={"step": 7.0})),
    ],
)
def test_how_a_command_ends(script: str, end: ProgramEnd | None) -> None:
    got = run(script, data=b'{"step": 7}\n')
    assert got == end if end else "127" in got.error


def test_a_command_that_hangs_or_floods_is_killed_in_time_with_all_that_it_started(
    tmp_path: Path,
) -> None:
    pids = tmp_path / "pids"
    for script in ("sleep 600 & echo $! $$ >$1; wait", "yes >&2 & echo $! $$ >$1; exec yes"):
        got = run(script, str(pids), timeout=1.0)
        assert got.error.startswith("took longer than 1s and was killed")
        began = pids.read_text().split() if pids.exists() else []  # on a busy machine perhaps not
        assert until(lambda: not any(map(is_running, began)), 60)  # noqa: B023 - called here


def test_a_command_whose_head_must_stop_is_killed(tmp_path: Path) -> None:
    pid = tmp_path / "pid"

    def beat() -> None:
        if pid.exists() and pid.read_text():
            raise KeyboardInterrupt

    event = Definition("e", ("verified",))
    with pytest.raises(KeyboardInterrupt):
        run_command(event, ["/bin/sh", "-c", f"echo $$ >{pid}; exec sleep 600"], b"", {}, beat)
    assert until(lambda: not is_running(pid.read_text().strip()), 60)


def is_running(pid: str) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_what_a_command_leaves_running_is_killed_when_it_ends(tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    start = time.monotonic()
    got = run("""sleep 600 & echo $! >$1; echo '{"a": 1}'""", str(pids))
    assert got == ProgramEnd(metrics={"a": 1.0})
    assert until(lambda: not is_running(pids.read_text().strip()), 60)
    assert time.monotonic() - start < 300


def test_the_environment_has_no_secret_but_where_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "hidden")
    monkeypatch.setenv("HF_TOKEN", "token")
    monkeypatch.setenv("NOTIFY_SOCKET", "the head's own")
    script = """printf '{"aws": %d, "options": %d, "hf": %d, "own": %d, "path": %d, "python": %d,
        "systemd": %d}' \
        ${AWS_SECRET_ACCESS_KEY:+1}0 ${CKPTSYNC_STORAGE_OPTIONS:+1}0 ${HF_TOKEN:+1}0 ${OWN:+1}0 \
        ${PATH:+1}0 ${PYTHONPATH:+1}0 ${NOTIFY_SOCKET:+1}0 | tr -d '\n'"""
    monkeypatch.delenv("PYTHONPATH", raising=False)

    def told(**more: object) -> dict[str, float]:
        return {name: value / 10 for name, value in run(script, **more).metrics.items()}  # type: ignore[arg-type]

    none = {"aws": 0, "options": 0, "hf": 0, "own": 0, "path": 1, "python": 0, "systemd": 0}
    assert told() == none
    assert told(environment={"HF_TOKEN": None, "OWN": "x"}) == none | {"hf": 1, "own": 1}
    assert told(secrets=True) == none | {"aws": 1, "options": 1, "hf": 1}


@pytest.mark.parametrize(
    ("line", "note"),
    [
        (b"no json", ""),
        (b"[1]", ""),
        (b"{", ""),
        (b'{"a": true}', "metrics refused: a is no number"),
        (b'{"msg": "done"}', "metrics refused: msg is no number"),
        (b'{"a": -Infinity}', "metrics refused: a is -inf"),
        (b'{"a": 1e999}', "metrics refused: a is inf"),
        (b'{"a b": 1}', "metrics refused: 'a b' is not a metric's name"),
        (b'{"": 1}', "metrics refused: '' is not a metric's name"),
        (b'{"' + b"a" * 101 + b'": 1}', "metrics refused: 'aaa"),
        (
            json.dumps({f"m{i}": i for i in range(51)}).encode(),
            "metrics refused: 51, at most 50 are",
        ),
        (b"{" * 100_000, ""),
        (b'{"a": 1' + b"0" * 400 + b"}", "metrics refused: a is 10"),  # no float
        (b'{"a": ' + b"9" * 5000 + b"}", ""),
    ],
)
def test_metrics_that_are_refused(line: bytes, note: str) -> None:
    metrics, why = read_metrics(line)
    assert (metrics, bool(why)) == ({}, bool(note))
    assert why.startswith(note)


def test_as_many_metrics_with_as_long_names_are_kept() -> None:
    metrics = {f"{n:0100}": float(n) for n in range(50)}
    assert read_metrics(json.dumps(metrics).encode()) == (metrics, "")


def test_a_post_is_done_by_2xx_alone_and_no_redirection_is_followed() -> None:
    def ask(url: str) -> str:
        event = Definition("e", ("damaged",), url=url, timeout=60.0)
        return post(event, b'{"x": 1}', lambda: None).error

    for answer, error in ((204, ""), (500, "HTTP status 500"), (302, "HTTP status 302")):
        with hook(answer) as server:
            assert ask(f"{server.url}/x?token=hidden") == error
            path, headers, document = server.taken.get(timeout=60)
            assert (path, document) == ("/x?token=hidden", {"x": 1})
            assert {k.lower(): v for k, v in headers.items()}["content-type"] == "application/json"
    said = ask(f"http://127.0.0.1:{unused_port()}/hidden")
    assert said.startswith("no answer")
    assert "hidden" not in said


def test_the_command_dies_with_the_process_that_runs_it(tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    code = "import sys; from tests.events.test_programs import run; run(*sys.argv[1:])"
    words = [
        sys.executable,
        "-c",
        code,
        "echo $$ >$1.part; mv $1.part $1; exec sleep 600",
        str(pids),
    ]
    with subprocess.Popen(words, cwd=Path(__file__).parents[2]) as running:
        assert until(pids.exists, 60)
        running.kill()
    assert until(lambda: not is_running(pids.read_text().strip()), 60)
