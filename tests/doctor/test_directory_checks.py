"""Output directories as the worker would find them: on real disks, of real users, on mounts that
are dead, missing or lose files.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from ckptsync import mounts
from ckptsync.doctor import directory_checks
from ckptsync.doctor.directory_checks import check_output_dir, check_space
from tests.doctor.real import PROJECT, doctor, kinds, needs_namespaces, open_to_all

HASTY = (
    "import sys; from ckptsync.doctor import directory_checks; directory_checks.PATIENCE = 8.0;"
    " from ckptsync.cli.main import main; sys.exit(main(sys.argv[1:]))"
)
# nobody ever reads what it is asked
DEAD = (
    "exec {fd}<>/dev/fuse;"
    " mount -i -t fuse -o fd={fd},rootmode=40000,user_id=0,group_id=0 dead {path}"
)
needs_fuse = pytest.mark.skipif(
    not os.access("/dev/fuse", os.R_OK | os.W_OK), reason="no FUSE here"
)
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root makes files of other users")


def save(out: Path, step: int, *, size: int = 1000, at: int = 0) -> Path:
    """A checkpoint of one file."""
    folder = out / f"checkpoint-{step}"
    folder.mkdir(parents=True)
    (folder / "model.safetensors").write_bytes(b"w" * size)
    os.utime(folder / "model.safetensors", (at or step, at or step))
    return folder / "model.safetensors"


def found(path: Path) -> list[tuple[str, str]]:
    return [(f.level, f.kind) for f in check_output_dir(path) if f.kind != "no-events"]


def test_a_sound_directory_has_no_fault_and_keeps_no_trace(tmp_path: Path) -> None:
    save(tmp_path, 1)
    for has_spool in (False, True):
        if has_spool:
            (tmp_path / "_ckptsync").mkdir(mode=0o700)
        assert found(tmp_path) == []
        assert [p.name for p in tmp_path.rglob("*") if p.name != "_ckptsync"] == [
            "checkpoint-1",
            "model.safetensors",
        ]
        assert (tmp_path / "_ckptsync").is_dir() == has_spool


def test_a_spool_that_is_no_directory_is_found(tmp_path: Path) -> None:
    (tmp_path / "_ckptsync").touch()
    assert ("fail", "output-not-writable") in found(tmp_path)


def test_a_model_that_would_not_fit_twice_is_a_warning_as_long_as_nothing_was_saved(
    tmp_path: Path,
) -> None:
    (one,) = check_space(tmp_path, None, 1 << 60)
    assert (one.level, one.kind, one.exit_code) == ("warn", "disk-full", 4)
    assert "two checkpoints" in one.what


ASK = """import sys
from pathlib import Path
from ckptsync.doctor.directory_checks import check_output_dir
print(*[f.kind for f in check_output_dir(Path(sys.argv[1]))])"""


def found_by_nobody(out: Path) -> list[str]:
    """What a user who owns nothing here finds."""
    open_to_all(out)
    nobody = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups"]
    command = [*nobody, sys.executable, "-c", ASK, str(out)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=PROJECT, check=False)
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
    found = found_by_nobody(tmp_path / "out")
    assert found == ["output-not-writable", "other-user", "output-unreadable"]


def test_a_directory_that_has_gone_is_found(tmp_path: Path) -> None:
    assert found(tmp_path / "none") == [("fail", "output-unreadable")]


def planted(out: Path, setup: str) -> list[str]:
    return kinds(doctor(["--output-dir", out, "--python", sys.executable], setup))


@needs_namespaces
def test_a_spool_on_another_file_system_or_mount_is_found(tmp_path: Path) -> None:
    spool = tmp_path / "_ckptsync"
    spool.mkdir()
    for mount in (f"mount -t tmpfs tmpfs {spool}", f"mount --bind {spool} {spool}"):
        assert "links-cross" in planted(tmp_path, mount), mount


@needs_namespaces
def test_a_disk_without_room_for_two_is_found_before_a_save_and_after_one(tmp_path: Path) -> None:
    small, save = f"mount -t tmpfs -o size=300m tmpfs {tmp_path}", tmp_path / "checkpoint-1"
    assert "disk-full" not in planted(tmp_path, small)
    assert "disk-full" in planted(tmp_path, f"{small}; head -c 100m /dev/zero > {tmp_path}/x")
    written = f"mkdir {save}; head -c 120m /dev/zero > {save}/model.safetensors"
    assert "disk-full" in planted(tmp_path, f"{small}; {written}")


@needs_namespaces
@pytest.mark.parametrize(
    ("options", "kind"),
    [("size=1g,nr_inodes=50", "inodes"), ("ro", "output-not-writable")],
)
def test_a_disk_without_inodes_or_for_reading_only_is_found(
    options: str, kind: str, tmp_path: Path
) -> None:
    assert kind in planted(tmp_path, f"mount -t tmpfs -o {options} tmpfs {tmp_path}")


@pytest.mark.skipif(not shutil.which("cc"), reason="no compiler")
def test_a_file_system_without_links_is_found(tmp_path: Path) -> None:
    """As vfat, and FUSE where its program knows no links."""
    source, library, out = tmp_path / "refuse.c", tmp_path / "refuse.so", tmp_path / "out"
    refuse = "{ errno = EPERM; return -1; }"
    source.write_text(
        "#include <errno.h>\n"
        f"int link(const char *a, const char *b) {refuse}\n"
        f"int linkat(int a, const char *b, int c, const char *d, int e) {refuse}\n"
    )
    subprocess.run(["cc", "-shared", "-fPIC", "-o", str(library), str(source)], check=True)
    out.mkdir()
    words = ["--output-dir", out, "--python", sys.executable]
    assert "no-links" in kinds(doctor(words, LD_PRELOAD=str(library)))


@as_root
@pytest.mark.parametrize(
    ("owner", "mode", "kinds"),
    [(0, 0o1777, []), (12345, 0o777, ["other-user"]), (65534, 0o755, [])],
)
def test_before_the_first_save_a_directory_of_another_user_is_found_but_not_roots_for_all(
    owner: int, mode: int, kinds: list[str], tmp_path: Path
) -> None:
    out = tmp_path / "out"
    out.mkdir()
    os.chown(out, owner, owner)
    out.chmod(mode)
    assert found_by_nobody(out) == kinds


def test_room_that_only_root_may_use_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    free = {"f_bavail": 1, "f_bfree": 10**9, "f_favail": 1, "f_ffree": 10**9}
    disk = SimpleNamespace(f_blocks=10**9, f_frsize=4096, f_files=10**9, **free)
    monkeypatch.setattr(os, "statvfs", lambda _: disk)
    assert [f.kind for f in check_space(tmp_path, None)] == ["disk-full", "inodes"]


def test_a_file_system_that_tells_no_size_has_room() -> None:
    assert os.statvfs("/proc").f_blocks == 0
    assert list(check_space(Path("/proc"), None)) == []


def test_a_small_disk_of_which_nothing_is_known_may_do_and_a_full_one_does_not(
    tmp_path: Path,
) -> None:
    words = ["--output-dir", tmp_path, "--python", sys.executable]
    for size, level in (("100m", "warn"), ("512k", "fail")):
        told = doctor(words, f"mount -t tmpfs -o size={size} tmpfs {tmp_path}")
        assert [f["level"] for f in told["findings"] if f["kind"] == "disk-full"] == [level]


def test_how_nfs_is_mounted_is_looked_at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    table = tmp_path / "mountinfo"
    monkeypatch.setattr("ckptsync.mounts.TABLE", str(table))
    for options, wanted in (
        ("vers=4.2,hard", []),
        ("vers=4.2,soft", ["nfs-soft"]),
        ("hard,actimeo=600", ["late-names"]),
    ):
        table.write_text(f"40 22 0:40 / / rw - nfs4 head:/srv rw,{options}\n")
        assert [f.kind for f in directory_checks.check_mount(tmp_path)] == wanted
        assert "no-events" in [f.kind for f in check_output_dir(tmp_path)]


def test_what_stands_before_a_wildcard_is_fixed() -> None:
    assert directory_checks.fixed_part(Path("/data/*/out")) == Path("/data")
    assert directory_checks.fixed_part(Path("/data/out")) == Path("/data/out")


def test_what_answers_is_not_silent_whether_it_is_there_or_not(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    there = (tmp_path, tmp_path / "none", tmp_path / "file/x", Path("/proc/self"))
    directory_checks.check_answers(*there)


@pytest.mark.parametrize(
    ("options", "level"),
    [("defaults", "fail"), ("nofail,bind", "fail"), ("noauto,user", "warn"), ("", "fail")],
)
def test_a_mount_point_of_fstab_without_a_mount_is_found(
    options: str, level: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "fstab").write_text(
        f"# ours\nhead:/srv {tmp_path}/with\\040blank nfs4 {options} 0 0\nUUID=1 none swap sw\n"
    )
    monkeypatch.setattr(mounts, "FSTAB", tmp_path / "fstab")
    (tmp_path / "with blank/out").mkdir(parents=True)
    (tmp_path / "link").symlink_to(tmp_path / "with blank/out")
    for path in (tmp_path / "with blank/out", tmp_path / "link"):
        assert [(f.level, f.kind) for f in directory_checks.check_mount(path)] == [
            (level, "not-mounted")
        ]
    assert list(directory_checks.check_mount(tmp_path / "elsewhere")) == []


@needs_namespaces
def test_a_directory_that_is_bound_over_another_of_its_own_disk_is_mounted(tmp_path: Path) -> None:
    disk, out, table = (tmp_path / name for name in ("disk", "out", "fstab"))
    disk.mkdir()
    out.mkdir()
    table.write_text(f"{disk} {out} none bind 0 0\n")
    setup = f"mount --bind {table} /etc/fstab"
    assert "not-mounted" in planted(out, setup)
    assert "not-mounted" not in planted(out, f"{setup}; mount --bind {disk} {out}")


@needs_fuse
@needs_namespaces
def test_mounts_whose_servers_are_dead_are_a_finding_and_nothing_waits_for_them(
    tmp_path: Path,
) -> None:
    mounts = [tmp_path / name for name in ("store", "out")]
    for path in mounts:
        path.mkdir()
    config = tmp_path / "worker.yaml"
    config.write_text(
        f"store: {{url: {tmp_path}/store}}\nworker: {{runs: [{{path: {tmp_path}/out/*}}]}}\n"
    )
    words = ["doctor", "--json", "-c", str(config), "--python", sys.executable]
    isolated = ["unshare", "--map-root-user", "--mount", "sh", "-e", "-c"]
    setup = "\n".join(
        [*(DEAD.format(fd=fd, path=path) for fd, path in enumerate(mounts, 8)), 'exec "$@"']
    )
    command = [*isolated, setup, "sh", sys.executable, "-c", HASTY, *words]
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, cwd=PROJECT, timeout=300
    )
    (one,) = json.loads(done.stdout)["findings"]
    assert (one["level"], one["kind"], done.returncode) == ("fail", "no-answer", 4)
    assert all(str(path) in one["what"] for path in mounts)
