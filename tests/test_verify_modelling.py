"""The directory that a model is looked at in, and what is said; with transformers in ``test_verify_model_child``."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from functools import partial
from pathlib import Path

import pytest

from ckptsync.errors import Unsupported
from ckptsync.records.report import LEVELS
from ckptsync.stores.memory import MemoryStore
from ckptsync.stores.tree import LocalFiles
from ckptsync.verify import modelling
from ckptsync.verify.modelling import climb, models, require
from ckptsync.verify.reading import Counted
from ckptsync.verify.structure import UNMODELLED, reached
from tests.plain_files import safetensors_file

WEIGHTS = safetensors_file({"a": ("F32", (1000,), b"\1" * 4000)})
FILES = {"config.json": b"{}", "model.safetensors": WEIGHTS, "deeper/model.safetensors": WEIGHTS, "tokenizer.json": b"{}"}
ANSWER: dict[str, object] = {"notes": [], "faults": [], "tensors": 3, "run": 0, "odd": 0}


def store(files: Mapping[str, bytes] = FILES) -> tuple[MemoryStore, dict[str, tuple[str, int]]]:
    made = MemoryStore()
    for path, data in files.items():
        made.write(f"k/{path}", [data])
    return made, {path: (f"k/{path}", len(data)) for path, data in files.items()}


def name(path: str) -> str:
    return f"c/{path}".rstrip("/")


def test_a_level_is_climbed_to_by_all_below_it_and_no_further() -> None:
    for level, wanted in (("stat", ["stat"]), ("parse", ["stat", "digest", "parse"])):
        taken: list[str] = []
        climb(level, [partial(taken.append, name) for name in LEVELS])  # type: ignore[arg-type]
        assert taken == wanted


@pytest.mark.parametrize("lacking", ["config.json", "model.safetensors"])
def test_what_is_no_model_is_said_not_to_be_looked_at_as_one(lacking: str) -> None:
    source, where = store({path: data for path, data in FILES.items() if path != lacking})
    ((note,), reading) = models(Counted(source), where, name)
    assert (note.kind, note.detail.startswith(UNMODELLED), reading.files, reading.of_files) == ("note", True, 0, 3)
    assert reached("model", [note]) == "load"


@pytest.mark.parametrize("forward", [True, False])
def test_of_a_store_elsewhere_weights_are_copied_or_only_their_headers(tmp_path: Path, forward: bool) -> None:  # noqa: FBT001
    source, where = store()
    counted = Counted(source)
    modelling._fill(tmp_path, counted, where, forward=forward)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["config.json", "model.safetensors", "tokenizer.json"]
    header = 8 + int.from_bytes(WEIGHTS[:8], "little")
    data = (tmp_path / "model.safetensors").read_bytes()
    assert data == (WEIGHTS if forward else WEIGHTS[:header] + bytes(4000))
    assert (counted.read < 1000) == (not forward)


def test_of_this_machine_weights_are_linked(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    for path in ("config.json", "model.safetensors"):
        (tmp_path / "there" / path).write_bytes(FILES[path])
    (tmp_path / "here").mkdir()
    where = {path: (path, len(FILES[path])) for path in ("config.json", "model.safetensors")}
    modelling._fill(tmp_path / "here", Counted(LocalFiles(str(tmp_path / "there"))), where, forward=True)
    assert (tmp_path / "here" / "model.safetensors").readlink() == tmp_path / "there" / "model.safetensors"
    assert not (tmp_path / "here" / "config.json").is_symlink()


def test_a_header_that_cannot_be_is_damage_of_its_file_and_ends_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(modelling, "RUNS", 0)
    source, where = store({"config.json": b"{}", "model.safetensors": b"\xff" * 100})
    found, reading = models(Counted(source), where, name)
    assert [(f.kind, f.name) for f in found] == [("parse", "c/model.safetensors"), ("note", "c")]
    assert (reached("model", found), reading.files) == ("load", 0)


def test_what_does_not_fit_is_damage_and_what_could_not_be_done_is_a_note() -> None:
    told = ANSWER | {"faults": ["a: of shape (1,)"], "notes": ["odd"], "run": 568, "odd": 4}
    found = list(modelling._findings(told, name, "x", forward=True))
    assert [(f.kind, f.name) for f in found] == [("model", "c/config.json"), ("note", "c/config.json"), ("nonfinite", "c")]
    assert found[2].detail.startswith("4 of 568 values")


@pytest.mark.parametrize(("run", "forward", "said"), [(568, True, "run on"), (0, False, "not run: it is too large")])
def test_a_model_that_fits_is_said_to_and_whether_it_was_run(run: int, forward: bool, said: str) -> None:  # noqa: FBT001
    (note,) = modelling._findings(ANSWER | {"run": run}, name, "transformers 5", forward=forward)
    assert said in note.detail
    assert reached("model", [note]) == "model"


@pytest.mark.skipif(importlib.util.find_spec("transformers") is not None, reason="transformers is installed")
def test_without_transformers_the_level_is_refused_before_anything_is_read() -> None:
    with pytest.raises(Unsupported, match="not installed") as raised:
        require("model")
    assert "ckptsync[model]" in raised.value.hint
    require("digest")
