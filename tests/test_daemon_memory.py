"""Memory that is given back."""

from __future__ import annotations

import subprocess
import sys

import pytest

PROBE = """
import ctypes, sys
from ckptsync.daemon.memory import give_back

def resident():
    return int(next(line for line in open("/proc/self/status") if line.startswith("VmRSS")).split()[1]) * 1024

if not hasattr(ctypes.CDLL(None), "malloc_trim"):
    sys.exit(77)
kept = [ctypes.create_string_buffer(b"x" * 100_000, 100_000) for _ in range(400)]
kept = kept[::10]  # the heap cannot shrink by itself below what is still used
before = resident()
give_back()
print(before - resident())
"""


def test_what_was_freed_below_what_is_still_used_goes_back_to_the_system() -> None:
    done = subprocess.run([sys.executable, "-c", PROBE], capture_output=True, text=True, check=False)
    if done.returncode == 77:
        pytest.skip("no malloc_trim here")
    assert int(done.stdout) > 30_000_000
