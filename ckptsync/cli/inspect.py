"""``ckptsync inspect``: which layouts a checkpoint has, whether it is complete, its tensors.

Several directories overlay, as they do for ``merge``.  Exit code: 10 if any source is corrupt, else the preferred source's own.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

from ckptsync.cli import output
from ckptsync.cli.locations import reached
from ckptsync.errors import CkptsyncError, Corrupt, Incomplete, Unsupported
from ckptsync.layouts import rank_names, table
from ckptsync.layouts.table import Source
from ckptsync.merge.one_save import check_saves
from ckptsync.merge.plan import Options
from ckptsync.merge.prepare import prepare
from ckptsync.model import Demands, Files, Tensor
from ckptsync.stores import trees
from ckptsync.stores.tree import Overlay, Tree
from ckptsync.stores.urls import located
from ckptsync.units import show_size

FIRST = 8  # tensors shown without --tensors


DETAILS = ""


def add_arguments(command: argparse.ArgumentParser) -> None:
    """Define the arguments."""
    command.add_argument("targets", metavar="PATH_OR_URL", nargs="+", help="a checkpoint, or a location in a store")
    command.add_argument("--tensors", action="store_true", help="every tensor, not only the first few")


def run(args: argparse.Namespace) -> int:
    """Look at the directories as one checkpoint."""
    access, locations = reached(args), [located(target) for target in args.targets]
    found = [trees.tree(location, access) for location in locations]
    overlay = Overlay(found)
    conflicts = overlay.conflicts()
    if conflicts:
        raise Corrupt(
            f"{conflicts[0]}: has another size in each directory", hint="they hold different saves: give only those of one save"
        )
    result = inspected(trees.near(overlay, locations), found)
    output.print_json({"targets": args.targets, **result}) if args.json else _show(result, None if args.tensors else FIRST)
    return int(result["exit_code"])


def inspected(files: Files, locations: Sequence[Tree] = ()) -> dict[str, Any]:
    """Everything that is known of a checkpoint; raises Unsupported, or Incomplete, where nothing is.

    ``locations``: the directories that it lies in, whose files' times say whether they are of one save.
    """
    found = table.sources(files)
    if not found:
        raise table.no_weights(files)
    sources = [_source(files, source, locations) for source in found]
    demands, trouble = _demands(files)
    preferred, rivalry = _preferred(files)
    codes = [source["exit_code"] for source in sources] + [trouble.exit_code if trouble else 0]
    return {
        "sources": sources,
        "preferred": preferred,
        "world_size": demands.world,
        "ranks": list(rank_names.ranks(files.sizes())),
        "missing": missing(files, demands.model),
        "missing_for_resume": missing(files, demands.resume),
        "notes": [*([f"what is missing cannot be told: {trouble}"] if trouble else []), *rivalry],
        "files": len(files.sizes()),
        "bytes": sum(files.sizes().values()),
        "exit_code": Corrupt.exit_code if Corrupt.exit_code in codes else sources[0]["exit_code"],
    }


def missing(files: Files, demanded: dict[str, int | None]) -> list[str]:
    """Names that are demanded and are not there, or not with their size."""
    sizes = files.sizes()
    absent = [name for name in sorted(demanded) if name not in sizes]
    return absent + [
        f"{name} ({sizes[name]} bytes, {size} wanted)"
        for name, size in sorted(demanded.items())
        if name in sizes and size is not None and sizes[name] != size
    ]


def _preferred(files: Files) -> tuple[str | None, list[str]]:
    """The source that a merge takes unasked; of several as good none, and what it would say."""
    try:
        return str(table.choose(files, None)), []
    except Unsupported as e:
        return None, [f"{e}: {e.hint}"]


def _demands(files: Files) -> tuple[Demands, CkptsyncError | None]:
    try:
        return table.demands(files), None
    except (Corrupt, Unsupported) as e:  # told beside what else is known; the exit code carries it
        return Demands(), e


def _source(files: Files, source: Source, locations: Sequence[Tree]) -> dict[str, Any]:
    """One source: its tensors, and whether a merge of it could be done (which plans it to the last byte)."""
    state, detail, code, tensors, writes = "complete", "", 0, tuple[Tensor, ...](), ""
    try:
        tensors = table.tensors(files, source)
        job = prepare(files, Options("keep", source=str(source)))
        check_saves(locations, job)
        writes = "adapter" if job.is_adapter else "model"
    except (Incomplete, Corrupt, Unsupported) as e:
        state, detail, code = type(e).__name__.lower(), str(e), e.exit_code
    return {
        "source": str(source),
        "state": state,
        "detail": detail,
        "exit_code": code,
        "writes": writes,
        "tensors": [_tensor(tensor) for tensor in tensors],
    }


def _tensor(tensor: Tensor) -> dict[str, Any]:
    stored = sorted({copy.dtype for copy in tensor.copies})
    return {"name": tensor.name, "dtype": tensor.dtype, "shape": list(tensor.shape), "stored": stored, "tied": tensor.tied}


def _show(result: dict[str, Any], first: int | None) -> None:
    print(f"files       {result['files']}, {show_size(result['bytes'])}")
    print(f"world size  {result['world_size'] if result['world_size'] is not None else 'not recorded'}")
    print(f"ranks seen  {', '.join(map(str, result['ranks'])) or 'none in the names of files'}")
    for source in result["sources"]:
        mark = "  (preferred)" if source["source"] == result["preferred"] and len(result["sources"]) > 1 else ""
        detail = f": {source['detail']}" if source["detail"] else ""
        adapter = ", a PEFT adapter" if source["writes"] == "adapter" else ""
        print(output.clean(f"source      {source['source']}  {source['state']}{adapter}{detail}{mark}"))
    _show_missing("missing", result["missing"])
    _show_missing("missing to resume", result["missing_for_resume"])
    for note in result["notes"]:
        print(output.clean(f"note        {note}"))
    for source in result["sources"]:
        _show_tensors(source, first)


def _show_missing(what: str, names: Sequence[str]) -> None:
    for name in names[:20]:
        print(output.clean(f"{what}: {name}"))
    if len(names) > 20:
        print(f"{what}: and {len(names) - 20} more")


def _show_tensors(source: dict[str, Any], first: int | None) -> None:
    tensors = source["tensors"]
    if not tensors:
        return
    print()
    print(output.clean(f"{len(tensors)} tensors in {source['source']}"))
    for line in output.aligned([_row(tensor) for tensor in tensors[:first]]):
        print(f"  {line}")
    if first is not None and len(tensors) > first:
        print(f"  … and {len(tensors) - first} more (--tensors shows all)")


def _row(tensor: dict[str, Any]) -> list[str]:
    shape = " x ".join(map(str, tensor["shape"])) or "scalar"
    stored = f"stored as {', '.join(tensor['stored'])}" if tensor["stored"] != [tensor["dtype"]] else ""
    tied = f"tied to {tensor['tied']}" if tensor["tied"] else ""
    return [tensor["name"], tensor["dtype"], shape, " ".join(filter(None, (stored, tied)))]
