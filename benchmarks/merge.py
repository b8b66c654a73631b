"""Merging beside what users would otherwise run, and beside ``cat`` as the limit: ``python -m
benchmarks.merge --gib 2 --rounds 5``.

Generates checkpoints in the real containers, runs each program as a whole process from an empty
output, warm and cold, and writes all results as JSON; `benchmarks.report` makes tables of them.
Run it with a Python that has torch and the other programs (`make bench` sets it up).
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.cache import cached_share, drop
from benchmarks.contest import Contest, Contestant, Heat, compete, write_contests
from benchmarks.contestants import (
    ACCELERATE,
    CKPTSYNC,
    CONVERT,
    DCP_TO_TORCH,
    DS_TO_UNIVERSAL,
    TORCH_CONSOLIDATE,
    ZERO_TO_FP32,
    adapter_merges,
    cat,
    ckptsync_merge,
)
from benchmarks.measure import Run, measure
from benchmarks.outputs import Tensors, compare, tensors

MOST_SECONDS = 600.0
SHARDS, MODEL = "*.distcp", "global_step1/mp_rank_00_model_states.pt"


@dataclass(frozen=True)
class Case:
    """A comparison: a kind of `benchmarks.generate`, a share of the size, programs (ours first)."""

    title: str
    kind: str
    share: float
    programs: tuple[Contestant, ...]
    needed: str = "fp32"
    is_cold: bool = False


CASES = (
    Case(
        "DCP, float32 in row shards of 4 ranks, to the same dtype",
        "dcp-rows",
        1,
        (
            ckptsync_merge("keep"),
            cat(SHARDS),
            cat(SHARDS, is_synced=True),
            ACCELERATE,
            DCP_TO_TORCH,
        ),
        is_cold=True,
    ),
    Case("The same to bf16", "dcp-rows", 1, (ckptsync_merge("bf16"), cat(SHARDS))),
    Case(
        "DCP, float32 in column shards of 4 ranks",
        "dcp-columns",
        0.5,
        (ckptsync_merge("keep"), cat(SHARDS), ACCELERATE, DCP_TO_TORCH),
    ),
    Case(
        "DCP, {tensors} tensors of 256 bytes",
        "dcp-small",
        1,
        (ckptsync_merge("keep"), cat(SHARDS), ACCELERATE, DCP_TO_TORCH),
    ),
    Case(
        "DCP in safetensors, row shards of 4 ranks",
        "dcp-safetensors",
        0.5,
        (ckptsync_merge("keep"), cat("*.safetensors"), TORCH_CONSOLIDATE),
    ),
    Case(
        "ZeRO-3 of a bf16 model, 4 ranks, to bf16",
        "zero3",
        1,
        (ckptsync_merge("bf16"), ZERO_TO_FP32),
        is_cold=True,
    ),
    Case("The same to float32", "zero3", 1, (ckptsync_merge("fp32"), ZERO_TO_FP32)),
    Case(
        "ZeRO-2 of a bf16 model, 4 ranks, to bf16 (from the model file alone)",
        "zero2",
        0.5,
        (ckptsync_merge("auto"), cat(MODEL), ZERO_TO_FP32),
        "bf16 model",
    ),
    Case(
        "The same to float32 (from the masters)",
        "zero2",
        0.5,
        (ckptsync_merge("fp32"), ZERO_TO_FP32),
    ),
    Case(
        "ZeRO-2, 4 ranks, a tenth of the weights with their moments, to the universal form",
        "zero2-universal",
        0.1,
        (CONVERT, DS_TO_UNIVERSAL),
        "universal of zero2",
    ),
    Case(
        "ZeRO-3, 4 ranks, the same",
        "zero3-universal",
        0.1,
        (CONVERT, DS_TO_UNIVERSAL),
        "universal of zero3",
    ),
)
# Peak memory at one size and at four times that: it must not grow with the model.
MEMORY = (
    ("DCP, same dtype", "dcp-rows", ckptsync_merge("keep")),
    ("DCP in column shards, to bf16", "dcp-columns", ckptsync_merge("bf16")),
    ("ZeRO-3 to bf16", "zero3", ckptsync_merge("bf16")),
)
DRY_RUN = Contestant(
    "ckptsync merge --dry-run", lambda s, d: [*CKPTSYNC, "merge", "--dry-run", str(s), str(d)]
)
MANY = ("dcp", "dcp-large", "zero2", "zero3", "safetensors")
# A Llama of about 1.1 billion bf16 values, an adapter of rank 16 for every linear layer, and a
# tokenizer, without which LLaMA-Factory exports nothing.
_ADAPTER = """
import sys, torch
from transformers import LlamaConfig, LlamaForCausalLM
from peft import LoraConfig, get_peft_model
torch.manual_seed(0)
torch.set_default_dtype(torch.bfloat16)
model = LlamaForCausalLM(LlamaConfig(hidden_size=2048, intermediate_size=5632,
    num_hidden_layers=int(sys.argv[2]), num_attention_heads=32, num_key_value_heads=4,
    vocab_size=32000))
