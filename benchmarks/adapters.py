"""A LoRA adapter into its base, beside peft's `merge_and_unload` and LLaMA-Factory's export.

    python -m benchmarks.adapters --python PYTHON_WITH_PEFT [--llamafactory COMMAND] --work DIR

The base is a Llama of about 1.1 billion bf16 values, the adapter of rank 16 for every linear layer.
Both are made by that Python, and removed.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

from benchmarks.contest import Contest, held
from benchmarks.tools import Tool

MAKE = """
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
PEFT = """
import sys
from transformers import AutoModelForCausalLM
from peft import PeftModel
model = AutoModelForCausalLM.from_pretrained(sys.argv[1] + "/base", dtype="auto")
model = PeftModel.from_pretrained(model, sys.argv[1] + "/adapter").merge_and_unload()
model.save_pretrained(sys.argv[2])
"""


def tools(python: str, llamafactory: str) -> list[Tool]:
    """The programs that are compared; ours is the first."""
    ours = [sys.executable, "-m", "ckptsync", "merge"]
    found = [
        Tool(
            "ckptsync merge ADAPTER --into BASE",
            lambda s, d: [*ours, str(s / "adapter"), "--into", str(s / "base"), str(d)],
        ),
        Tool("peft merge_and_unload", lambda s, d: [python, "-c", PEFT, str(s), str(d)]),
    ]
    if llamafactory:
        found.append(
            Tool(
                "llamafactory-cli export",
                lambda s, d: [
                    *("env", "DISABLE_VERSION_CHECK=1", "HF_HUB_OFFLINE=1", llamafactory, "export"),
                    *("--model_name_or_path", str(s / "base")),
                    *("--adapter_name_or_path", str(s / "adapter")),
                    *("--template", "empty", "--export_device", "cpu", "--export_dir", str(d)),
                ],
            )
        )
    return found


def main() -> None:
    """Measure, and write what came of it for `benchmarks.report`."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--python", default=sys.executable, help="that has peft and transformers")
    parser.add_argument("--llamafactory", default="", help="its command; empty: left out")
    parser.add_argument("--layers", type=int, default=22)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--work", type=Path, required=True, help="for 5 GB, which are removed")
    parser.add_argument("--json", type=Path, default=Path("build/bench/adapters.json"))
    args = parser.parse_args()
    source = args.work / "adapters"
    source.mkdir(parents=True)
    try:
        subprocess.run([args.python, "-c", MAKE, str(source), str(args.layers)], check=True)
        needed = sum(path.stat().st_size for path in source.rglob("*.safetensors"))
        programs = tools(args.python, args.llamafactory)
        title = "A LoRA adapter of rank 16 into its bf16 base of 1.1 billion values"
        found = held(
            Contest(title, "warm", needed, programs[0].name),
            source,
            programs,
            args.rounds,
            args.work,
        )
    finally:
        shutil.rmtree(source)
        shutil.rmtree(args.work / "out", ignore_errors=True)
    args.json.parent.mkdir(parents=True, exist_ok=True)
    args.json.write_text(json.dumps(asdict(found), indent=1))


if __name__ == "__main__":
    main()
