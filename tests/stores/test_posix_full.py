"""The conformance suite, and more, on a file system of 64 MB, in a namespace of its own: see `tests/small_disk.py`."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests import small_disk

MOUNT = f'mount -t tmpfs -o size={small_disk.SIZE} tmpfs "$1"'


def test_a_store_on_a_disk_of_64_mb_keeps_the_contract_and_what_it_acknowledged(tmp_path: Path) -> None:
    place = tmp_path / "small"
    place.mkdir()
    alone = ["unshare", "--map-root-user", "--mount", "sh", "-e", "-c"]
    if (
        not shutil.which("unshare")
        or subprocess.run([*alone, MOUNT, "sh", str(place)], capture_output=True, check=False).returncode
    ):
        pytest.skip("mounting is not allowed here, not even in a namespace of its own")
    tests = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", f"--basetemp={tmp_path}/inside", str(small_disk.__file__)]
    run = [*alone, f'{MOUNT}; shift; exec "$@"', "sh", str(place), *tests]
    done = subprocess.run(run, capture_output=True, text=True, check=False, env=os.environ | {"CKPTSYNC_TEST_MOUNTED": str(place)})
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-1000:]
