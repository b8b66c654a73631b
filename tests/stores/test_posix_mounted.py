"""The conformance suite, and more, on file systems that are mounted for it in a namespace of its
own.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from tests.support import cloning_disk, small_disk


def run_mounted(tests: ModuleType, tmp_path: Path, place: Path, mount: str, *args: str) -> None:
    """Run ``tests`` in a namespace in which the shell's ``mount`` has mounted ``place``.

    Skip where that is refused.
    """
    maps = [] if os.geteuid() == 0 else ["--map-root-user"]
    alone = ["unshare", *maps, "--mount", "sh", "-e", "-c"]
    tried = [*alone, f"{mount}; umount {place}", "sh", *args]
    if (
        not shutil.which("unshare")
        or subprocess.run(tried, capture_output=True, check=False).returncode
    ):
        pytest.skip("mounting is not allowed here, not even in a namespace of its own")
    inside = [
        "-m",
        "pytest",
        "-p",
        "no:cacheprovider",
        f"--basetemp={tmp_path}/inside",
        str(tests.__file__),
    ]
    run = [*alone, f'{mount}; shift {len(args)}; exec "$@"', "sh", *args, sys.executable, *inside]
    environment = os.environ | {"CKPTSYNC_TEST_MOUNTED": str(place)}
    done = subprocess.run(run, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-1000:]


def test_a_store_on_a_disk_of_64_mb_keeps_the_contract_and_what_it_acknowledged(
    tmp_path: Path,
) -> None:
    place = tmp_path / "small"
    place.mkdir()
    run_mounted(
        small_disk,
        tmp_path,
        place,
        f'mount -t tmpfs -o size={small_disk.SIZE} tmpfs "$1"',
        str(place),
    )


def test_a_store_shares_the_bytes_of_what_is_pushed_where_the_file_system_can(
    tmp_path: Path,
) -> None:
    image, place = tmp_path / "image", tmp_path / "shared"
    place.mkdir()
    with image.open("wb") as file:
        file.truncate(512 << 20)  # with holes: it takes up what is written
    if not shutil.which("mkfs.xfs") or os.geteuid() != 0:
        pytest.skip("no mkfs.xfs here, or this user may mount nothing")
    subprocess.run(
        ["mkfs.xfs", "-q", "-m", "reflink=1", str(image)], capture_output=True, check=True
    )
    run_mounted(cloning_disk, tmp_path, place, 'mount -o loop "$1" "$2"', str(image), str(place))
