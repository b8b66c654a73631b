"""``ckptsync inspect``: show a checkpoint's layouts, tensors, and whether it is complete.

Before a merge a user wants to know which weights a checkpoint holds, and what is missing.  Several
directories count as the parts of one save, as for ``merge``.  The exit code is 10 if any source of
weights is corrupt, else that of the source that a merge would take.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from ckptsync.cli import output
from ckptsync.cli.arguments import access_of
from ckptsync.cli.output import say
from ckptsync.errors import ConfigError, Corrupt, Incomplete, Unsupported
from ckptsync.layouts import registry
from ckptsync.merger.inspection import inspect_checkpoint
from ckptsync.merger.readers import open_reader
from ckptsync.near_names import near_names
from ckptsync.quantities import show_size
from ckptsync.stores import path_or_url
from ckptsync.stores.checkpoint_files import Overlay
from ckptsync.stores.urls import located
from ckptsync.tensors import Files

FIRST = 8  # tensors shown without --tensors


def add_arguments(command: argparse.ArgumentParser) -> None:
    """Define the command's arguments."""
    command.add_argument(
        "targets",
        metavar="PATH",
        nargs="+",
        help="a checkpoint, or one in a store; a path or a URL",
    )
    command.add_argument(
        "--tensors", action="store_true", help="show every tensor, not only the first few"
    )


def run(args: argparse.Namespace) -> int:
    """Inspect the directories as one checkpoint, and print the result; return its exit code.

    Raises Corrupt if they hold different saves, Unsupported or Incomplete if there are no weights,
    ConfigError, StoreError.
    """
    access, locations = access_of(args), [located(target) for target in args.targets]
    check_exists(args.targets)
    trees = [path_or_url.list_tree(location, access) for location in locations]
    overlay = Overlay(trees)
    if conflicts := overlay.conflicts():
        hint = "the directories hold different saves: name only those of one save"
        raise Corrupt(f"{conflicts[0]}: has another size in each directory", hint=hint)
    nearest = _nearest_inside(args.targets, overlay)
    try:
        inspection = inspect_checkpoint(open_reader(overlay, trees), trees)
    except (Unsupported, Incomplete) as e:
        e.hint = nearest or e.hint
        raise
    if nearest and inspection.preferred is None:
        inspection = replace(inspection, notes=(*inspection.notes, nearest))
    result = asdict(inspection)
    if args.json:
        output.print_json({"targets": args.targets, **result})
    else:
        _show(result, None if args.tensors else FIRST)
    return int(result["exit_code"])


def check_exists(targets: Sequence[str]) -> None:
    """Raise ConfigError for a path that does not exist, if a similar name lies beside it.

    A path without one passes: what opens it raises.
    """
    for path in [Path(target) for target in targets if "://" not in target]:
        if not path.exists() and path.parent.is_dir():
            beside = near_names(path.name, (entry.name for entry in path.parent.iterdir()))
            if beside:
                hint = f"did you mean {path.parent / beside[0]}?"
                raise ConfigError(f"{path}: no such directory", hint=hint)


def _nearest_inside(targets: Sequence[str], files: Files) -> str:
    """Return a hint at the checkpoint with the greatest numbers inside the only directory.

    "" if there is none, or for several ``targets``.
    """
    inner = registry.inner_checkpoints(files.sizes()) if len(targets) == 1 else []
    if not inner:
        return ""
    last = max(inner, key=lambda name: ([int(n) for n in re.findall(r"[0-9]+", name)], name))
    return f"did you mean {targets[0].rstrip('/')}/{last}?"


def _show(result: dict[str, Any], first: int | None) -> None:
    """Print an inspection for people, with the ``first`` tensors; None prints all."""
    world = result["world_size"]
    print(f"files       {result['files']}, {show_size(result['bytes'])}")
    print(f"world size  {world if world is not None else 'not recorded'}")
    print(f"ranks seen  {', '.join(map(str, result['ranks'])) or 'none in the names of files'}")
    for source in result["sources"]:
        line = f"source      {source['source']}  {source['state']}"
        line += ", a PEFT adapter" if source["writes"] == "adapter" else ""
        line += f": {source['detail']}" if source["detail"] else ""
        is_preferred = source["source"] == result["preferred"] and len(result["sources"]) > 1
        say(f"{line}  (preferred)" if is_preferred else line)
    for label, key in (("missing", "missing"), ("missing to resume", "missing_for_resume")):
        names = result[key]
        for name in names[:20]:
            say(f"{label}: {name}")
        if len(names) > 20:
            say(f"{label}: and {len(names) - 20} more")
    for note in result["notes"]:
        say(f"note        {note}")
    for source in result["sources"]:
        tensors = source["tensors"]
        if not tensors:
            continue
        print()
        say(f"{len(tensors)} tensors in {source['source']}")
        for line in output.aligned([_row(tensor) for tensor in tensors[:first]]):
            print(f"  {line}")
        if first is not None and len(tensors) > first:
            print(f"  … and {len(tensors) - first} more (--tensors shows all)")


def _row(tensor: dict[str, Any]) -> list[str]:
    """Return a tensor as a row: name, dtype, shape, and how it is stored or tied."""
    shape = " x ".join(map(str, tensor["shape"])) or "scalar"
    more = []
    if tensor["stored"] != [tensor["dtype"]]:
        more.append(f"stored as {', '.join(tensor['stored'])}")
    if tensor["tied"]:
        more.append(f"tied to {tensor['tied']}")
    return [tensor["name"], tensor["dtype"], shape, " ".join(more)]
