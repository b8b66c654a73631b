"""What the units say of a configuration."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from ckptsync.cli.systemd_units import (
    MARK,
    Program,
    copied,
    drop_in,
    for_user,
    paths,
    quoted,
)
from ckptsync.config.loading import read
from ckptsync.config.schema import Config
from ckptsync.errors import ConfigError

TEMPLATE = (Path(__file__).parents[2] / "systemd/ckptsync-worker@.service").read_text()
PROGRAM = Program(("/opt/c/bin/ckptsync",), "/etc/ckptsync/t.yaml")
needs_systemd = pytest.mark.skipif(
    not shutil.which("systemd-analyze"), reason="systemd-analyze is not installed"
)


def config(
    *runs: str, store: str = "/mnt/store", roles: str = "[worker]", more: str = ""
) -> Config:
    listed = ", ".join(f'"{run}"' for run in runs)
    return read(
        f"roles: {roles}\nstore: {{url: '{store}'}}\nworker: {{runs: [{listed}]}}\n{more}",
        "t.yaml",
        {},
    )


def needed(*runs: str, store: str = "s3://bucket") -> list[str]:
    return paths(config(*runs, store=store), ["/home/ann"])[0]


@pytest.mark.parametrize(
    ("run", "root"),
    [
        ("/data/out/*", "/data/out"),
        ("/data/*/out", "/data"),
        ("/data/jobs/job[0-9]/x/out", "/data/jobs"),
        ("/data/special/out", "/data/special"),
        ("/home/ann/runs/*", "/home/ann/runs"),
        ("/mnt/*/out", "/mnt"),
        ("/tmp/ray/session_*/artifacts/*", "/tmp"),
        ("/tmp/ray/session_latest/artifacts/*", "/tmp"),
        ("/tmp/ray/out", "/tmp"),
    ],
)
def test_what_holds_an_output_directory_is_writable_so_that_it_may_come_and_go(
    run: str, root: str
) -> None:
    assert needed(run) == [root]


def test_a_home_is_not_opened_for_one_output_directory_and_it_is_said_what_that_means() -> None:
    needed, notes = paths(config("/home/ann/out"), ["/home/ann"])
    assert needed == ["/home/ann/out", "/mnt/store"]
    assert "restart the service" in notes[0]


@pytest.mark.parametrize("run", ["/*/out", "/home/*/out", "/home/ann/*"])
def test_nobody_s_whole_home_and_no_whole_system_is_made_writable(run: str) -> None:
    with pytest.raises(ConfigError, match="would be writable"):
        needed(run)


def test_a_path_within_another_one_is_no_mount_of_its_own() -> None:
    assert needed("/data/*/out", "/data/out/*", "/database/*", store="/data/store") == [
        "/data",
        "/database",
    ]


def test_a_head_writes_to_the_store_alone() -> None:
    assert paths(config(roles="[head]"))[0] == ["/mnt/store"]


def test_a_store_that_is_a_path_is_mounted_and_writable() -> None:
    text = drop_in(config("/data/out/*"), PROGRAM, ("/data/out", "/mnt/store"))
    assert "RequiresMountsFor=/data/out /mnt/store\n" in text
    assert "ReadWritePaths=/data/out /mnt/store\n" in text
    assert "Network" not in text


@pytest.mark.parametrize(
    ("roles", "store", "more", "is_open"),
    [
        ("[worker]", "s3://b", "", True),
        ("[worker]", "/mnt/store", "metrics: {listen: '127.0.0.1:9464'}", True),
        ("[head]", "/mnt/store", "alerts: {webhook: 'https://hooks.example/x'}", True),
        ("[verifier]", "/mnt/store", "alerts: {command: [/usr/bin/page]}", True),
        ("[worker]", "/mnt/store", "alerts: {webhook: 'https://hooks.example/x'}", False),
    ],
)
def test_a_service_that_needs_the_network_gets_it(
    roles: str, store: str, more: str, *, is_open: bool
) -> None:
    text = drop_in(config("/data/out/*", store=store, roles=roles, more=more), PROGRAM, ())
    assert ("PrivateNetwork=no\nRestrictAddressFamilies=AF_INET AF_INET6\n" in text) == is_open
    assert "hooks.example" not in text


def test_no_option_of_a_store_gets_into_a_unit() -> None:
    one = read(
        "store: {url: s3://b, options: {secret: PLANTED}}\nworker: {runs: [/data/out/*]}\n",
        "t.yaml",
        {},
    )
    assert "PLANTED" not in drop_in(one, PROGRAM, ("/data/out",))


def test_the_configuration_s_memory_and_threads_fit_into_the_unit_s() -> None:
    text = drop_in(config("/d/o/*", more="limits: {memory: 1GiB, threads: 64}"), PROGRAM, ())
    assert "MemoryHigh=1536M\nMemoryMax=1792M\nTasksMax=512\n" in text


def test_a_worker_that_verifies_too_has_room_for_torch() -> None:
    text = drop_in(config("/d/o/*", roles="[worker, head, verifier]"), PROGRAM, ())
    assert "MemoryMax=4096M" in text
    assert "MemoryDenyWriteExecute=no" in text


@pytest.mark.parametrize(
    ("python", "line", "is_there"),
    [
        ("/home/ann/.local/share/uv/python/bin/python3", "ProtectHome=read-only", True),
        ("/usr/bin/python3", "ProtectHome=read-only", False),
        ("/tmp/venv/bin/python", "PrivateTmp=no", True),
        ("/opt/tmp/bin/python", "PrivateTmp=no", False),
    ],
)
def test_a_head_may_see_where_its_program_lies(python: str, line: str, *, is_there: bool) -> None:
    program = Program(PROGRAM.caller, PROGRAM.source, (python,))
    assert (line in drop_in(config(roles="[head]"), program, ())) == is_there


def test_the_copy_of_a_unit_has_no_paths_of_its_own() -> None:
    text = copied(TEMPLATE)
    assert MARK in text.splitlines()[0]
    assert not re.search("^(RequiresMountsFor|ReadWritePaths)=", text, re.MULTILINE)


@pytest.mark.parametrize(
    ("word", "text"),
    [
        ("/data/out", "/data/out"),
        ("/my data", '"/my data"'),
        ("/100%", "/100%%"),
        ('/a"b\\c', '"/a\\"b\\\\c"'),
        ("", '""'),
    ],
)
def test_a_path_is_one_word_of_a_unit(word: str, text: str) -> None:
    assert quoted(word) == text


def test_the_file_of_variables_is_the_one_setting_that_systemd_does_not_unquote() -> None:
    text = drop_in(config("/d/o/*"), Program(PROGRAM.caller, "/my 100% conf/t.yaml"), ())
    assert "\nEnvironmentFile=-/my 100%% conf/t.env\n" in text


def test_no_path_ends_a_line_of_a_unit() -> None:
    with pytest.raises(ConfigError, match="control character"):
        quoted("/data\nUser=root")


def test_a_user_s_own_unit_asks_for_nothing_that_only_root_has() -> None:
    text = for_user(TEMPLATE, PROGRAM)
    only_roots = "User= Protect Private CapabilityBoundingSet LoadCredential StateDirectory"
    assert [key for key in f"{only_roots} %i TMPDIR".split() if key in text] == []
    assert "WatchdogSec=110" in text
    assert text.endswith("WantedBy=default.target\n")


@needs_systemd
def test_systemd_understands_what_is_written(tmp_path: Path) -> None:
    unit = tmp_path / "w@.service"
    unit.write_text(copied(TEMPLATE).replace("/opt/ckptsync/bin/ckptsync", "/bin/true"))
    odd = config(
        "/data/my 100% $out/*",
        store="sftp://h/x",
        roles="[worker, head]",
        more="limits: {memory: 1GiB}",
    )
    (tmp_path / "w@.service.d").mkdir()
    (tmp_path / "w@.service.d/10.conf").write_text(
        drop_in(odd, Program(("/bin/true",), "/etc/my 100% $conf/té.yaml"), paths(odd)[0])
    )
    done = subprocess.run(
        ["systemd-analyze", "verify", "--recursive-errors=no", str(unit)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout + done.stderr) == (0, "")
