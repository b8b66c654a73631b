"""A consolidated model can be opened: what its checkpoint lacks for that is found, or the user is
told what is missing and how to give it.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.scenarios.world import BASE, VECTORS, World, flipped, reference
from tests.support.exhaustive import in_exhaustive

pytestmark = pytest.mark.stores("path")

SHARDED = "hf-fsdp1"  # its checkpoint has weights, and neither a configuration nor a tokenizer
LOCATION = "sft/checkpoint-4"
OPENERS = {path.name for path in BASE.iterdir() if path.suffix in (".json", ".jinja")}
NO_CONFIG: dict[str, Any] = {"config_from": {}}
WITH_TRANSFORMERS = pytest.mark.skipif(
    find_spec("transformers") is None, reason="transformers is not installed"
)

HOOKED = """
import os, sys
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, AutoTokenizer, Trainer, TrainingArguments
from ckptsync.hooks.hf import CkptSyncCallback

class WeightsAlone(Trainer):
    def save_model(self, output_dir=None, _internal_call=False):
        os.makedirs(output_dir, exist_ok=True)
        save_file({name: weight.clone() for name, weight in self.model.state_dict().items()}, \
output_dir + "/model.safetensors")

data = [{"input_ids": torch.arange(8), "labels": torch.arange(8)}] * 4
args = TrainingArguments(sys.argv[1], max_steps=1, save_steps=1, per_device_train_batch_size=2, \
report_to=[], use_cpu=True)
model, tokenizer = AutoModelForCausalLM.from_pretrained(sys.argv[2]), \
AutoTokenizer.from_pretrained(sys.argv[2])
WeightsAlone(model, args, train_dataset=data, processing_class=tokenizer, \
callbacks=[CkptSyncCallback()]).train()
"""


def give(directory: Path) -> None:
    """Put what opens the base model into a directory."""
    directory.mkdir(parents=True, exist_ok=True)
    for name in OPENERS:
        shutil.copyfile(BASE / name, directory / name)


def beside(world: World, location: str = LOCATION) -> set[str]:
    """Names of the consolidated model's files but for its weights."""
    run, _, rest = location.partition("/")
    prefix = f"{run}/consolidated/{rest}/"
    return {
        n.removeprefix(prefix)
        for n in world.store.names()
        if n.startswith(prefix) and "safetensors" not in n
    }


