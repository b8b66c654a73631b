"""A program on a disk that is soon full."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest


def on_a_small_disk(tmp_path: Path, program: str) -> None:
    """Run ``program`` with a file system of 1 MiB at ``sys.argv[1]``, which goes away with the
    process.
    """
    place = tmp_path / "small"
    place.mkdir()
    alone = ["unshare", "--map-root-user", "--mount", "sh", "-e", "-c"]
    mount = 'mount -t tmpfs -o size=1m tmpfs "$1"'
    try:
        if subprocess.run(
            [*alone, mount, "sh", str(place)], capture_output=True, check=False
        ).returncode:
            pytest.skip("mounting is not allowed here, not even in a namespace of its own")
    except FileNotFoundError:
        pytest.skip("unshare is not installed")
    run = [
        *alone,
        f'{mount}; exec "$2" -c "$3" "$1"',
        "sh",
        str(place),
        sys.executable,
        "import sys\nfrom pathlib import Path\n" + textwrap.dedent(program),
    ]
    done = subprocess.run(run, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
