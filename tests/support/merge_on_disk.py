"""A merge on local disks, as `ckptsync merge` does it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from ckptsync.merger.destination import check_free, merge
from ckptsync.merger.engine import MergeResult
from ckptsync.merger.inputs import MergeRequest, PreparedMerge, open_sources
from ckptsync.merger.plan import MergeOptions
from ckptsync.stores.opening import Access


def prepare_local(
    sources: Sequence[Path],
    destination: Path,
    options: MergeOptions,
    config_from: Path | None = None,
    *,
    use_times: bool = True,
) -> PreparedMerge:
    request = MergeRequest(sources, destination, options, config_from)
    check_free(request, Access())
    return open_sources(request, Access(), use_times=use_times)


def merge_prepared(
    prepared: PreparedMerge, progress: Callable[[int, int], None] | None = None
) -> MergeResult:
    return merge(prepared, Access(), progress)


def merge_local(
    sources: Sequence[Path],
    destination: Path,
    options: MergeOptions,
    config_from: Path | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> MergeResult:
    """Consolidate the checkpoint that ``sources``, one directory a node, are parts of."""
    return merge_prepared(prepare_local(sources, destination, options, config_from), progress)
