"""Output directories as the worker would find them: on real disks, of real users."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from ckptsync.doctor.asking import Asked
from ckptsync.doctor.output_dirs import (
    check_inotify,
    check_output_dir,
    check_rate,
    check_space,
    full_checkpoint_size,
    last_two,
    mean_rate,
    parameters,
)
from ckptsync.scan import Found
from ckptsync.stores.timetable import parse
from ckptsync.walk import Stat
from tests.doctor_real import PROJECT, doctor, kinds, needs_namespaces, open_to_all
from tests.exhaustive import sampled
from tests.test_spool_folders import SWAP

HERE = Asked("n0", os.geteuid())
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root makes files of other users")


def save(out: Path, step: int, *, size: int = 1000, at: int = 0) -> Path:
    """A checkpoint of one file."""
    folder = out / f"checkpoint-{step}"
    folder.mkdir(parents=True)
    (folder / "model.safetensors").write_bytes(b"w" * size)
    os.utime(folder / "model.safetensors", (at or step, at or step))
    return folder / "model.safetensors"


def found(path: Path, asked: Asked = HERE) -> list[tuple[str, str]]:
    return [(f.level, f.kind) for f in check_output_dir(path, asked) if f.kind != "no-events"]


def test_a_sound_directory_has_no_fault_and_keeps_no_trace(tmp_path: Path) -> None:
    save(tmp_path, 1)
    for has_spool in (False, True):
        if has_spool:
            (tmp_path / "_ckptsync").mkdir(mode=0o700)
        assert found(tmp_path) == []
        assert [p.name for p in tmp_path.rglob("*") if p.name != "_ckptsync"] == ["checkpoint-1", "model.safetensors"]
        assert (tmp_path / "_ckptsync").is_dir() == has_spool


def test_the_newest_two_are_by_the_times_of_their_files(tmp_path: Path) -> None:
    for step, at in ((10, 300), (9, 100), (2, 200)):
        save(tmp_path, step, at=at)
    newest, before = last_two(tmp_path)
    assert newest is not None
    assert before is not None
    assert (newest.name, before.name) == ("checkpoint-10", "checkpoint-2")


def test_a_spool_that_is_no_directory_is_found(tmp_path: Path) -> None:
    (tmp_path / "_ckptsync").touch()
    assert ("fail", "output-not-writable") in found(tmp_path)


def test_saves_that_come_faster_than_they_may_be_sent_are_found(tmp_path: Path) -> None:
    save(tmp_path, 1, at=1000)
    save(tmp_path, 2, size=5000, at=1010)
    assert found(tmp_path, Asked("n0", os.geteuid(), rate=400.0)) == [("warn", "too-slow")]
    assert found(tmp_path, Asked("n0", os.geteuid(), rate=600.0)) == []


def test_a_model_that_would_not_fit_twice_is_a_warning_as_long_as_nothing_was_saved(tmp_path: Path) -> None:
    (one,) = check_space(tmp_path, None, Asked("n0", 0, expected=1 << 60))
    assert (one.level, one.kind, one.exit_code) == ("warn", "disk-full", 4)
    assert "room for two" in one.what


@as_root
def test_root_is_told_that_it_is_not_the_worker_and_lets_the_worker_try(tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    os.chown(out, 65534, 65534)
    open_to_all(out)
    assert found(out) == [("warn", "asked-as-root")]
    one = save(out, 5)
    one.chmod(0o600)
    assert found(out) == [("warn", "asked-as-root"), ("fail", "unreadable")]
    (out / "_ckptsync").mkdir()
    assert ("fail", "output-not-writable") in found(out), "a spool of root's is not the worker's"


@as_root
def test_root_gives_nothing_of_its_own_to_who_swaps_the_spool(tmp_path: Path) -> None:
    """`_ckptsync` was made, and then given away by its name, which was a link to a file of root's by then."""
    out, target = tmp_path / "out", tmp_path / "shadow"
    out.mkdir()
    os.chown(out, 65534, 65534)
    open_to_all(out)
    target.mkdir(mode=0o700)
    given: list[object] = []
    swapping = subprocess.Popen([sys.executable, "-c", SWAP, out, target])
    try:
        for _ in sampled(range(100), 4):
            found(out)
            given += [path for path in (target, *target.iterdir()) if path.stat().st_uid]
            with contextlib.suppress(FileNotFoundError):  # swapped while it was looked at
                given += [path for path in out.rglob("*") if path.lstat().st_uid == 0]
    finally:
        swapping.kill()
        swapping.wait()
    assert given == []
    assert list(target.iterdir()) == []


ASK = """import os, sys
from pathlib import Path
from ckptsync.doctor.asking import Asked
from ckptsync.doctor.output_dirs import check_output_dir
print(*[f.kind for f in check_output_dir(Path(sys.argv[1]), Asked("n0", os.geteuid()))])"""


