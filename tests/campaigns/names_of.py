"""``merge --names-of`` and ``--fill-from`` against transformers, architecture by architecture.

    python -m tests.campaigns.names_of --python /opt/transformers/bin/python
    python -m tests.campaigns.names_of --classes MixtralForCausalLM LlavaForConditionalGeneration

For every class a small random model is written under its names in memory: as one file, as a
distributed checkpoint, and as one that lacks every third tensor; for `SHARDED` also in the shards
of two ranks.  Each must become, bit for bit, what ``save_pretrained`` has written of the same
model.  Classes that cannot be built so small are named and not judged.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from tests.campaigns.campaign import CKPTSYNC, CLEAN, arguments, verdict, working
from tests.campaigns.two_nodes import has_modules
from tests.support.vector import Bits, bits

CHILD = Path(__file__).with_name("architectures.py")
SHARDED = ("MixtralForCausalLM", "Qwen3MoeForCausalLM", "Qwen2_5_VLForConditionalGeneration")
LEAST = 20  # architectures whose names in memory are not those of their files
# None of a tied embedding's names that this one lacks is the one in the files: refused.
_REFUSED = ("T5ForConditionalGeneration/part",)


def main(argv: Sequence[str] | None = None) -> int:
    """Return 0 if every model was as save_pretrained wrote it, 1 if not."""
    parser = arguments(__doc__, "home")
    parser.add_argument("--classes", nargs="*", default=[])
    parser.add_argument("--python", default=sys.executable, help="that has torch and transformers")
    args = parser.parse_args(argv)
    if not has_modules(args.python, "torch", "transformers"):
        print(f"left out: {args.python} has no transformers")
        return 0
    wrong: list[str] = []
    renamed = 0
    with working("names", args.home) as home:
        for found in _written(home, args):
            name = found["name"]
            if "error" in found:
                print(f"{name}: not built: {found['error']}", flush=True)
                continue
            lines = [*_judged(home / name)]
            renamed += bits(*_files(home / name / "base")).keys() != _live(home / name)
            print(f"{name}: {len(lines)} wrong", flush=True)
            wrong += lines
    if not args.classes and renamed < LEAST:
        wrong.append(f"{renamed} classes have other names in memory, at least {LEAST} expected")
    verdict(wrong)
    print(f"{renamed} classes with other names in memory; {len(wrong)} wrong")
    return 1 if wrong else 0


def _written(home: Path, args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield what the children say of each model, once it is written."""
    sharded = [name for name in SHARDED if not args.classes or name in args.classes]
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    runs = [([str(CHILD)], home, args.classes)]
    runs += [([*torchrun, str(CHILD)], home / "sharded", sharded)] if sharded else []
    for words, out, classes in runs:
        command = [args.python, *words, str(out), *classes]
        child = subprocess.run(command, stdout=subprocess.PIPE, text=True, env=CLEAN, check=False)
        for line in child.stdout.splitlines():
            if line.startswith("{"):
                found = json.loads(line)
                yield found | {"name": str((out / found["name"]).relative_to(home))}


def _judged(model: Path) -> Iterator[str]:
    """Yield what is wrong of the merges of one model."""
    base = model / "base"
    expected = bits(*_files(base))
    for form in ("whole", "dcp", "part", "fsdp2", "ranks"):
        if not (model / form).is_dir():
            continue
        fill = ["--fill-from", str(base)] if form == "part" else []
        out = model / f"merged-{form}"
        words = ["merge", str(model / form), str(out), "--dtype", "keep", "--names-of", str(base)]
        merge = subprocess.run(
            [*CKPTSYNC, *words, *fill], capture_output=True, text=True, env=CLEAN, check=False
        )
        where = f"{model.name}/{form}"
        if where in _REFUSED:
            if merge.returncode != 5:
                yield f"{where}: exit code {merge.returncode}"
        elif merge.returncode:
            yield f"{where}: exit code {merge.returncode}: {merge.stderr.strip()}"
        else:
            yield from (f"{where}: {line}" for line in _differences(bits(*_files(out)), expected))


def _differences(found: Bits, expected: Bits) -> Iterator[str]:
    odd = sorted(n for n in found.keys() | expected.keys() if found.get(n) != expected.get(n))
    if odd:
        yield f"{len(odd)} tensors differ, such as {odd[0]}"


def _live(model: Path) -> set[str]:
    return set(bits(*_files(model / "whole"))) if (model / "whole").is_dir() else set()


def _files(directory: Path) -> list[Path]:
    return sorted(directory.glob("model*.safetensors"))


if __name__ == "__main__":
    sys.exit(main())
