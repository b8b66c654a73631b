"""Level load: files are loaded in a child process, archives compared with their CRC32s."""

from __future__ import annotations

import shutil
import stat
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ckptsync.digest import FileDigest
from ckptsync.errors import Incomplete, StoreError, Unsupported
from ckptsync.formats import torch_zip
from ckptsync.records.report import VerifyFinding
from ckptsync.stores.checkpoint_files import DirectoryFiles, directory_files
from ckptsync.stores.memory import MemoryStore
from ckptsync.tensors import Extent
from ckptsync.verifier.expected_files import ExpectedFile, directory_file
from ckptsync.verifier.level_digest import check_crc32s, find_archives
from ckptsync.verifier.level_load import Died, LoaderProcess, load_file, load_files, open_file
from ckptsync.verifier.level_parse import UNLOADED
from ckptsync.verifier.tracked_files import CountedSource, TrackedFiles
from tests.support.dcp_writer import packed
from tests.support.files_in_memory import MemoryFiles, safetensors_file, torch_zip_file, tree
from tests.support.vector import vector

NAN = safetensors_file({"a": ("F32", (2,), b"\0\0\x80\x7f\0\0\xc0\x7f"), "b": ("U8", (1,), b"x")})


def file(name: str, size: int, shown: str = "") -> ExpectedFile:
    return replace(directory_file(name, FileDigest(size, "", 0, ())), shown=shown or name)


NOTHING = TrackedFiles(MemoryFiles({}), "checkpoint-4")


def test_what_has_no_tensors_is_not_loaded() -> None:
    findings, reading = load_files(CountedSource(MemoryStore()), [file("x.json", 5)], NOTHING)
    assert ([f.kind for f in findings], reading.size) == (["note"], 0)
    assert "nothing to load" in findings[0].detail


