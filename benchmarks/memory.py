"""Peak memory of a merge at one size and at four times that: ``python -m benchmarks.memory --gib
1``.  It must not grow with the model.
"""

from __future__ import annotations

import argparse
import json
import shutil
import tempfile
from pathlib import Path

from benchmarks.contest import Contest, held
from benchmarks.merge import generate
from benchmarks.tools import Tool, ckptsync

CASES: tuple[tuple[str, str, Tool], ...] = (
    ("DCP, same dtype", "dcp-rows", ckptsync("keep")),
    ("DCP in column shards, to bf16", "dcp-columns", ckptsync("bf16")),
    ("ZeRO-3 to bf16", "zero3", ckptsync("bf16")),
)


def main() -> None:
    """One merge of each size."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--gib", type=float, default=1.0, help="GiB of float32 weights at the smaller size"
    )
    parser.add_argument("--work", type=Path, default=Path("build/bench"))
    parser.add_argument("--json", type=Path, default=Path("build/bench/memory.json"))
    args = parser.parse_args()
    args.work.mkdir(parents=True, exist_ok=True)
    rows = []
    for title, kind, tool in CASES:
        peaks = [_peak(kind, tool, args.gib * times, args.work) for times in (1, 4)]
        rows.append({"title": title, "gib": [args.gib, args.gib * 4], "peak": peaks})
        print(
            f"{title}: {' and '.join(f'{peak / 2**20:.0f} MiB' for peak in peaks)} at {args.gib}"
            f" and {args.gib * 4} GiB"
        )
    args.json.write_text(json.dumps(rows, indent=1))


def _peak(kind: str, tool: Tool, gib: float, where: Path) -> int:
    with tempfile.TemporaryDirectory(dir=where, prefix="memory-") as name:
        source = Path(name) / "checkpoint-1"
        generate(kind, source, gib, 0)
        found = held(
            Contest(f"{kind} of {gib:g} GiB", "cold", 0, tool.name), source, [tool], 1, Path(name)
        )
        shutil.rmtree(source)
    if found.failed:
        raise SystemExit(f"{tool.name}: {found.failed[tool.name]}")
    return found.runs[tool.name][0].peak


if __name__ == "__main__":
    main()