def python(world: World, script: str, *words: object) -> None:
    environment = {
        **world.environment,
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
        "HF_HUB_OFFLINE": "1",
    }
    done = subprocess.run(
        [sys.executable, "-c", script, *map(str, words)],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr


def opens(world: World, location: str = LOCATION) -> None:
    """Open the model as its user does."""
    transformers = pytest.importorskip("transformers")
    target = world.home / "pulled" / location
    world.at_store("pull", location, target, "--consolidated")
    model, report = transformers.AutoModelForCausalLM.from_pretrained(
        target, output_loading_info=True
    )
    assert transformers.AutoConfig.from_pretrained(target).model_type == model.config.model_type
    assert not any(report[key] for key in ("missing_keys", "unexpected_keys")), report
    assert transformers.AutoTokenizer.from_pretrained(target) is not None


def told(world: World, location: str = LOCATION) -> list[str]:
    """What `ls` says that the model lacks."""
    found: list[str] = world.ls()[location]["missing_to_open"]
    return found


@WITH_TRANSFORMERS
def test_what_lies_in_the_runs_directory_opens_the_model(world: World) -> None:
    give(world.output("sft"))
    world.worker()
    world.head(head=NO_CONFIG)
    world.save("sft", vector=SHARDED)
    world.until_told(
        lambda: LOCATION in (rows := world.ls()) and not rows[LOCATION]["missing_to_open"],
        "a configuration",
    )
    world.wait(LOCATION, "VERIFIED")
    world.until(lambda: beside(world) == OPENERS, "all that opens the model")
    assert world.model(LOCATION) == reference(SHARDED)
    opens(world)


@WITH_TRANSFORMERS
@pytest.mark.parametrize("where", ["checkpoint", "run"])
def test_the_model_that_training_args_name_opens_the_model(world: World, where: str) -> None:
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    base = world.home / "models" / "base"
    give(base)
    (base / "modeling_x.py").write_text("raise SystemExit")
    saved = world.save("sft", vector=SHARDED)
    arguments = transformers.TrainingArguments(str(world.home / "o"), use_cpu=True)
    arguments.model_name_or_path = str(base)  # as the dataclass of each training script has it
    torch.save(arguments, (saved if where == "checkpoint" else saved.parent) / "training_args.bin")
    world.push(saved)
    world.head(head=NO_CONFIG)
    world.wait(LOCATION, "VERIFIED")
    assert (told(world), beside(world)) == ([], OPENERS)
    opens(world)


@WITH_TRANSFORMERS
def test_what_the_hook_knows_opens_the_model(world: World) -> None:
    base = world.home / "base"
    shutil.copytree(BASE, base)
    python(world, HOOKED, world.output("sft"), base)
    assert not (world.output("sft") / "checkpoint-1" / "config.json").exists()
    world.worker()
    world.head(head=NO_CONFIG)
    world.wait("sft/checkpoint-1", "VERIFIED")
    assert told(world, "sft/checkpoint-1") == []
    opens(world, "sft/checkpoint-1")


def test_a_name_that_is_no_directory_of_a_model_gives_nothing(world: World) -> None:
    secret = world.home / "secret"
    secret.mkdir()
    (secret / "config.json").write_text(json.dumps({"auths": {"registry": "token"}}))
    (secret / "tokenizer.json").write_text("{}")
    saved = world.save("sft", vector=SHARDED)
    for number, name in enumerate(
        (str(secret), "org/model", "../secret", "/" + "x" * 5000, "/a\0b")
    ):
        (saved / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": name}))
        world.push(saved, "--run", f"run{number}")
        assert not any(
            "secret" in n or n.endswith(("/config.json", "tokenizer.json"))
            for n in world.store.names()
        )


def test_what_the_checkpoint_has_itself_is_never_replaced(world: World) -> None:
    saved = world.save("sft", vector="hf-zero2")
    (saved.parent / "config.json").write_text(json.dumps({"model_type": "another"}))
    world.push(saved)
    assert world.store.read("sft/checkpoint-4/config.json") == (saved / "config.json").read_bytes()


def test_code_beside_a_run_is_not_taken(world: World) -> None:
    give(world.output("sft"))
    config = json.loads((BASE / "config.json").read_text()) | {
        "auto_map": {"AutoModel": "modeling_x.X"}
    }
    (world.output("sft") / "config.json").write_text(json.dumps(config))
    (world.output("sft") / "modeling_x.py").write_text("raise SystemExit")
    world.push(world.save("sft", vector=SHARDED))
    world.head(head=NO_CONFIG)
    world.wait(LOCATION, "VERIFIED")
    assert beside(world) == OPENERS
    assert "auto_map" not in json.loads(
        world.store.read("sft/consolidated/checkpoint-4/config.json")
    )
    assert world.ls()[LOCATION]["left_out"] == ["config.json: auto_map"]


def test_where_it_stays_missing_everything_says_so_and_how_to_give_it(world: World) -> None:
    (world.output("sft")).mkdir(parents=True)
    # the script's own, which opens nothing
    (world.output("sft") / "config.json").write_text(json.dumps({"lr": 1e-5}))
    world.push(world.save("sft", vector=SHARDED))
    world.head(head=NO_CONFIG)
    world.wait(LOCATION, "VERIFIED")
    row = world.ls()[LOCATION]
    assert row["missing_to_open"] == ["config.json", "tokenizer"]
    shown = world.at_store("ls").out
    [alarm] = [
        a for a in world.at_store("status", "--json").json["alarms"] if a["code"] == "no-config"
    ]
    assert (alarm["subject"], alarm["severity"]) == ("sft", "warning")
    for text in (shown, alarm["text"], world.at_store("status").out):
        assert "no config.json: from_pretrained cannot open it" in text
    for text in (
        shown,
        alarm["todo"],
        row["hint"],
        world.at_store("status").out,
    ):
        assert "head.config_from.sft" in text
    world.at_store("status", "--check", code=1)
    pulled = world.at_store(
        "pull", LOCATION, world.home / "pulled", "--consolidated", "--json"
    ).json
    assert any("no config.json" in note for note in pulled["notes"])


@WITH_TRANSFORMERS
@pytest.mark.parametrize(
    "vector", [SHARDED, pytest.param("acc-fsdp2-bf16-tied", marks=in_exhaustive)]
)
def test_a_configuration_that_comes_later_completes_the_model_as_it_is(
    world: World, vector: str
) -> None:
    base = VECTORS / ("base-tied" if "tied" in vector else "base")
    names = {path.name for path in base.glob("*.json")}
    saved = world.save("sft", vector=vector)
    world.worker()
    world.head(head=NO_CONFIG)
    world.wait(LOCATION, "VERIFIED")
    assert "config.json" in told(world)
    weights = {
        n: world.store.identity(n) for n in world.store.names() if n.endswith(".safetensors")
    }
    for name in names:
        shutil.copyfile(base / name, saved.parent / name)
    world.until_told(lambda: "config.json" not in told(world), "the model to be completed")
    world.wait(LOCATION, "VERIFIED")
    assert {n: world.store.identity(n) for n in weights} == weights
    assert world.at_store("status", "--json").json["alarms"] == []
    opens(world)


def test_a_later_upload_completes_the_models_of_its_run(world: World) -> None:
    saved = world.save("sft", vector=SHARDED)
    world.push(saved)
    world.head(head=NO_CONFIG)
    world.wait(LOCATION, "VERIFIED")
    shutil.rmtree(saved)
    give(world.output("sft"))
    world.push(world.save("sft", step=8, vector=SHARDED))
    world.until_told(lambda: not told(world), "the first model to be completed")
    for location in (LOCATION, "sft/checkpoint-8"):
        world.wait(location, "VERIFIED")
        assert beside(world, location) == OPENERS


def test_another_nodes_directory_never_replaces_what_the_first_nodes_checkpoint_has(
    world: World,
) -> None:
    parts = {
        node: world.save("sft", vector="hf-zero3-2node", node=node) for node in ("node0", "node1")
    }
    own = (parts["node0"] / "config.json").read_bytes()
    for node in ("node1", "node0"):  # whose name sorts first would own a path that both send
        renamed = {"node0": "z", "node1": "a"}[node]
        (parts[node].parent / "config.json").write_text(json.dumps({"model_type": "another"}))
        world.push(parts[node], node=renamed)
    world.push(parts["node1"], node="a")
    assert world.stored("sft", "checkpoint-4")["config.json"] == own
    assert not any("/files/" in name for name in world.store.names())


def test_the_only_node_that_has_a_configuration_gives_it_once_the_save_is_whole(
    world: World,
) -> None:
    for node in ("node0", "node1"):
        world.worker(node)
    give(world.output("sft", "node1"))
    for node in ("node0", "node1"):
        world.save("sft", vector="hf-fsdp2-2node", node=node)
    world.head(head=NO_CONFIG)
    world.until_told(
        lambda: (
            LOCATION in (rows := world.ls())
            and bool(rows[LOCATION]["model"])
            and not rows[LOCATION]["missing_to_open"]
        ),
        "a configuration",
    )
    world.wait(LOCATION, "VERIFIED")
    assert beside(world) == OPENERS
    assert world.model(LOCATION) == reference("hf-fsdp2-2node")


@pytest.mark.parametrize("comes", ["before", pytest.param("later", marks=in_exhaustive)])
def test_a_damaged_record_of_a_checkpoint_with_a_found_configuration_is_written_again(
    world: World, comes: str
) -> None:
    saved = world.save("sft", vector=SHARDED)
    if comes == "before":
        give(saved.parent)
        for name in OPENERS:
            os.utime(saved.parent / name, (1_700_000_000, 1_700_000_000))
    world.worker()
    world.wait(LOCATION, "COMPLETE")
    if comes == "later":
        give(saved.parent)
    world.until(lambda: world.stored("sft", "checkpoint-4").keys() >= OPENERS, "a configuration")
    count = 1 if comes == "before" else 2
    world.until(
        lambda: sum("/manifest-" in name for name in world.store.names()) == count, "the records"
    )
    records = {n: world.store.read(n) for n in world.store.names() if "/manifest-" in n}
    for name, data in records.items():
        world.store.write(name, flipped(data))
    world.until(
        lambda: {n: world.store.read(n) for n in records} == records,
        "the records to be written again",
    )
    world.wait(LOCATION, "COMPLETE")
    damaged = "sft/checkpoint-4/config.json"
    world.store.write(damaged, flipped(world.store.read(damaged)))
    world.verify(code=10)
    world.until(
        lambda: world.store.read(damaged) == (BASE / "config.json").read_bytes(),
        "the file to be sent again",
    )
