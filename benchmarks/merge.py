"""Merging, side by side with what users would otherwise run, and with ``cat`` as the limit.

    python benchmarks/merge.py [--gib 2] [--rounds 3] [--work DIR] [--peers PYTHON]

Generates checkpoints with the real containers (torch writes them), runs each tool as a whole process in paired rounds from an empty
output, and prints medians of wall and CPU seconds, peak memory, and ratios to ckptsync within the same rounds.  ``--peers`` names the Python of an
environment that has torch, accelerate and deepspeed; without it they are looked for in this one.  A peer that is not installed is said to be missing.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).parent


@dataclass(frozen=True)
class Run:
    """One process from start to exit: seconds, seconds of CPU, MiB at the peak."""

    wall: float
    cpu: float
    peak: float


@dataclass(frozen=True)
class Tool:
    """A command line for a source and a destination."""

    name: str
    command: Callable[[Path, Path], list[str]]


def measure(command: list[str], log: Path) -> Run:
    """Run to the end; raises RuntimeError with the tail of its output if it fails."""
    before, start = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
    with log.open("wb") as out:
        process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT)
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise RuntimeError(f"{command[:4]} exited {process.returncode}: {log.read_text(errors='replace')[-600:]}")
    del before
    return Run(time.monotonic() - start, usage.ru_utime + usage.ru_stime, usage.ru_maxrss / 1024)


def ours(dtype: str) -> Tool:
    def command(source: Path, destination: Path) -> list[str]:
        return [
            sys.executable,
            "-m",
            "ckptsync",
            "merge",
            str(source),
            str(destination),
            "--dtype",
            dtype,
            "--max-shard-size",
            "5GB",
        ]

    return Tool(f"ckptsync --dtype {dtype}", command)


def cat(pattern: str) -> Tool:
    return Tool(
        "cat", lambda source, destination: ["sh", "-c", f"mkdir {destination} && cat {source}/{pattern} > {destination}/all"]
    )


def peers(python: str) -> dict[str, Tool]:
    run = "import sys; from {} import {} as f; f(*sys.argv[1:])"
    return {
        "accelerate": Tool(
            "accelerate merge-weights",
            lambda s, d: [python, "-m", "accelerate.commands.accelerate_cli", "merge-weights", str(s), str(d)],
        ),
        "dcp_to_torch_save": Tool(
            "dcp_to_torch_save",
            lambda s, d: [
                python,
                "-c",
                run.format("torch.distributed.checkpoint.format_utils", "dcp_to_torch_save"),
                str(s),
                str(d),
            ],
        ),
        "zero_to_fp32": Tool(
            "zero_to_fp32 --safe_serialization",
            lambda s, d: [python, "-m", "deepspeed.utils.zero_to_fp32", str(s), str(d), "--safe_serialization"],
        ),
    }


def compare(title: str, source: Path, tools: list[Tool], rounds: int, work: Path) -> dict[str, object]:
    """Every tool once a round, in turn; ratios are of one round, so that a drifting machine does not matter."""
    runs: dict[str, list[Run]] = {tool.name: [] for tool in tools}
    failed: dict[str, str] = {}
    for number in range(rounds):
        for tool in tools:
            if tool.name in failed:
                continue
            destination = work / "out"
            shutil.rmtree(destination, ignore_errors=True)
            destination.unlink(missing_ok=True) if destination.is_file() else None
            try:
                runs[tool.name].append(measure(tool.command(source, destination), work / "log"))
            except RuntimeError as e:
                failed[tool.name] = str(e)
            print(f"  round {number + 1}: {tool.name}", file=sys.stderr)
    return _report(title, tools, runs, failed)


def _report(title: str, tools: list[Tool], runs: dict[str, list[Run]], failed: dict[str, str]) -> dict[str, object]:
    first = runs[tools[0].name]
    print(
        f"\n### {title}\n\n| tool | wall s | CPU s | peak MiB | wall, ckptsync = 1 | CPU, ckptsync = 1 |\n|---|---|---|---|---|---|"
    )
    rows = []
    for tool in tools:
        if tool.name in failed:
            print(f"| {tool.name} | failed: {failed[tool.name][:120]!r} | | | | |")
            continue
        mine = runs[tool.name]
        wall, cpu = (statistics.median(getattr(r, k) for r in mine) for k in ("wall", "cpu"))
        peak = max(r.peak for r in mine)
        ratios = [
            statistics.median(getattr(a, k) / getattr(b, k) for a, b in zip(mine, first, strict=True)) for k in ("wall", "cpu")
        ]
        print(f"| {tool.name} | {wall:.2f} | {cpu:.2f} | {peak:.0f} | {ratios[0]:.2f} | {ratios[1]:.2f} |")
        rows.append(
            {"tool": tool.name, "wall": wall, "cpu": cpu, "peak_mib": peak, "wall_ratio": ratios[0], "cpu_ratio": ratios[1]}
        )
    return {"title": title, "rows": rows, "failed": failed}


def generate(python: str, kind: str, gib: float, where: Path) -> Path:
    subprocess.run([python, str(HERE / "generate.py"), kind, str(gib), str(where)], check=True)
    return where


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gib", type=float, default=2.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--work", type=Path, help="where there is room for four times the size")
    parser.add_argument("--peers", default=sys.executable, help="the Python of an environment with torch, accelerate and deepspeed")
    parser.add_argument("--json", type=Path, help="also write the figures here")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=args.work) as name:
        work, other = Path(name), peers(args.peers)
        results = []
        rows = generate(args.peers, "dcp-rows", args.gib, work / "pytorch_model_fsdp_0")
        tools = [ours("keep"), cat("*.distcp"), other["accelerate"], other["dcp_to_torch_save"]]
        results.append(compare(f"DCP, fp32, {args.gib} GiB in row shards of 4 ranks, same dtype", rows, tools, args.rounds, work))
        results.append(compare("The same to bf16", rows, [ours("bf16"), cat("*.distcp")], args.rounds, work))
        shutil.rmtree(rows)
        columns = generate(args.peers, "dcp-columns", args.gib, work / "pytorch_model_fsdp_0")
        results.append(compare("DCP, the same in column shards", columns, tools, args.rounds, work))
        shutil.rmtree(columns)
        zero = generate(args.peers, "zero3", args.gib, work / "zero")
        optim = "global_step1/*optim_states.pt"
        results.append(
            compare(
                "ZeRO-3, fp32 masters of 4 ranks (no moments)",
                zero,
                [ours("keep"), cat(optim), other["zero_to_fp32"]],
                args.rounds,
                work,
            )
        )
    if args.json:
        args.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