model.save_pretrained(sys.argv[1] + "/base")
adapted = get_peft_model(model, LoraConfig(r=16, lora_alpha=32, target_modules="all-linear"))
for name, value in adapted.named_parameters():
    if "lora_B" in name:
        torch.nn.init.normal_(value, 0, 0.01)
adapted.save_pretrained(sys.argv[1] + "/adapter")
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast
words = Tokenizer(models.WordLevel({"<unk>": 0, "a": 1}, unk_token="<unk>"))
PreTrainedTokenizerFast(tokenizer_object=words, unk_token="<unk>", eos_token="<unk>",
    pad_token="<unk>").save_pretrained(sys.argv[1] + "/base")
"""


def main() -> None:
    """Run the chosen comparisons, and write their results as JSON."""
    args = _arguments().parse_args()
    args.work.mkdir(parents=True, exist_ok=True)
    parts = {
        "merge": _merges,
        "adapters": _adapters,
        "memory": _memory,
        "plan": _plans,
    }
    settings = {
        key: getattr(args, key)
        for key in ("gib", "rounds", "cold", "tensors", "memory_gib", "counts")
    }
    with tempfile.TemporaryDirectory(dir=args.work, prefix="merge-") as work:
        for part in args.parts:
            contests = list(parts[part](args, Path(work)))
            write_contests(args.results / f"{part}.json", contests, settings)


def _arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--parts", nargs="+", default=["merge", "adapters", "memory", "plan"])
    add("--gib", type=float, default=2.0, help="GiB of float32 weights")
    add("--rounds", type=int, default=5)
    add("--cold", type=int, default=3, help="rounds with the source out of the page cache")
    add("--tensors", type=int, default=100_000, help="of the case with many small ones")
    add("--only", default="", help="cases whose kind begins so: dcp, dcp-rows, zero")
    add("--memory-gib", type=float, default=1.0, help="the smaller size of the memory's table")
    add("--counts", type=int, nargs="+", default=[10_000, 100_000], help="chunks of the plans")
    add("--layers", type=int, default=22, help="of the base of the adapter")
    add("--llamafactory", default="", help="the path of llamafactory-cli; empty: left out")
    add("--work", type=Path, default=Path("build/bench"), help="with room for six times --gib")
    add("--results", type=Path, default=Path("build/bench"))
    return parser


def _merges(args: argparse.Namespace, work: Path) -> Iterator[Contest]:
    source, kind, needed = work / "checkpoint-1", "", {"fp32": 0}
    for case in (case for case in CASES if case.kind.startswith(args.only)):
        if case.kind != kind:
            shutil.rmtree(source, ignore_errors=True)
            kind = case.kind
            needed = generate(kind, source, args.gib * case.share, args.tensors)
        title = case.title.format(tensors=f"{args.tensors:,}")
        heats: list[tuple[Heat, int]] = [("warm", args.rounds)]
        if case.is_cold and args.cold:
            heats.append(("cold", args.cold))
        for heat, rounds in heats:
            contest = Contest(title, heat, needed[case.needed], case.programs[0].name)
            yield compete_in_merging(contest, source, case.programs, rounds, work)
    shutil.rmtree(source, ignore_errors=True)


def _adapters(args: argparse.Namespace, work: Path) -> Iterator[Contest]:
    source = work / "adapter"
    source.mkdir()
    subprocess.run([sys.executable, "-c", _ADAPTER, str(source), str(args.layers)], check=True)
    needed = sum(path.stat().st_size for path in source.rglob("*.safetensors"))
    programs = adapter_merges(args.llamafactory)
    title = "A LoRA adapter of rank 16 into its bf16 base of 1.1 billion values"
    contest = Contest(title, "warm", needed, programs[0].name)
    yield compete_in_merging(contest, source, programs, args.rounds, work)
    shutil.rmtree(source)


def _memory(args: argparse.Namespace, work: Path) -> Iterator[Contest]:
    for title, kind, program in MEMORY:
        for gib in (args.memory_gib, args.memory_gib * 4):
            generate(kind, work / "source", gib, 0)
            contest = Contest(f"{title}, {gib:g} GiB", "cold", int(gib * 2**30), program.name)
            yield compete_in_merging(contest, work / "source", (program,), 1, work)
            shutil.rmtree(work / "source")


def _plans(args: argparse.Namespace, work: Path) -> Iterator[Contest]:
    """Yield contests whose ``needed`` is the number of chunks."""
    for shape in MANY:
        for count in args.counts:
            generate(f"many-{shape}", work / "source", 0, count)
            contest = Contest(f"{shape}, {count} chunks", "warm", count, DRY_RUN.name)
            yield compete_in_merging(contest, work / "source", (DRY_RUN,), args.rounds, work)
            shutil.rmtree(work / "source")


def compete_in_merging(
    contest: Contest, source: Path, programs: Sequence[Contestant], rounds: int, work: Path
) -> Contest:
    """Run all rounds, each from an empty output, and compare the tensors that programs wrote.

    Before each run of a cold contest the source is put out of the page cache.
    """
    files = [path for path in sorted(source.rglob("*")) if path.is_file()]
    destination, written = work / "out", dict[str, Tensors]()

    def attempt(program: Contestant, number: int) -> tuple[Run, str]:
        _remove(destination)
        os.sync()  # bytes that the previous program left to write must not slow this one
        if contest.heat == "cold":
            drop(files)
            contest.not_cold = max(contest.not_cold, cached_share(files))
        run = measure(program.command(source, destination), work / "log", MOST_SECONDS)
        if number < 0:
            written[program.name] = tensors(destination)
        return run, ""

    compete(contest, programs, attempt, rounds)
    _remove(destination)
    if ours := written.get(contest.first):
        for name in contest.runs:
            is_limit = name.startswith("cat ")
            contest.outputs[name] = "" if is_limit else compare(written[name], ours)
    return contest


def generate(kind: str, source: Path, gib: float, tensors: int) -> dict[str, int]:
    """Write a checkpoint, and return the bytes of it that each output is made of.

    In a process of its own: the kernel counts a program's largest resident set from that of the
    process that starts it.
    """
    sizes = ("--gib", str(gib), "--tensors", str(tensors))
    command = [sys.executable, "-m", "benchmarks.generate", kind, str(source), *sizes]
    output = subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout
    # DeepSpeed logs to stdout before it
    needed: dict[str, int] = json.loads(output.splitlines()[-1])["needed"]
    return needed


def _remove(destination: Path) -> None:
    if destination.is_dir():
        shutil.rmtree(destination)
    destination.unlink(missing_ok=True)


if __name__ == "__main__":
    main()
