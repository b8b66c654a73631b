"""Merging, side by side with what users would otherwise run, and with ``cat`` as the limit:
``python -m benchmarks.merge --gib 2 --rounds 5``.

Generates checkpoints in the real containers, runs each tool as a whole process in paired rounds
from an empty output, warm and cold, and writes every round as JSON; ``benchmarks.report`` makes
tables of it.  Run by a Python that has torch and the peers (`make bench` sets it up).
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.contest import Contest, Heat, held
from benchmarks.tools import (
    ACCELERATE,
    CONVERT,
    DCP_TO_TORCH,
    TO_UNIVERSAL,
    TORCH_CONSOLIDATE,
    ZERO_TO_FP32,
    Tool,
    cat,
    cat_and_sync,
    ckptsync,
)

SHARDS, OPTIMIZERS, MODEL = (
    "*.distcp",
    "global_step1/*optim_states.pt",
    "global_step1/mp_rank_00_model_states.pt",
)


@dataclass(frozen=True)
class Case:
    """One comparison: ``kind`` as `benchmarks.generate` knows it, ``share`` of the size, the tools,
    ours first.
    """

    title: str
    kind: str
    share: float
    tools: tuple[Tool, ...]
    needed: str = "fp32"
    cold: bool = False


CASES = (
    Case(
        "DCP, float32 in row shards of 4 ranks, to the same dtype",
        "dcp-rows",
        1,
        (ckptsync("keep"), cat(SHARDS), cat_and_sync(SHARDS), ACCELERATE, DCP_TO_TORCH),
        cold=True,
    ),
    Case("The same to bf16", "dcp-rows", 1, (ckptsync("bf16"), cat(SHARDS))),
    Case(
        "DCP, float32 in column shards of 4 ranks",
        "dcp-columns",
        0.5,
        (ckptsync("keep"), cat(SHARDS), ACCELERATE, DCP_TO_TORCH),
    ),
    Case(
        "DCP, {tensors} tensors of 256 bytes",
        "dcp-small",
        1,
        (ckptsync("keep"), cat(SHARDS), ACCELERATE, DCP_TO_TORCH),
    ),
    Case(
        "DCP in safetensors, row shards of 4 ranks",
        "dcp-safetensors",
        0.5,
        (ckptsync("keep"), cat("*.safetensors"), TORCH_CONSOLIDATE),
    ),
    Case(
        "ZeRO-3 of a bf16 model, 4 ranks, to bf16",
        "zero3",
        1,
        (ckptsync("bf16"), ZERO_TO_FP32),
        cold=True,
    ),
    Case("The same to float32", "zero3", 1, (ckptsync("fp32"), ZERO_TO_FP32)),
    Case(
        "ZeRO-2 of a bf16 model, 4 ranks, to bf16 (from the model file alone)",
        "zero2",
        0.5,
        (ckptsync("auto"), cat(MODEL), ZERO_TO_FP32),
        "bf16 model",
    ),
    Case("The same to float32 (from the masters)", "zero2", 0.5, (ckptsync("fp32"), ZERO_TO_FP32)),
    Case(
        "ZeRO-2, 4 ranks, a tenth of the weights with their moments, to the universal form",
        "zero2-universal",
        0.1,
        (CONVERT, TO_UNIVERSAL),
        "universal of zero2",
    ),
    Case(
        "ZeRO-3, 4 ranks, the same",
        "zero3-universal",
        0.1,
        (CONVERT, TO_UNIVERSAL),
        "universal of zero3",
    ),
)


def main() -> None:
    """Run the comparisons that are asked for, and write what came of them."""
    args = _arguments().parse_args()
    args.work.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=args.work, prefix="merge-") as work:
        results = [asdict(result) for result in _run(args, Path(work))]
    args.json.parent.mkdir(parents=True, exist_ok=True)
    settings = {"gib": args.gib, "rounds": args.rounds, "cold": args.cold, "tensors": args.tensors}
    args.json.write_text(json.dumps({"settings": settings, "contests": results}, indent=1))


def _arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--gib", type=float, default=2.0, help="GiB of float32 weights")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--cold", type=int, default=3, help="rounds with the source out of the page cache"
    )
    parser.add_argument(
        "--tensors", type=int, default=100_000, help="of the case with many small ones"
    )
    parser.add_argument(
        "--only", default="", help="cases whose kind begins so: dcp, dcp-rows, zero"
    )
    parser.add_argument(
        "--work",
        type=Path,
        default=Path("build/bench"),
        help="where there is room for six times the size",
    )
    parser.add_argument(
        "--json",
        type=Path,
        default=Path("build/bench/merge.json"),
        help="where every round is written",
    )
    return parser


def _run(args: argparse.Namespace, work: Path) -> Iterator[Contest]:
    source, kind, told = work / "checkpoint-1", "", {"fp32": 0}
    for case in (case for case in CASES if case.kind.startswith(args.only)):
        if case.kind != kind:
            shutil.rmtree(source, ignore_errors=True)
            kind, told = case.kind, generate(case.kind, source, args.gib * case.share, args.tensors)
        heats: list[tuple[Heat, int]] = [
            ("warm", args.rounds),
            ("cold", args.cold if case.cold else 0),
        ]
        for heat, rounds in ((heat, rounds) for heat, rounds in heats if rounds):
            title = case.title.format(tensors=f"{args.tensors:,}")
            yield held(
                Contest(title, heat, told[case.needed], case.tools[0].name),
                source,
                case.tools,
                rounds,
                work,
            )


def generate(kind: str, source: Path, gib: float, tensors: int) -> dict[str, int]:
    """Write a checkpoint; the bytes of it that each output is made of."""
    command = [
        sys.executable,
        "-m",
        "benchmarks.generate",
        kind,
        str(source),
        "--gib",
        str(gib),
        "--tensors",
        str(tensors),
    ]
    told: dict[str, int] = json.loads(
        subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout
    )["needed"]
    return told


if __name__ == "__main__":
    main()