def test_torch_loads_shards_of_every_kind_and_what_does_not_load_is_told(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    for name in ("hf-fsdp1", "hf-zero3-2node", "verl-fsdp2", "bin-legacy", "hf-ddp"):
        shutil.copytree(vector(name).sources[0], tmp_path / name)
    good = DirectoryFiles(str(tmp_path)).sizes()
    for name, data in (("bad", NAN[:-1]), ("empty", b""), ("nan", NAN)):
        (tmp_path / f"{name}.safetensors").write_bytes(data)
    files = DirectoryFiles(str(tmp_path))
    parts = [file(path, size) for path, size in files.sizes().items()]
    findings, reading = load_files(CountedSource(files), parts, TrackedFiles(files))
    by_name = {f.name: f for f in findings if f.name not in good}
    assert [(f.kind, f.name, f.tensors) for f in by_name.values()] == [
        ("load", "bad.safetensors", ()),
        ("load", "empty.safetensors", ()),
        ("nonfinite", "nan.safetensors", ("a",)),
        ("note", "", ()),
    ]
    assert "header" in by_name["bad.safetensors"].detail.lower()
    assert "2 values" in by_name["nan.safetensors"].detail
    assert f"{reading.tensors} tensors of {reading.files} files loaded with safetensors" in (
        by_name[""].detail
    )
    wrong = [
        f
        for f in findings
        if f.name in good and (f.kind not in ("note", "nonfinite") or f.detail.startswith(UNLOADED))
    ]
    assert wrong == []
    assert reading.of_files - 2 == reading.files > 20
    assert reading.tensors > 220


def test_what_is_compressed_or_has_no_metadata_is_said_not_to_be_loaded() -> None:
    files = MemoryFiles(packed())
    parts = [file(path, size) for path, size in files.sizes().items()]
    for checkpoint, why in ((files, "compressed"), (MemoryFiles({}), "no readable .metadata")):
        findings, reading = load_files(CountedSource(files), parts, TrackedFiles(checkpoint))
        notes = [f for f in findings if f.detail.startswith(UNLOADED)]
        assert len(notes) == reading.of_files > reading.files == 0
        assert all(why in f.detail for f in notes)


# --- one file in a child

GOOD = safetensors_file(
    {"a": ("F32", (4,), b"\0" * 16), "b": ("F32", (2,), b"\0\0\x80\x7f\0\0\xc0\x7f")}
)


def loaded(
    child: LoaderProcess, path: Path, data: bytes = GOOD, kind: str = "safetensors"
) -> Mapping[str, Any]:
    path.write_bytes(data)
    return load_file(child, DirectoryFiles(str(path.parent)), file(path.name, len(data)), kind)


def test_a_child_without_memory_is_a_fault(tmp_path: Path) -> None:
    path = tmp_path / "f"
    path.write_bytes(safetensors_file({"a": ("U8", (64 << 20,), bytes(64 << 20))}))
    request = {"kind": "safetensors", "items": (), "memory": -(140 << 20), "cpu": 20, "wall": 20}
    with LoaderProcess() as child, path.open("rb") as opened:
        try:
            answer = child.ask(request, [opened.fileno()])
        except Died as e:
            answer = {"fault": str(e)}
    assert answer["fault"]


def test_nothing_is_imported_from_where_the_caller_stands_and_no_other_file_is_damage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("torch", "safetensors", "numpy", "json", "ckptsync"):
        (tmp_path / f"{name}.py").write_text(f"open({str(tmp_path / 'canary')!r}, 'w')")
    monkeypatch.chdir(tmp_path)
    with LoaderProcess() as child:
        assert loaded(child, tmp_path / "f")["tensors"] == 2
        assert set(loaded(child, tmp_path / "f", b"hello", kind="torch")) == {"refused"}
    assert not (tmp_path / "canary").exists()


def test_a_file_elsewhere_is_copied_and_a_near_one_is_not(tmp_path: Path) -> None:
    store = MemoryStore()
    store.write("f", [GOOD])
    (tmp_path / "f").write_bytes(GOOD)
    snapshot = tmp_path / "models--a--b/snapshots/1"
    snapshot.mkdir(parents=True)
    (snapshot.parent.parent / "blobs").mkdir()
    (snapshot.parent.parent / "blobs/ab12").write_bytes(GOOD)
    (snapshot / "f").symlink_to("../../blobs/ab12")
    for source in (store, DirectoryFiles(str(tmp_path)), directory_files(str(snapshot))):
        with open_file(source, "f", len(GOOD)) as fd:
            assert Path(f"/dev/fd/{fd}").read_bytes() == GOOD


@pytest.mark.parametrize("kind", ["near", "far"])
def test_what_has_gone_is_incomplete(kind: str, tmp_path: Path) -> None:
    source = DirectoryFiles(str(tmp_path)) if kind == "near" else MemoryStore()
    with pytest.raises(Incomplete, match="not found"), open_file(source, "gone", 1):
        pass


def without(path: Path, *missing: str) -> LoaderProcess:
    """A child whose interpreter lacks some packages."""
    hide = "; ".join(f"sys.modules[{name!r}] = None" for name in missing)
    path.write_text(
        "#!/bin/sh\n"
        f'exec {sys.executable} -c "import sys; {hide}; from ckptsync.verifier.load_child import '
        'main; sys.exit(main())"\n'
    )
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return LoaderProcess(python=str(path))


def test_without_its_libraries_nothing_is_loaded_silently(tmp_path: Path) -> None:
    for missing in ("torch", "safetensors"):
        lacking = without(tmp_path / "python", missing)
        with lacking as child, pytest.raises(Unsupported, match=f"{missing} is not installed"):
            loaded(child, tmp_path / "f")


# --- archives and their CRC32s

FSDP = tree(*vector("hf-fsdp2-2node").sources)


def test_every_shard_has_its_items_one_behind_the_other_weights_or_not() -> None:
    found = find_archives(FSDP)
    assert set(found) == {path for path in FSDP.content if path.endswith(".distcp")}
    for path, its in found.items():
        assert its
        ends = [start + size for start, size, _ in its]
        assert [start for start, _, _ in its] == [0, *ends[:-1]]
        assert ends[-1] <= len(FSDP.content[path])


def test_what_metadata_cannot_tell_is_left_out() -> None:
    broken = {**FSDP.content, "pytorch_model_fsdp_0/.metadata": b"x"}
    assert {path.partition("/")[0] for path in find_archives(MemoryFiles(broken))} == {
        "optimizer_0"
    }


def test_a_store_that_does_not_answer_is_no_missing_metadata() -> None:
    class Broken(MemoryFiles):
        def read_into(self, name: str, start: int, out: memoryview) -> None:
            raise StoreError("input/output error")

    with pytest.raises(StoreError):
        find_archives(Broken(FSDP.content))


SHARDS = FSDP.content
ZERO = tree(*vector("hf-zero3-2node").sources).content
OPTIMIZER = "optimizer_0/__1_0.distcp"
STATES = next(path for path in ZERO if path.endswith("optim_states.pt"))


def compared(files: dict[str, bytes]) -> tuple[list[VerifyFinding], int, int]:
    return check_crc32s(TrackedFiles(MemoryFiles(files)), "digest")


def tensor_byte(files: dict[str, bytes], path: str) -> int:
    """A byte in the middle of a tensor."""
    tree = MemoryFiles(files)
    inside = find_archives(tree).get(path)
    locations = [(start, size) for start, size, _ in inside] if inside else [(0, len(files[path]))]
    archives = [
        torch_zip.open_archive(tree, Extent(path, start, size)) for start, size in locations
    ]
    archive = next(archive for archive in archives if "data/0" in archive.records)
    where = torch_zip.extent(tree, archive, "data/0")
    return where.start + where.size // 2


@pytest.mark.parametrize("files", [SHARDS, ZERO], ids=["fsdp2", "zero3"])
def test_real_files_have_their_checksums(files: dict[str, bytes]) -> None:
    found, count, size = compared(files)
    assert found == []
    assert 0 < size < sum(map(len, files.values()))
    assert count == sum(path.endswith((".distcp", ".pt", ".pth", ".bin")) for path in files)


@pytest.mark.parametrize(
    ("files", "path"), [(SHARDS, OPTIMIZER), (ZERO, STATES)], ids=["fsdp2", "zero3"]
)
def test_a_flipped_bit_in_an_optimizers_shard_is_found(files: dict[str, bytes], path: str) -> None:
    data = bytearray(files[path])
    data[tensor_byte(files, path)] ^= 4
    found, _, _ = compared({**files, path: bytes(data)})
    assert [(f.kind, f.name) for f in found] == [("digest", path)]
    assert "CRC32" in found[0].detail


def test_what_has_none_is_not_claimed() -> None:
    files = {"m.safetensors": safetensors_file({"a": ("U8", (3,), b"abc")}), "a.json": b"{}"}
    assert compared(files) == ([], 0, 0)


def test_an_archive_of_a_version_that_torch_does_not_open_is_found() -> None:
    data = torch_zip_file({"data.pkl": b"\x80\x02N.", "byteorder": b"little", "version": b"0"})
    found, _, _ = compared({"rng_state_0.pth": data})
    assert ["version is b'0'" in str(one) for one in found] == [True]
