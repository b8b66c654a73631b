"""The file system that a path is on: dead, missing, or mounted in a way that loses files."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from ckptsync.doctor import mounting
from ckptsync.doctor.asking import Asked
from tests.doctor_real import PROJECT, doctor, kinds, needs_namespaces

HERE = Asked("n0", os.geteuid())
HASTY = "import sys; from ckptsync.doctor import mounting; mounting.PATIENCE = 2.0; from ckptsync.cli.main import main; sys.exit(main(sys.argv[1:]))"
DEAD = "exec 9<>/dev/fuse; mount -i -t fuse -o fd=9,rootmode=40000,user_id=0,group_id=0 dead {path}"  # nobody ever reads what it is asked
needs_fuse = pytest.mark.skipif(not os.access("/dev/fuse", os.R_OK | os.W_OK), reason="no FUSE here")


def test_how_nfs_is_mounted_is_looked_at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    table = tmp_path / "mountinfo"
    monkeypatch.setattr("ckptsync.stores.mounts.TABLE", str(table))
    for options, wanted in (("vers=4.2,hard", []), ("vers=4.2,soft", ["nfs-soft"]), ("hard,actimeo=600", ["late-names"])):
        table.write_text(f"40 22 0:40 / / rw - nfs4 head:/srv rw,{options}\n")
        assert [f.kind for f in mounting.mounted(tmp_path, HERE)] == wanted
        assert [f.kind for f in mounting.unheard(tmp_path, HERE)] == ["no-events"]


def test_what_stands_before_a_wildcard_is_fixed() -> None:
    assert mounting.fixed(Path("/data/*/out")) == Path("/data")
    assert mounting.fixed(Path("/data/out")) == Path("/data/out")


def test_what_answers_is_not_silent_whether_it_is_there_or_not(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert mounting.silent([tmp_path, tmp_path / "none", tmp_path / "file/x", Path("/proc/self")]) == []


@pytest.mark.parametrize(
    ("options", "level"), [("defaults", "fail"), ("nofail,bind", "fail"), ("noauto,user", "warn"), ("", "fail")]
)
def test_a_mount_point_of_fstab_without_a_mount_is_found(
    options: str, level: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "fstab").write_text(f"# ours\nhead:/srv {tmp_path}/with\\040blank nfs4 {options} 0 0\nUUID=1 none swap sw\n")
    monkeypatch.setattr(mounting, "FSTAB", tmp_path / "fstab")
    (tmp_path / "with blank/out").mkdir(parents=True)
    (tmp_path / "link").symlink_to(tmp_path / "with blank/out")
    for path in (tmp_path / "with blank/out", tmp_path / "link"):
        assert [(f.level, f.kind) for f in mounting.unmounted(path, HERE)] == [(level, "not-mounted")]
    assert list(mounting.unmounted(tmp_path / "elsewhere", HERE)) == []


@needs_namespaces
def test_a_directory_that_is_bound_over_another_of_its_own_disk_is_mounted(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "out").mkdir()
    (tmp_path / "fstab").write_text(f"{tmp_path}/disk {tmp_path}/out none bind 0 0\n")
    words, table = ["--output-dir", tmp_path / "out", "--python", sys.executable], f"mount --bind {tmp_path}/fstab /etc/fstab"
    assert "not-mounted" in kinds(doctor(words, table))
    assert "not-mounted" not in kinds(doctor(words, f"{table}; mount --bind {tmp_path}/disk {tmp_path}/out"))


@needs_fuse
@needs_namespaces
@pytest.mark.parametrize("what", ["store", "out"])
def test_a_mount_whose_server_is_dead_is_a_finding_and_nothing_waits_for_it(what: str, tmp_path: Path) -> None:
    for name in ("store", "out"):
        (tmp_path / name).mkdir()
    (tmp_path / "worker.yaml").write_text(f"store: {{url: {tmp_path}/store}}\nworker: {{runs: [{{path: {tmp_path}/out/*}}]}}\n")
    words = [sys.executable, "-c", HASTY, "doctor", "--json", "-c", str(tmp_path / "worker.yaml"), "--python", sys.executable]
    isolated = ["unshare", "--map-root-user", "--mount", "sh", "-e", "-c", f'{DEAD.format(path=tmp_path / what)}\nexec "$@"', "sh"]
    done = subprocess.run([*isolated, *words], capture_output=True, text=True, check=False, cwd=PROJECT, timeout=60)
    (one,) = json.loads(done.stdout)["findings"]
    assert (one["level"], one["kind"], done.returncode) == ("fail", "no-answer", 4)
    assert str(tmp_path / what) in one["what"]
