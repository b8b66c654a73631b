"""Run pytest, and run what failed once more, alone: `python -m tests.support.run_again ARGUMENTS`.

Thousands of tests start processes and servers on whatever machine they get, so one of them
may fail by chance.  A fault that is there each time fails twice; a test that fails only beside
others is named at the end and in `FAILED_ONCE`, which `.ci/run` prints last: it is to be mended.
More than `MOST` failures are no chance, and are not run again.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

MOST = 3
FAILED_ONCE = Path("build/failed-once.txt")
_CACHE = Path("build/pytest-cache")


def main(arguments: list[str]) -> int:
    """Return pytest's exit code; 0 if what failed passed when it was run again."""
    shutil.rmtree(_CACHE, ignore_errors=True)
    pytest = [sys.executable, "-m", "pytest", "-o", f"cache_dir={_CACHE}"]
    code = subprocess.call([*pytest, *arguments])
    failed = _failed()
    if code != 1 or not 0 < len(failed) <= MOST:
        return code
    print(f"{len(failed)} failed; again, without other tests beside:", flush=True)
    # -n 0: the last -n counts, and none is one process
    code = subprocess.call([*pytest, *arguments, "-n", "0", "--last-failed", "--lfnf=none"])
    if code == 0:
        lines = "".join(f"failed once, passed alone: {test}\n" for test in failed)
        print(lines, end="")
        with FAILED_ONCE.open("a") as file:
            file.write(lines)
    return code


def _failed() -> list[str]:
    """Return the names of the tests that failed in the last run; none if pytest noted none."""
    path = _CACHE / "v/cache/lastfailed"
    return sorted(json.loads(path.read_text())) if path.exists() else []


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
