"""What is known of files that did not change is kept, and what may have changed beside them is asked again."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

from ckptsync.worker.facts import Facts, gathered, renewed
from ckptsync.worker.hooked import NOBODY
from tests.test_worker_push import ONE, lay
from tests.test_worker_saving import seen

NOTHING = Facts(later=False, mates=False, fresh=True, awaited=False, hooked=NOBODY)


def test_what_lies_beside_it_is_asked_again_and_the_files_are_not(tmp_path: Path) -> None:
    folder = lay(tmp_path, ONE)
    one = seen(tmp_path)
    first = gathered(one, NOTHING)
    assert (first.fresh, first.state is not None, first.later) == (True, True, False)
    shutil.rmtree(folder)
    gone = replace(one, hold=replace(one.hold, gone=True))
    again = renewed(first, gone, replace(NOTHING, later=True, mates=True, awaited=True, fresh=False))
    assert again == replace(first, later=True, mates=True, awaited=True, gone=True)
