"""Inotify's limits, as a user's own namespace lets them be set."""

import subprocess
import sys
from pathlib import Path

import pytest

from ckptsync.doctor.watching import short
from tests.doctor_real import PROJECT, needs_namespaces

ASK = "import sys; from pathlib import Path; from ckptsync.doctor.watching import short\nprint([f.subject for f in short('n0', [Path(sys.argv[1])])])"


def test_a_machine_with_enough_has_no_fault(tmp_path: Path) -> None:
    assert list(short("n0", [tmp_path, tmp_path / "none"])) == []


@needs_namespaces
@pytest.mark.parametrize(("limit", "value"), [("instances", 0), ("watches", 3)])
def test_a_limit_that_is_reached_is_named(tmp_path: Path, limit: str, value: int) -> None:
    for n in range(5):
        (tmp_path / f"checkpoint-{n}").mkdir()
    set_it = f'echo {value} > /proc/sys/user/max_inotify_{limit}; exec "$@"'
    command = ["unshare", "--map-root-user", "sh", "-e", "-c", set_it, "sh", sys.executable, "-c", ASK, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=PROJECT, check=False)
    assert done.stdout == f"['fs.inotify.max_user_{limit}']\n", done.stderr
