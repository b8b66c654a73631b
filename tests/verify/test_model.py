"""Real models of transformers, whole and damaged: names, shapes, tokenizer, a forward pass.

Skipped where transformers is not installed.
"""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from ckptsync.digest import FileDigest
from ckptsync.errors import Unsupported
from ckptsync.stores.checkpoint_files import DirectoryFiles
from ckptsync.stores.memory import MemoryStore
from ckptsync.verify import level_load, model_child
from ckptsync.verify.expected_files import ExpectedFile, directory_file
from ckptsync.verify.level_load import load_model, require
from ckptsync.verify.level_parse import UNMODELLED, reached_level
from ckptsync.verify.tracked_files import CountedSource
from tests.support.files_in_memory import safetensors_file

HERE = all(importlib.util.find_spec(name) for name in ("transformers", "accelerate", "torch"))
needs_transformers = pytest.mark.skipif(
    not HERE, reason="transformers, accelerate and torch are wanted"
)
SMALL = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 71,
}


def test_neither_torch_nor_transformers_is_imported_with_the_module() -> None:
    program = (
        "import sys, ckptsync.verify.model_child; sys.exit(bool({'torch', 'transformers'} &"
        " set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    transformers = pytest.importorskip("transformers")
    root = tmp_path_factory.mktemp("model")
    config = transformers.LlamaConfig(**SMALL, tie_word_embeddings=True)
    transformers.LlamaForCausalLM(config).save_pretrained(root)
    return root  # type: ignore[return-value]


def looked(root: Path, *, far: bool = False) -> tuple[list[tuple[str, str]], int, int]:
    files = DirectoryFiles(str(root))
    source: Any = files
    if far:
        source = MemoryStore()
        for path in files.sizes():
            source.write(path, [(root / path).read_bytes()])
    expected = {
        path: directory_file(path, FileDigest(size, "", 0, ()))
        for path, size in files.sizes().items()
    }
    found, reading = load_model(CountedSource(source), expected, ".")
    return [(f.kind, f.detail) for f in found], reading.tensors, reading.size


def changed(root: Path, to: Path, **tensors: Any) -> Path:
    """A copy with other tensors; ``None`` takes one away."""
    safetensors = pytest.importorskip("safetensors.torch")
    to.mkdir()
    held = safetensors.load_file(root / "model.safetensors")
    for name, value in tensors.items():
        held[name] = value
    safetensors.save_file(
        {k: v for k, v in held.items() if v is not None},
        to / "model.safetensors",
        metadata={"format": "pt"},
    )
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
def test_a_large_one_is_compared_by_its_headers_alone(
    made: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(level_load, "RUNS", 0)
    found, tensors, size = looked(made, far=True)
    assert "it is too large" in found[0][1]
    assert (tensors, size) == (21, 0)


@needs_transformers
def test_names_and_shapes_that_are_not_the_models_are_damage(made: Path, tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    bad = {
        "model.norm.weight": torch.zeros(33),
        "extra": torch.zeros(1),
        "model.layers.0.mlp.up_proj.weight": None,
    }
    found, _, _ = looked(changed(made, tmp_path / "bad", **bad))
    assert [kind for kind, _ in found] == ["model"] * 3
    assert [detail.partition(":")[0] for _, detail in found] == [
        "model.layers.0.mlp.up_proj.weight",
        "extra",
        "model.norm.weight",
    ]


@needs_transformers
def test_values_that_are_not_finite_come_out_as_such(made: Path, tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    found, _, _ = looked(
        changed(made, tmp_path / "nan", **{"model.norm.weight": torch.full((32,), float("nan"))})
    )
    assert ("nonfinite", "568 of 568 values that the model computes are not finite") in found


@needs_transformers
def test_code_that_comes_with_a_model_is_not_run(made: Path, tmp_path: Path) -> None:
    root = changed(made, tmp_path / "own")
    config = json.loads((root / "config.json").read_text())
    config |= {
        "model_type": "mine",
        "auto_map": {"AutoConfig": "mine.Config", "AutoModelForCausalLM": "mine.Model"},
    }
    (root / "config.json").write_text(json.dumps(config))
    (root / "mine.py").write_text(f"open({str(tmp_path / 'canary')!r}, 'w')")
    ((kind, detail),) = looked(root)[0]
    assert (kind, detail.startswith(UNMODELLED)) == ("note", True)
    assert not (tmp_path / "canary").exists()


@needs_transformers
def test_a_kernel_of_a_repository_that_a_configuration_names_is_not_fetched(
    made: Path, tmp_path: Path
) -> None:
    keys = (
        "attn_implementation",
        "_attn_implementation",
        "experts_implementation",
        "_experts_implementation",
    )
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
    assert ("model", "the tokenizer does not load") in [
        (kind, detail.partition(":")[0]) for kind, detail in looked(root)[0]
    ]


@needs_transformers
def test_a_tokenizer_that_this_machine_lacks_a_library_for_is_no_damage(
    made: Path, tmp_path: Path
) -> None:
    root = changed(made, tmp_path / "lacking")
    (root / "tokenizer_config.json").write_text(
        '{"auto_map": {"AutoTokenizer": ["mine.Mine", null]}, "tokenizer_class": "Mine"}'
    )
    (root / "mine.py").write_text("class Mine: pass")
    found, tensors, _ = looked(root)
    assert [(kind, detail.startswith(UNMODELLED)) for kind, detail in found] == [("note", True)]
    assert tensors == 21


@needs_transformers
def test_weights_that_this_machine_lacks_a_library_for_are_no_damage(
    made: Path, tmp_path: Path
) -> None:
    root = changed(made, tmp_path / "gptq")
    config = json.loads((root / "config.json").read_text())
    (root / "config.json").write_text(
        json.dumps(config | {"quantization_config": {"quant_method": "gptq", "bits": 4}})
    )
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
    assert model_child.blame(error) == where


def test_what_transformers_imports_late_finds_where_temporary_files_go(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    libraries, root = tmp_path / "libraries", tmp_path / "model"
    libraries.mkdir()
    root.mkdir()
    (libraries / "accelerate.py").write_text("")
    (libraries / "torch.py").write_text("__version__ = 'x'\nset_num_threads = print")
    program = (
        "import tempfile\n"
        "__version__ = 'x'\n"
        "class AutoConfig:\n"
        "    def from_pretrained(*_, **__):\n"
        "        raise ValueError(f'in {tempfile.gettempdir()}')"
    )
    (libraries / "transformers.py").write_text(program)
    for name in ("config.json", "model.safetensors"):
        (root / name).write_text("{}")
    monkeypatch.setenv("PYTHONPATH", str(libraries))
    ((kind, detail),) = looked(root)[0]
    assert (kind, "ValueError: in /" in detail) == ("note", True)


# --- the directory that the child looks at

WEIGHTS = safetensors_file({"a": ("F32", (1000,), b"\1" * 4000)})
FILES = {
    "config.json": b"{}",
    "model.safetensors": WEIGHTS,
    "deeper/model.safetensors": WEIGHTS,
    "tokenizer.json": b"{}",
}


def store(files: Mapping[str, bytes] = FILES) -> tuple[MemoryStore, dict[str, ExpectedFile]]:
    made = MemoryStore()
    expected: dict[str, ExpectedFile] = {}
    for path, data in files.items():
        made.write(f"k/{path}", [data])
        expected[path] = ExpectedFile(
            f"k/{path}", path, f"c/{path}", FileDigest(len(data), "", 0, ())
        )
    return made, expected


@pytest.mark.parametrize("lacking", ["config.json", "model.safetensors"])
def test_what_is_no_model_is_said_not_to_be_looked_at_as_one(lacking: str) -> None:
    source, where = store({path: data for path, data in FILES.items() if path != lacking})
    (note,), reading = load_model(CountedSource(source), where, "c")
    assert (note.kind, note.detail.startswith(UNMODELLED), reading.files, reading.of_files) == (
        "note",
        True,
        0,
        3,
    )
    assert reached_level("model", [note]) == "load"


LIBRARIES = {
    "accelerate": "",
    "torch": "__version__ = 'x'\nset_num_threads = print",
    "transformers": (
        """import os
__version__ = 'x'
class AutoConfig:
    def from_pretrained(path, **_):
        seen = {n: (os.path.islink(path / n), os.stat(path / n).st_size) for n in os.listdir(path)}
        raise ValueError(sorted(seen.items()))
"""
    ),
}


@pytest.fixture
def looking(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stand in for transformers with libraries that tell what lies in the directory."""
    for name, text in LIBRARIES.items():
        (tmp_path / f"{name}.py").write_text(text)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))


@pytest.mark.usefixtures("looking")
@pytest.mark.parametrize("forward", [True, False])
def test_of_a_store_elsewhere_weights_are_copied_or_only_their_headers(
    monkeypatch: pytest.MonkeyPatch,
    forward: bool,  # noqa: FBT001
) -> None:
    monkeypatch.setattr(level_load, "RUNS", 1 << 20 if forward else 0)
    source, expected = store()
    counted = CountedSource(source)
    (note,), _ = load_model(counted, expected, "c")
    assert f"('model.safetensors', (False, {len(WEIGHTS)}))" in note.detail
    assert "deeper" not in note.detail
    assert (counted.read < 1000) == (not forward)


@pytest.mark.usefixtures("looking")
def test_of_this_machine_weights_are_linked(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    for path in ("config.json", "model.safetensors"):
        (tmp_path / "model" / path).write_bytes(FILES[path])
    ((_, detail),) = looked(tmp_path / "model")[0]
    assert f"('model.safetensors', (True, {len(WEIGHTS)}))" in detail
    assert "('config.json', (False, 2))" in detail


def test_a_header_that_cannot_be_is_damage_of_its_file_and_ends_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(level_load, "RUNS", 0)
    source, where = store({"config.json": b"{}", "model.safetensors": b"\xff" * 100})
    found, reading = load_model(CountedSource(source), where, "c")
    assert [(f.kind, f.name) for f in found] == [("parse", "c/model.safetensors"), ("note", "c")]
    assert (reached_level("model", found), reading.files) == ("load", 0)


def test_without_its_libraries_a_level_is_refused_before_anything_is_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(Unsupported, match="not installed") as raised:
        require("model")
    assert "ckptsync[model]" in raised.value.hint
    require("digest")
