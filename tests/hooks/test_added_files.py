from __future__ import annotations

import errno
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ckptsync.hooks import added_files


class Kept:
    """Something with a ``save_pretrained``, as configurations and tokenizers have."""

    def __init__(self, name: str, **values: Any) -> None:
        self.__dict__.update(values, file=name)

    def save_pretrained(self, folder: Path) -> None:
        Path(folder).mkdir(exist_ok=True)
        (Path(folder) / str(vars(self)["file"])).write_text(
            json.dumps({k: str(v) for k, v in vars(self).items()})
        )


class Weight:
    """A parameter."""

    def __init__(self, dtype: str) -> None:
        self.dtype = dtype

    def is_floating_point(self) -> bool:
        return self.dtype != "torch.int8"


class FSDPLlama:
    """A model, as torch's ``fully_shard`` leaves it."""

    def __init__(self) -> None:
        self.config: Any = Kept(
            "config.json", architectures=None, dtype=None, _name_or_path="base/model"
        )
        self.generation_config: Any = Kept("generation_config.json")
        shared = Weight("torch.bfloat16")
        self._named = [("embed", shared), ("norm", Weight("torch.float32")), ("head", shared)]

    def parameters(self) -> list[Weight]:
        return [w for _, w in self._named]

    def named_parameters(self, *, remove_duplicate: bool) -> list[tuple[str, Weight]]:
        return self._named

    def save_pretrained(self) -> None: ...


def written(folder: Path) -> dict[str, Any]:
    return {p.name: json.loads(p.read_text()) for p in folder.iterdir() if p.is_file()}


def test_configuration_and_tokenizer_are_written_beside_the_model_s(spool: Path) -> None:
    model = FSDPLlama()
    assert added_files.write_added(model, Kept("tokenizer.json"), spool / "added") == []
    written_configs = written(spool / "added")
    assert set(written_configs) == {"config.json", "generation_config.json", "tokenizer.json"}
    assert (
        written_configs["config.json"]["architectures"],
        written_configs["config.json"]["dtype"],
    ) == (
        "['Llama']",
        "bfloat16",
    )
    assert (model.config.architectures, model.config.dtype) == (None, None)


def test_of_an_adapter_its_own_configuration_with_its_base_is_written(spool: Path) -> None:
    model: Any = FSDPLlama()
    model.peft_config = {"default": Kept("adapter_config.json", base_model_name_or_path=None)}
    assert added_files.write_added(model, None, spool / "added") == []
    written_configs = written(spool / "added")
    assert set(written_configs) == {"adapter_config.json"}
    config = written_configs["adapter_config.json"]
    assert (config["base_model_name_or_path"], config["inference_mode"]) == ("base/model", "True")


def test_adapters_have_their_configurations_where_peft_saves_them(spool: Path) -> None:
    model: Any = FSDPLlama()
    kept = Kept("adapter_config.json", base_model_name_or_path=None)
    model.peft_config, model.active_adapter = {"policy": kept, "ref": kept}, "policy"
    assert added_files.write_added(model, None, spool / "added") == []
    names_found = {
        p.relative_to(spool / "added").as_posix() for p in (spool / "added").rglob("*.json")
    }
    # FSDP saves the active one without its name
    assert names_found == {
        "adapter_config.json",
        "policy/adapter_config.json",
        "ref/adapter_config.json",
    }


def test_what_cannot_be_written_is_said_and_the_rest_is_written(spool: Path) -> None:
    model = FSDPLlama()
    model.generation_config = SimpleNamespace(save_pretrained=lambda folder: 1 / 0)
    assert added_files.write_added(model, Kept("tokenizer.json"), spool / "added") == [
        "the generation configuration could not be added: ZeroDivisionError: division by zero"
    ]
    assert set(written(spool / "added")) == {"config.json", "tokenizer.json"}


def test_any_model_at_all_will_do(spool: Path) -> None:
    assert added_files.write_added(object(), None, spool / "added") == []
    assert added_files.describe_model(object()) == {}


def test_a_model_tells_of_its_base_its_dtypes_and_what_it_ties() -> None:
    wrapped = SimpleNamespace(module=SimpleNamespace(_orig_mod=FSDPLlama()))
    told = added_files.describe_model(wrapped)
    assert told == {
        "class": "Llama",
        "base_model": "base/model",
        "dtypes": "bfloat16,float32",
        "tied": "embed=head",
    }


def test_of_the_environment_only_what_is_listed_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "eth0")
    told = added_files.describe_process()
    assert told["NCCL_SOCKET_IFNAME"] == "eth0"
    assert "secret" not in told.values()
    assert told["python"]


def test_the_collator_s_tokenizer_is_the_model_s_where_there_is_no_other() -> None:
    collator = SimpleNamespace(tokenizer="collator's")
    for collate in (collator, SimpleNamespace(data_collator=collator)):
        assert (
            added_files.find_processing({"train_dataloader": SimpleNamespace(collate_fn=collate)})
            == "collator's"
        )
    assert (
        added_files.find_processing(
            {"processing_class": "own", "train_dataloader": SimpleNamespace(collate_fn=collator)}
        )
        == "own"
    )
    assert added_files.find_processing({"tokenizer": "older"}) == "older"
    assert added_files.find_processing({"train_dataloader": None}) is None


def test_what_breaks_off_half_way_leaves_nothing_of_it(spool: Path) -> None:
    class Full(Kept):
        def save_pretrained(self, folder: Path) -> None:
            super().save_pretrained(folder)
            (folder / "vocab.json").write_text('{"half": ')
            raise OSError(errno.ENOSPC, "no space left on device")

    (said,) = added_files.write_added(FSDPLlama(), Full("tokenizer.json"), spool / "added")
    assert said.startswith("the tokenizer could not be added: OSError")
    assert sorted(p.name for p in (spool / "added").iterdir()) == [
        "config.json",
        "generation_config.json",
    ]
