from __future__ import annotations

from pathlib import Path

import pytest

from ckptsync.mounts import Mount, find_mount, is_mounted, mount_of

LINES = r"""22 1 254:0 / / rw,relatime shared:1 - ext4 /dev/vda1 rw
23 22 0:21 / /proc rw,nosuid - proc proc rw
40 22 0:40 / /mnt/nfs rw,relatime shared:9 master:2 - nfs4 head:/srv rw,vers=4.2,hard,sec=sys
41 22 0:41 / /mnt/quick rw - nfs head:/srv rw,vers=3,acregmin=1,acregmax=2,acdirmin=1,acdirmax=5
42 22 0:42 / /mnt/files rw - nfs head:/srv rw,vers=3,acregmax=5
43 22 0:43 / /mnt/none rw,sync - nfs head:/srv rw,vers=3,noac
44 22 0:44 / /mnt/with\040space rw - cifs //head/share rw,vers=3.1.1,actimeo=7,closetimeo=1
45 22 0:45 / /mnt/win rw - cifs //head/share rw
46 22 0:46 / /mnt/lustre rw - lustre mgs@tcp:/scratch rw,flock
47 22 0:47 / /mnt/juice rw - fuse.juicefs JuiceFS:x rw,user_id=0
48 22 8:1 / /mnt/stick rw - fuseblk /dev/sda1 rw
49 40 8:2 / /mnt/nfs/local rw - xfs /dev/sdb rw
50 22 0:50 / /mnt/over rw - ext4 /dev/sdc rw
51 22 0:51 / /mnt/over rw - nfs4 head:/srv rw
52 22 0:52 / /mnt/slow rw - nfs head:/srv rw,vers=3,acregmax=90
""".splitlines(keepends=True)


@pytest.mark.parametrize(
    ("path", "wanted"),
    [
        ("/", Mount("ext4")),
        ("/home/me", Mount("ext4")),
        ("/mnt/nfs", Mount("nfs4", is_remote=True, late=60)),
        ("/mnt/nfs/ckpt/run", Mount("nfs4", is_remote=True, late=60)),
        ("/mnt/nfs2", Mount("ext4")),
        ("/mnt/nfs/local/ckpt", Mount("xfs")),
        ("/mnt/quick/x", Mount("nfs", is_remote=True, late=5)),
        # directories are remembered for the usual time
        ("/mnt/files", Mount("nfs", is_remote=True, late=60)),
        ("/mnt/slow", Mount("nfs", is_remote=True, late=90)),
        ("/mnt/none", Mount("nfs", is_remote=True, late=0)),
        ("/mnt/with space/a", Mount("cifs", is_remote=True, late=7)),
        ("/mnt/win", Mount("cifs", is_remote=True, late=1)),
        ("/mnt/lustre", Mount("lustre", is_remote=True, late=0)),
        ("/mnt/juice", Mount("fuse.juicefs", is_remote=True, late=60)),
        ("/mnt/stick", Mount("fuseblk")),
        ("/mnt/over/a", Mount("nfs4", is_remote=True, late=60)),  # mounted over the other one
    ],
)
def test_a_path_is_on_the_innermost_mount_and_as_late_as_its_options_say(
    path: str, wanted: Mount
) -> None:
    assert find_mount(LINES, path) == wanted


def test_lines_that_say_nothing_are_passed_over() -> None:
    assert find_mount(["", "nonsense\n", "1 2 3 - \n", "22 1 254:0 / / rw -\n"], "/a") == Mount("")
    assert find_mount(["22 1 0:5 / /a rw - nfs4 h:/a rw,acregmax=\u00b2\n"], "/a").late == 60


def test_this_machines_table_is_read() -> None:
    assert mount_of("/proc/self").kind == "proc"
    assert mount_of("/proc/self/nowhere/at/all") == Mount("proc")


def test_what_is_mounted_on_a_directory_itself_counts_and_nothing_above_or_below(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a b").mkdir()
    (tmp_path / "table").write_text(
        "22 1 254:0 / / rw - ext4 /dev/a rw\n"
        "nonsense\n"
        f"23 22 254:0 /x {tmp_path}/a\\040b rw - ext4 /dev/a rw\n"
    )
    monkeypatch.setattr("ckptsync.mounts.TABLE", str(tmp_path / "table"))
    assert is_mounted(str(tmp_path / "a b"))
    assert not is_mounted(str(tmp_path))
    assert not is_mounted(str(tmp_path / "a b/c"))
