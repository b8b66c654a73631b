"""Real models of transformers, whole and damaged: names, shapes, tokenizer, a forward pass.  Skipped where transformers is not installed."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ckptsync.stores.memory import MemoryStore
from ckptsync.stores.tree import LocalFiles
from ckptsync.verify import model_child, modelling
from ckptsync.verify.modelling import models
from ckptsync.verify.reading import Counted
from ckptsync.verify.structure import UNMODELLED

HERE = all(importlib.util.find_spec(name) for name in ("transformers", "accelerate", "torch"))
needs_transformers = pytest.mark.skipif(not HERE, reason="transformers, accelerate and torch are wanted")
SMALL = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 71,
}


def test_neither_torch_nor_transformers_is_imported_with_the_module() -> None:
    program = "import sys, ckptsync.verify.model_child; sys.exit(bool({'torch', 'transformers'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    transformers = pytest.importorskip("transformers")
    root = tmp_path_factory.mktemp("model")
    config = transformers.LlamaConfig(**SMALL, tie_word_embeddings=True)
    transformers.LlamaForCausalLM(config).save_pretrained(root)
    return root  # type: ignore[return-value]


def looked(root: Path, *, far: bool = False) -> tuple[list[tuple[str, str]], int, int]:
    files = LocalFiles(str(root))
    source: Any = files
    if far:
        source = MemoryStore()
        for path in files.sizes():
            source.write(path, [(root / path).read_bytes()])
    found, reading = models(Counted(source), {p: (p, s) for p, s in files.sizes().items()}, lambda path: path or ".")
    return [(f.kind, f.detail) for f in found], reading.tensors, reading.size


def changed(root: Path, to: Path, **tensors: Any) -> Path:
    """A copy with other tensors; ``None`` takes one away."""
    safetensors = pytest.importorskip("safetensors.torch")
    to.mkdir()
    held = safetensors.load_file(root / "model.safetensors")
    for name, value in tensors.items():
        held[name] = value
    safetensors.save_file({k: v for k, v in held.items() if v is not None}, to / "model.safetensors", metadata={"format": "pt"})
    (to / "config.json").write_bytes((root / "config.json").read_bytes())
    return to


@needs_transformers
@pytest.mark.parametrize("far", [False, True])
def test_a_model_that_is_what_it_says_is_well_and_runs(made: Path, far: bool) -> None:  # noqa: FBT001
    found, tensors, size = looked(made, far=far)
    assert [kind for kind, _ in found] == ["note"]
    assert "run on a few tokens" in found[0][1]
    assert (tensors, size) == (21, (made / "model.safetensors").stat().st_size)


@needs_transformers
def test_a_large_one_is_compared_by_its_headers_alone(made: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(modelling, "RUNS", 0)
    found, tensors, size = looked(made, far=True)
    assert "it is too large" in found[0][1]
    assert (tensors, size) == (21, 0)


@needs_transformers
def test_names_and_shapes_that_are_not_the_models_are_damage(made: Path, tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    bad = {"model.norm.weight": torch.zeros(33), "extra": torch.zeros(1), "model.layers.0.mlp.up_proj.weight": None}
    found, _, _ = looked(changed(made, tmp_path / "bad", **bad))
    assert [kind for kind, _ in found] == ["model"] * 3
    assert [detail.partition(":")[0] for _, detail in found] == ["model.layers.0.mlp.up_proj.weight", "extra", "model.norm.weight"]


@needs_transformers
def test_values_that_are_not_finite_come_out_as_such(made: Path, tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    found, _, _ = looked(changed(made, tmp_path / "nan", **{"model.norm.weight": torch.full((32,), float("nan"))}))
    assert ("nonfinite", "568 of 568 values that the model computes are not finite") in found


@needs_transformers
def test_code_that_comes_with_a_model_is_not_run(made: Path, tmp_path: Path) -> None:
    root = changed(made, tmp_path / "own")
    config = json.loads((root / "config.json").read_text())
    config |= {"model_type": "mine", "auto_map": {"AutoConfig": "mine.Config", "AutoModelForCausalLM": "mine.Model"}}
    (root / "config.json").write_text(json.dumps(config))
    (root / "mine.py").write_text(f"open({str(tmp_path / 'canary')!r}, 'w')")
    ((kind, detail),) = looked(root)[0]
    assert (kind, detail.startswith(UNMODELLED)) == ("note", True)
    assert not (tmp_path / "canary").exists()


@needs_transformers
def test_a_kernel_of_a_repository_that_a_configuration_names_is_not_fetched(made: Path, tmp_path: Path) -> None:
    keys = ("attn_implementation", "_attn_implementation", "experts_implementation", "_experts_implementation")
    root = changed(made, tmp_path / "kernel")
    config = json.loads((root / "config.json").read_text())
    (root / "config.json").write_text(json.dumps(config | dict.fromkeys(keys, "anyone/kernel")))
    found, tensors, _ = looked(root)
    assert tensors == 21
    assert "run on a few tokens" in found[0][1]


@needs_transformers
def test_a_tokenizer_that_does_not_load_is_damage(made: Path, tmp_path: Path) -> None:
    root = changed(made, tmp_path / "tokens")
    (root / "tokenizer.json").write_text('{"version": "1.0"}')
    assert ("model", "the tokenizer does not load") in [(kind, detail.partition(":")[0]) for kind, detail in looked(root)[0]]


@needs_transformers
def test_a_tokenizer_that_this_machine_lacks_a_library_for_is_no_damage(made: Path, tmp_path: Path) -> None:
    root = changed(made, tmp_path / "lacking")
    (root / "tokenizer_config.json").write_text('{"auto_map": {"AutoTokenizer": ["mine.Mine", null]}, "tokenizer_class": "Mine"}')
    (root / "mine.py").write_text("class Mine: pass")
    found, tensors, _ = looked(root)
    assert [(kind, detail.startswith(UNMODELLED)) for kind, detail in found] == [("note", True)]
    assert tensors == 21


@needs_transformers
def test_weights_that_this_machine_lacks_a_library_for_are_no_damage(made: Path, tmp_path: Path) -> None:
    root = changed(made, tmp_path / "gptq")
    config = json.loads((root / "config.json").read_text())
    (root / "config.json").write_text(json.dumps(config | {"quantization_config": {"quant_method": "gptq", "bits": 4}}))
    assert {kind for kind, _ in looked(root)[0]} == {"note"}


@pytest.mark.parametrize(
    ("error", "where"),
    [
        (ImportError("optimum"), "notes"),
        (MemoryError(), "notes"),
        (ValueError("pass `trust_remote_code=True`"), "notes"),
        (RuntimeError("try `pip install x`"), "notes"),
        (ValueError("odd"), "faults"),
    ],
)
def test_what_a_machine_lacks_is_told_from_what_is_wrong(error: Exception, where: str) -> None:
    assert model_child._whose(error) == where


def test_what_transformers_imports_late_finds_where_temporary_files_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    libraries, root = tmp_path / "libraries", tmp_path / "model"
    libraries.mkdir()
    root.mkdir()
    (libraries / "accelerate.py").write_text("")
    (libraries / "torch.py").write_text("__version__ = 'x'\nset_num_threads = print")
    program = "import tempfile\n__version__ = 'x'\nclass AutoConfig:\n    def from_pretrained(*_, **__):\n        raise ValueError(f'in {tempfile.gettempdir()}')"
    (libraries / "transformers.py").write_text(program)
    for name in ("config.json", "model.safetensors"):
        (root / name).write_text("{}")
    monkeypatch.setenv("PYTHONPATH", str(libraries))
    ((kind, detail),) = looked(root)[0]
    assert (kind, "ValueError: in /" in detail) == ("note", True)
