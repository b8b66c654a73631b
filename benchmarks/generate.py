"""Large checkpoints in the real containers: ``python -m benchmarks.generate KIND DIR [--gib 2]
[--tensors 100000]``.

Needs torch.  The layouts are those of the frameworks (item archives, ``.metadata``, flat groups,
moments); only the training is left out.  Prints one line of JSON: ``needed``, the bytes of the
source that make up each output.  A kind ``many-…`` has ``--tensors`` small chunks.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path

import torch

from benchmarks import generate_dcp, generate_many, generate_zero
from benchmarks.sizes import Shapes, config, model, numel, small

KINDS: dict[str, Callable[[Shapes, Path], None]] = {
    "dcp-rows": lambda shapes, where: generate_dcp.items(shapes, where, axis=0),
    "dcp-columns": lambda shapes, where: generate_dcp.items(shapes, where, axis=1),
    "dcp-small": lambda shapes, where: generate_dcp.items(shapes, where, axis=None),
    "dcp-safetensors": generate_dcp.safetensors,
    "zero2": generate_zero.stage2,
    "zero3": generate_zero.stage3,
    "zero2-universal": generate_zero.stage2_sliced,
    "zero3-universal": generate_zero.stage3,
}


def main() -> None:
    """Write one checkpoint."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    many = {f"many-{name}": generate for name, generate in generate_many.SHAPES.items()}
    parser.add_argument("kind", choices=[*KINDS, *many])
    parser.add_argument("where", type=Path)
    parser.add_argument("--gib", type=float, default=2.0)
    parser.add_argument("--tensors", type=int, default=100_000)
    args = parser.parse_args()
    torch.manual_seed(0)
    if generate := many.get(args.kind):
        args.where.mkdir(parents=True)
        generate(args.where, args.tensors)
        print(json.dumps({"tensors": args.tensors, "needed": {}}))
        return
    shapes = small(args.tensors) if args.kind == "dcp-small" else model(args.gib)
    args.where.mkdir(parents=True)
    KINDS[args.kind](shapes, args.where)
    if args.kind != "dcp-small":
        (args.where / "config.json").write_text(json.dumps(config(args.gib)))
    count = numel(shapes)
    needed = {
        "fp32": 4 * count,
        "bf16 model": 2 * count,
        "universal of zero2": 14 * count,
        "universal of zero3": 12 * count,
    }
    print(json.dumps({"tensors": len(shapes), "needed": needed}))


if __name__ == "__main__":
    main()
