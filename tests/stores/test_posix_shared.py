"""On XFS, in a namespace of its own: see `tests/shared_disk.py`.  Only root may mount one."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests import shared_disk

MOUNT = 'mount -o loop "$1" "$2"'


def test_a_store_shares_the_bytes_of_what_is_pushed_where_the_file_system_can(tmp_path: Path) -> None:
    image, place = tmp_path / "image", tmp_path / "shared"
    place.mkdir()
    with image.open("wb") as file:
        file.truncate(512 << 20)  # with holes: it takes up what is written
    alone = ["unshare", "--mount", "sh", "-e", "-c"]
    if not shutil.which("mkfs.xfs") or not shutil.which("unshare") or os.geteuid() != 0:
        pytest.skip("no mkfs.xfs here, or this user may mount nothing")
    subprocess.run(["mkfs.xfs", "-q", "-m", "reflink=1", str(image)], capture_output=True, check=True)
    if subprocess.run([*alone, f'{MOUNT}; umount "$2"', "sh", str(image), str(place)], capture_output=True, check=False).returncode:
        pytest.skip("a loop device cannot be mounted here")
    tests = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", f"--basetemp={tmp_path}/inside", str(shared_disk.__file__)]
    run = [*alone, f'{MOUNT}; shift 2; exec "$@"', "sh", str(image), str(place), *tests]
    done = subprocess.run(run, capture_output=True, text=True, check=False, env=os.environ | {"CKPTSYNC_TEST_MOUNTED": str(place)})
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-1000:]