def found_by_nobody(out: Path) -> list[str]:
    """What a user who owns nothing here finds."""
    open_to_all(out)
    nobody = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups"]
    done = subprocess.run([*nobody, sys.executable, "-c", ASK, str(out)], capture_output=True, text=True, cwd=PROJECT, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


@as_root
def test_a_file_that_only_its_owner_reads_is_found(tmp_path: Path) -> None:
    one = save(tmp_path / "out", 5)
    one.parent.chmod(0o755)
    one.chmod(0o600)
    os.chown(tmp_path / "out", 65534, 65534)
    assert found_by_nobody(tmp_path / "out") == ["unreadable"]
    one.chmod(0o644)
    is_protected = Path("/proc/sys/fs/protected_hardlinks").read_text().strip() == "1"
    assert found_by_nobody(tmp_path / "out") == (["unlinkable"] if is_protected else [])


@as_root
def test_a_directory_that_cannot_be_listed_is_found(tmp_path: Path) -> None:
    save(tmp_path / "out", 5)
    (tmp_path / "out").chmod(0o711)
    assert found_by_nobody(tmp_path / "out") == ["other-user", "output-not-writable", "output-unreadable"]


def test_a_directory_that_has_gone_is_found(tmp_path: Path) -> None:
    assert found(tmp_path / "none") == [("fail", "output-unreadable")]


def planted(out: Path, setup: str) -> list[str]:
    return kinds(doctor(["--output-dir", out, "--python", sys.executable], setup))


@needs_namespaces
def test_a_spool_on_another_file_system_is_found(tmp_path: Path) -> None:
    (tmp_path / "_ckptsync").mkdir()
    assert "links-cross" in planted(tmp_path, f"mount -t tmpfs tmpfs {tmp_path}/_ckptsync")
    assert "links-cross" in planted(tmp_path, f"mount --bind {tmp_path}/_ckptsync {tmp_path}/_ckptsync"), (
        "the same disk, and yet no link crosses"
    )


@needs_namespaces
def test_a_disk_without_room_for_two_is_found_before_a_save_and_after_one(tmp_path: Path) -> None:
    small = f"mount -t tmpfs -o size=300m tmpfs {tmp_path}"
    assert "disk-full" not in planted(tmp_path, small)
    assert "disk-full" in planted(tmp_path, f"{small}; head -c 100m /dev/zero > {tmp_path}/x")
    saved = f"{small}; mkdir {tmp_path}/checkpoint-1; head -c 120m /dev/zero > {tmp_path}/checkpoint-1/model.safetensors"
    assert "disk-full" in planted(tmp_path, saved)


@needs_namespaces
def test_a_disk_without_inodes_is_found(tmp_path: Path) -> None:
    assert "inodes" in planted(tmp_path, f"mount -t tmpfs -o size=1g,nr_inodes=50 tmpfs {tmp_path}")


@needs_namespaces
def test_a_read_only_disk_is_found(tmp_path: Path) -> None:
    assert "output-not-writable" in planted(tmp_path, f"mount -t tmpfs -o ro tmpfs {tmp_path}")


@pytest.mark.skipif(not shutil.which("cc"), reason="no compiler")
def test_a_file_system_without_links_is_found(tmp_path: Path) -> None:
    """As vfat, and FUSE where its program knows no links."""
    source, library, out = tmp_path / "refuse.c", tmp_path / "refuse.so", tmp_path / "out"
    words = "int %s { errno = EPERM; return -1; }"
    one, two = words % "link(const char *a, const char *b)", words % "linkat(int a, const char *b, int c, const char *d, int e)"
    source.write_text(f"#include <errno.h>\n{one}\n{two}\n")
    subprocess.run(["cc", "-shared", "-fPIC", "-o", str(library), str(source)], check=True)
    out.mkdir()
    assert "no-links" in kinds(doctor(["--output-dir", out, "--python", sys.executable], LD_PRELOAD=str(library)))


@as_root
@pytest.mark.parametrize(("owner", "mode", "kinds"), [(0, 0o1777, []), (12345, 0o777, ["other-user"]), (65534, 0o755, [])])
def test_before_the_first_save_a_directory_of_another_user_is_found_but_for_one_that_root_made_for_all(
    owner: int, mode: int, kinds: list[str], tmp_path: Path
) -> None:
    out = tmp_path / "out"
    out.mkdir()
    os.chown(out, owner, owner)
    out.chmod(mode)
    assert found_by_nobody(out) == kinds


@as_root
def test_root_makes_nothing_in_another_users_directory(tmp_path: Path) -> None:
    """Whatever is made there is made by a child that has become that user."""
    out = tmp_path / "out"
    save(out, 5)
    os.chown(out, 65534, 65534)
    open_to_all(out)
    program = "import sys; from pathlib import Path; from tests.test_doctor_output_dirs import found; found(Path(sys.argv[1]))"
    trace = tmp_path / "trace"
    calls = "trace=openat,mkdirat,mkdir,linkat,link,chown,fchownat,fchown,renameat2,rename,renameat,setuid"
    subprocess.run(
        ["strace", "-f", "-e", calls, "-o", str(trace), sys.executable, "-c", program, str(out)], check=True, cwd=PROJECT
    )
    lines = trace.read_text().splitlines()
    became = {line.split()[0] for line in lines if "setuid(65534)" in line}
    made = [line for line in lines if "O_CREAT" in line or "mkdir" in line or "link" in line.split("(")[0] or "chown" in line]
    assert became
    assert made
    assert [line for line in made if line.split()[0] not in became and "__pycache__" not in line and "/run/mount" not in line] == []


def test_a_file_system_that_tells_no_size_has_room() -> None:
    assert os.statvfs("/proc").f_blocks == 0
    assert list(check_space(Path("/proc"), None, HERE)) == []


def test_a_small_disk_of_which_nothing_is_known_may_do_and_a_full_one_does_not(tmp_path: Path) -> None:
    words = ["--output-dir", tmp_path, "--python", sys.executable]
    for size, level in (("100m", "warn"), ("512k", "fail")):
        told = doctor(words, f"mount -t tmpfs -o size={size} tmpfs {tmp_path}")
        assert [f["level"] for f in told["findings"] if f["kind"] == "disk-full"] == [level]


def saved(step: int, size: int, at: float) -> Found:
    return Found(f"checkpoint-{step}", "trainer", Path("/o"), (Stat("m", size, int(at * 1e9), 1, 1),), (), ())


def test_the_mean_of_a_timetable_is_over_a_week() -> None:
    assert mean_rate(parse("10MB/s")) == 10e6
    half = mean_rate(parse("00:00,1MB 12:00,3MB"))
    assert half is not None
    assert round(half) == 2_000_000
    assert mean_rate(parse("08:00,50M 19:00,off")) is mean_rate(None) is None


def test_a_save_that_takes_longer_than_the_time_between_two_is_found() -> None:
    pair = saved(2, 1000, 20.0), saved(1, 900, 10.0)
    assert [f.kind for f in check_rate(*pair, 99.0, ("n0",), "/o")] == ["too-slow"]
    assert list(check_rate(*pair, 101.0, ("n0",), "/o")) == []
    assert list(check_rate(*pair, None, ("n0",), "/o")) == []
    assert list(check_rate(pair[0], pair[0], 1.0, ("n0",), "/o")) == []


QWEN_05 = {
    "hidden_size": 896,
    "num_hidden_layers": 24,
    "vocab_size": 151936,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "intermediate_size": 4864,
    "tie_word_embeddings": True,
}
LLAMA_8 = {
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "vocab_size": 128256,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "intermediate_size": 14336,
}
MIXTRAL = {
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "vocab_size": 32000,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "intermediate_size": 14336,
    "num_local_experts": 8,
}


@pytest.mark.parametrize(("config", "billions"), [(QWEN_05, 0.494), (LLAMA_8, 8.03), (MIXTRAL, 46.7)])
def test_parameters_are_those_that_the_models_have(config: dict[str, int], billions: float) -> None:
    assert abs(parameters(config) / 1e9 / billions - 1) < 0.01


def test_a_checkpoint_takes_fourteen_bytes_for_each() -> None:
    assert full_checkpoint_size(LLAMA_8) == parameters(LLAMA_8) * 14


def test_a_model_within_another_is_the_one_that_counts_and_other_kinds_are_not_guessed() -> None:
    assert parameters({"text_config": LLAMA_8}) == parameters(LLAMA_8)
    assert parameters({"d_model": 512, "num_layers": 6}) == 0
    assert parameters({**LLAMA_8, "hidden_size": True}) == parameters({**LLAMA_8, "vocab_size": -1}) == 0


INOTIFY = "import sys; from pathlib import Path; from ckptsync.doctor.output_dirs import check_inotify\nprint([f.subject for f in check_inotify('n0', [Path(sys.argv[1])])])"


def test_a_machine_with_enough_has_no_fault(tmp_path: Path) -> None:
    assert list(check_inotify("n0", [tmp_path, tmp_path / "none"])) == []


@needs_namespaces
@pytest.mark.parametrize(("limit", "value"), [("instances", 0), ("watches", 3)])
def test_a_limit_that_is_reached_is_named(tmp_path: Path, limit: str, value: int) -> None:
    for n in range(5):
        (tmp_path / f"checkpoint-{n}").mkdir()
    set_it = f'echo {value} > /proc/sys/user/max_inotify_{limit}; exec "$@"'
    command = ["unshare", "--map-root-user", "sh", "-e", "-c", set_it, "sh", sys.executable, "-c", INOTIFY, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=PROJECT, check=False)
    assert done.stdout == f"['fs.inotify.max_user_{limit}']\n", done.stderr
