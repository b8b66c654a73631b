"""Let attacks loose on inspect, merge and verify: ``python -m tests.hostile.running DIRECTORY``
prints a line of JSON for each.

Every try is a process of its own (a fork of this one, so that it costs milliseconds), which may
take `MEMORY` and `SECONDS`.
"""

from __future__ import annotations

import gc
import json
import os
import resource
import shutil
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from ckptsync.errors import CkptsyncError
from ckptsync.merger.inspection import inspect_checkpoint
from ckptsync.merger.plan import MergeOptions
from ckptsync.stores.checkpoint_files import DirectoryFiles
from ckptsync.verifier.verification import VerifyOptions, verify_directory
from ckptsync.verifier.write_reports import exit_code
from tests.hostile import headers, names, pickles, zips
from tests.hostile.attack import Attack
from tests.support.exhaustive import sampled
from tests.support.merge_on_disk import merge_local

MEMORY = 512 << 20
"""Bytes of address space beyond what the program itself has when it starts."""
SECONDS = 2


def inspect(root: Path, _: Path) -> int:
    return inspect_checkpoint(DirectoryFiles(str(root))).exit_code


def merge(root: Path, destination: Path) -> int:
    merge_local([root], destination, MergeOptions())
    return 0


def verify(root: Path, _: Path) -> int:
    return exit_code(
        [verify_directory(DirectoryFiles(str(root)), "hostile", VerifyOptions("parse"))]
    )


WAYS: dict[str, Callable[[Path, Path], int]] = {
    "inspect": inspect,
    "merge": merge,
    "verify": verify,
}


def main(directory: str) -> None:
    work = Path(directory)
    gc.freeze()  # else each fork's collector copies the pages of all that was imported
    builders = {
        "pickles": pickles.attacks,
        "zips": zips.attacks,
        "headers": headers.attacks,
        "names": names.attacks,
    }
    for kind, attacks in builders.items():
        for i, attack in sampled(enumerate(attacks(str(work / "canary"))), 8):
            root = work / f"{kind}-{i}"
            root.mkdir()
            attack.build(root)
            for told in _tried(attack, root, work, sampled(WAYS, len(WAYS), i)):
                print(json.dumps({"kind": kind, **told}), flush=True)
            shutil.rmtree(root)


def _tried(attack: Attack, root: Path, work: Path, ways: list[str]) -> Iterator[dict[str, Any]]:
    for way in ways:
        function = WAYS[way]
        destination = work / "merged"
        before = _spent()
        code, said = _alone(
            lambda function=function, destination=destination: function(root, destination)  # type: ignore[misc]
        )
        yield {
            "name": attack.name,
            "way": way,
            "code": code,
            "said": said,
            "seconds": _spent() - before,
            "right": list(attack.codes),
            "harmless": attack.harmless,
            "canary": (work / "canary").exists(),
            "wrote": sorted(
                p.name
                for p in work.iterdir()
                if p not in (root, work / "canary") and not (code == 0 and p == destination)
            ),
        }
        shutil.rmtree(destination, ignore_errors=True)


def _spent() -> float:
    """Seconds of CPU of all tries so far: how long a try waits for a busy machine is not its
    doing.
    """
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _alone(function: Callable[[], int]) -> tuple[int, str]:
    """Exit status (negative for a signal) and what was said."""
    out, into = os.pipe()
    pid = os.fork()
    if not pid:
        os.close(out)
        _limit()
        code, said = _answer(function)
        os.write(into, said.encode("utf-8", "replace")[:4000])
        os._exit(code)
    os.close(into)
    with os.fdopen(out, "rb") as pipe:
        said = pipe.read().decode("utf-8", "replace")
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), said


def _answer(function: Callable[[], int]) -> tuple[int, str]:
    try:
        return function(), ""
    except CkptsyncError as e:
        return e.exit_code, str(e)
    except BaseException as e:  # noqa: BLE001 - what is no CkptsyncError is what this looks for
        return 99, f"{type(e).__name__}: {e}"[:1000]


def _limit() -> None:
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    most = pages * resource.getpagesize() + MEMORY
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_CPU, (3 * SECONDS, 3 * SECONDS))  # ends what would never end
    signal.alarm(300)  # and what would wait for ever


if __name__ == "__main__":
    main(*sys.argv[1:])
