from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from shutil import copyfile, copytree

import numpy as np
import pytest

from ckptsync.catalogue.cached import read_catalogue
from ckptsync.catalogue.location_summary import summarize
from ckptsync.catalogue.uncached import read_state
from ckptsync.errors import Corrupt, Incomplete, StoreError, Unsupported
from ckptsync.head.consolidate import HeadOptions, consolidate_location
from ckptsync.merger.plan import MergeOptions
from ckptsync.records.layer_groups import layer_group
from ckptsync.records.location_status import LocationState
from ckptsync.records.model_record import ModelRecord
from ckptsync.records.report import VerifyFinding
from ckptsync.records.save_decisions import Tombstone
from ckptsync.records.store_paths import parse_record_name
from ckptsync.records.weights_record import ModelValues
from ckptsync.stores.contract import UNKNOWN, About, Chunk, read_all
from ckptsync.stores.memory import MemoryStore
from ckptsync.tensors import Demands
from ckptsync.verifier.level_parse import UNPARSED
from tests.support.adapters import Q, write_adapter, write_base
from tests.support.adapters import delta as adapter_delta
from tests.support.adapters import pair as adapter_pair
from tests.support.crashing_store import Crash, Dying
from tests.support.dcp_writer import packed
from tests.support.exhaustive import EVERY_OTHER
from tests.support.filled_stores import (
    DEMO,
    FIRST,
    SECOND,
    contents,
    flip,
    manifest_of,
    put,
    report_on,
    send,
    two_nodes,
)
from tests.support.head_in_process import Consolidated, consolidate_due
from tests.support.verified_stores import verified

MODEL = "run/consolidated/checkpoint-4/model.safetensors"
CONFIG = "run/consolidated/checkpoint-4/config.json"
SHARD = "run/checkpoint-4/pytorch_model_fsdp_0/__1_0.distcp"
ZERO_SHARD = "run/checkpoint-4/global_step4/zero_pp_rank_1_mp_rank_00_optim_states.pt"
BASE = HeadOptions(config_from={"run": str(DEMO / "base")})
VECTORS = Path(__file__).parents[1] / "vectors"


class Watched(MemoryStore):
    """Calls ``watch`` with each name and what is said of its content, before it is created."""

    def __init__(self, watch: Callable[..., object], url: str = "mem://store") -> None:
        super().__init__(url)
        self._watch = watch

    def create(self, name: str, chunks: Iterable[Chunk], about: About = UNKNOWN) -> None:
        self._watch(name, about)
        super().create(name, chunks, about)


def made(result: Consolidated) -> list[str]:
    return [m.location for m in result.made]


def model_records(store: MemoryStore) -> list[str]:
    parsed = {e.name: parse_record_name(e.name) for e in store.names("")}
    return [name for name, p in parsed.items() if p and p.kind == "model"]


def body(data: bytes) -> dict[str, bytes]:
    size = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + size])
    header.pop("__metadata__", None)
    return {
        k: data[8 + size + v["data_offsets"][0] : 8 + size + v["data_offsets"][1]]
        for k, v in header.items()
    }


def weights_of(store: MemoryStore) -> ModelValues | None:
    """Return the values of the only location, as each reader of a store has them."""
    uncached = read_state(store)
    (summary,) = read_catalogue(store).summaries
    assert summary == uncached.summary_of(uncached.locations[0])
    return summary.weights


def test_the_values_of_a_model_are_recorded_as_numpy_counts_them_and_change_nothing_else() -> None:
    plain, store = MemoryStore(), MemoryStore()
    for each, statistics in ((plain, False), (store, True)):
        two_nodes(each)
        consolidate_due(each, BASE, statistics=statistics)
    names = contents(store).keys() - contents(plain).keys()
    assert {name.rpartition("/")[2].partition("-")[0] for name in names} == {"weights"}
    assert contents(plain).items() <= contents(store).items()
    assert weights_of(plain) is None
    arrays = {
        name: np.frombuffer(data, "<f4").astype("f8")
        for name, data in body(read_all(store, MODEL)).items()
    }
    values = weights_of(store)
    assert values is not None
    assert (values.nonfinite, values.uncounted) == (0, 0)
    assert sum(g.tensors for g in values.groups) == len(arrays)
    for group in values.groups:
        own = np.concatenate([a for n, a in arrays.items() if layer_group(n) == group.group])
        assert (group.size, group.zeros) == (own.size, (own == 0).sum())
        assert group.norm == pytest.approx(np.linalg.norm(own), rel=1e-5)
        assert (group.low, group.high) == pytest.approx((own.min(), own.max()), rel=1e-5)


def test_a_head_that_dies_anywhere_leaves_no_model_without_all_its_files_and_values() -> None:
    whole = MemoryStore()
    two_nodes(whole)
    consolidate_due(whole, BASE, statistics=True)
    assert weights_of(whole)
    for lives in itertools.count(0, EVERY_OTHER):
        store = MemoryStore()
        two_nodes(store)
        try:
            consolidate_due(Dying(store, lives), BASE, statistics=True)
        except Crash:
            assert not model_records(store) or contents(store) == contents(whole)
            consolidate_due(store, BASE, statistics=True)
            assert contents(store) == contents(whole)
        else:
            break
    assert lives > 3 * 6  # six files and two records, three moments each


def test_configuration_that_comes_later_leaves_a_model_its_values_and_damage_takes_only_those() -> (
    None
):
    store = MemoryStore()
    two_nodes(store)
    consolidate_due(store, statistics=True)
    before = weights_of(store)
    assert before
    consolidate_location(store, "run", "", BASE)
    assert (len(model_records(store)), weights_of(store)) == (2, before)
    (name,) = [name for name in contents(store) if "/weights-" in name]
    flip(store, name, 3)
    seen = read_state(store)
    assert [fault.name for fault in seen.faults] == [name]
    summary = seen.summary_of(seen.readable[0])
    assert (summary.status, summary.weights) == ("CONSOLIDATED", None)
    assert [f.kind for f in verified(store, "digest").findings if f.name in name] == ["note"]


def test_a_head_that_may_not_write_values_makes_the_model_all_the_same() -> None:
    for error in (StoreError, Unsupported):

        def refuse(name: str, _: About, error: type[Exception] = error) -> None:
            if "/weights-" in name:
                raise error("access denied")

        store = Watched(refuse)
        two_nodes(store)
        (model,) = consolidate_due(store, BASE, statistics=True).made
        assert [note for note in model.notes if "access denied" in note]
        assert (len(model_records(store)), weights_of(store)) == (1, None)


def test_halves_of_two_saves_in_one_location_are_not_merged() -> None:
    store = MemoryStore()
    send(store, DEMO / "fsdp2/node0/checkpoint-4", "node0")
    send(store, DEMO / "fsdp2/node1/checkpoint-4", "node1", at=FIRST + 3600 * SECOND)
    result = consolidate_due(store, BASE)
    assert (result.made, result.catalogue.readable[0].status) == ((), "CONFLICT")


def test_items_of_torchs_zstandard_extension_are_stored_and_verified_and_not_merged(
    tmp_path: Path,
) -> None:
    for name, data in packed().items():
        (tmp_path / name).write_bytes(data)
    store = MemoryStore()
    send(store, tmp_path, "node0")
    (refused,) = consolidate_due(store, BASE).failed
    assert isinstance(refused.error, Unsupported)
    assert str(refused.error).endswith("item w was packed by torch's ZStandard extension")
    assert MODEL not in contents(store)
    for report in (verified(store, "digest"), verified(store, "parse")):
        assert (report.verdict, report.level) == ("ok", "digest")
    (note,) = [one.detail for one in report.findings if one.detail.startswith(UNPARSED)]
    assert "ZStandard" in note


def test_a_damaged_shard_is_never_merged_and_stops_no_other_location() -> None:
    store = MemoryStore()
    two_nodes(store)
    two_nodes(store, "zero3", "checkpoint-5")
    flip(store, SHARD, 50_000)
    result = consolidate_due(store, BASE)
    assert made(result) == ["checkpoint-5"]
    assert [(f.location, type(f.error)) for f in result.failed] == [("checkpoint-4", Corrupt)]
    assert MODEL not in contents(store)


def test_whatever_bit_of_a_shard_is_flipped_the_model_is_the_true_one_or_is_not_made() -> None:
    whole = MemoryStore()
    two_nodes(whole, "zero3")
    consolidate_due(whole, BASE)
    made_anyway = []
    for at in range(0, whole.size(ZERO_SHARD), 4_003):
        store = MemoryStore()
        two_nodes(store, "zero3")
        flip(store, ZERO_SHARD, at)
        made_anyway += made(consolidate_due(store, BASE))
        assert contents(store).get(MODEL, b"") in (b"", contents(whole)[MODEL])
    assert made_anyway  # the optimizer's own state is not read for a model


def test_a_format_without_any_check_of_its_own_is_checked_all_the_same(tmp_path: Path) -> None:
    store = MemoryStore()
    (tmp_path / "model.safetensors").write_bytes(
        (VECTORS / "hf-fsdp2-2node/reference/full.safetensors").read_bytes()
    )
    send(store, tmp_path, "node0")
    flip(store, "run/checkpoint-4/model.safetensors", -1)
    assert [type(f.error) for f in consolidate_due(store, BASE).failed] == [Corrupt]
    flip(store, "run/checkpoint-4/model.safetensors", -1)
    assert made(consolidate_due(store, BASE)) == ["checkpoint-4"]


def test_the_model_of_named_adapters_has_each_in_the_directory_of_its_name(tmp_path: Path) -> None:
    store = MemoryStore()
    for name in ("policy", "reference"):
        copytree(VECTORS / "peft-adapter" / "out", tmp_path / name)
    send(store, tmp_path, "node0")
    (several,) = consolidate_due(store, replace(BASE, into={"*": "/nowhere"})).made
    assert "several adapters: they are not summed into /nowhere" in several.notes
    whole = contents(store)
    for name in ("policy", "reference"):
        prefix, own = f"run/consolidated/checkpoint-4/{name}", tmp_path / name
        config, weights = f"{prefix}/adapter_config.json", f"{prefix}/adapter_model.safetensors"
        assert read_all(store, config) == (own / "adapter_config.json").read_bytes()
        trained = (own / "adapter_model.safetensors").read_bytes()
        assert body(read_all(store, weights)) == body(trained)
        for file in (config, weights):
            store.delete(file)
            (model,) = consolidate_due(store, BASE).made
            assert model.files == (file.removeprefix("run/consolidated/checkpoint-4/"),)
    assert contents(store) == whole
    assert summarize(look(store), {}).to_open == ()


# One model is made, repaired and completed; nothing that a model record names ever changes.


def look(store: MemoryStore) -> LocationState:
    return consolidate_due(store, BASE).catalogue.readable[0]


def complain(store: MemoryStore, name: str, n: int = 0) -> None:
    finding = VerifyFinding("digest", name.removeprefix("run/"), "bytes differ")
    put(store, report_on(look(store), n, "damaged", [finding]))


def test_a_damaged_model_file_is_made_again_from_the_shards() -> None:
    store = MemoryStore()
    two_nodes(store)
    consolidate_due(store, BASE)
    before = contents(store)
    flip(store, MODEL, 30_000)
    complain(store, MODEL)
    assert consolidate_due(store, BASE).made[0].files == ("model.safetensors",)
    assert {name: d for name, d in contents(store).items() if "report" not in name} == before


def test_the_index_of_a_model_in_several_files_can_be_made_again() -> None:
    store, options = MemoryStore(), replace(BASE, merge=MergeOptions(max_shard_size=9_000))
    two_nodes(store)
    consolidate_due(store, options)
    before = contents(store)
    store.delete("run/consolidated/checkpoint-4/model.safetensors.index.json")
    store.delete("run/consolidated/checkpoint-4/model-00002-of-00005.safetensors")
    # this head's own options do not matter
    assert len(consolidate_due(store, BASE).made[0].files) == 2
    assert contents(store) == before


def test_a_model_whose_sources_have_changed_is_not_repaired_into_something_else(
    tmp_path: Path,
) -> None:
    store = MemoryStore()
    two_nodes(store)
    consolidate_due(store, BASE)
    store.delete(CONFIG)
    (tmp_path / "config.json").write_text("{}")
    failed = consolidate_due(store, HeadOptions(config_from={"run": str(tmp_path)})).failed
    assert "does not match its model record" in str(failed[0].error)
    assert CONFIG not in contents(store)


def test_a_complaint_about_bytes_that_are_well_writes_nothing() -> None:
    store = MemoryStore()
    two_nodes(store)
    consolidate_due(store, BASE)
    complain(store, MODEL)
    before = contents(store)
    assert consolidate_due(store, BASE).made == ()
    assert contents(store) == before


def test_configuration_that_comes_with_the_final_model_is_added_under_a_further_model_record() -> (
    None
):
    store = MemoryStore()
    two_nodes(store)
    assert "no config.json" in consolidate_due(store, HeadOptions()).made[0].notes[0]
    weights = contents(store)[MODEL]
    send(store, DEMO / "base", "node0", "final")
    assert "config.json" in consolidate_due(store, HeadOptions()).made[0].files
    after = consolidate_due(store, HeadOptions())
    assert (after.made, contents(store)[MODEL], len(model_records(store))) == ((), weights, 2)
    assert (
        "config.json=final"
        in after.catalogue.readable[0]
        .records.model_records[model_records(store)[1]]
        .options["config"]
    )


def test_a_late_file_that_the_model_does_not_need_leaves_the_model_record() -> None:
    store = MemoryStore()
    two_nodes(store)
    consolidate_due(store, BASE)
    late = look(store).manifests[1].manifest
    put(store, replace(late, n=1, files=(replace(late.files[0], path="README.md"),)))
    result = consolidate_due(store, BASE)
    assert (result.made, result.catalogue.readable[0].conditions.consolidated.holds) == ((), True)


def test_other_options_do_not_write_over_what_is_consolidated() -> None:
    store = MemoryStore()
    two_nodes(store)
    consolidate_due(store, BASE)
    before = contents(store)
    assert consolidate_due(store, replace(BASE, merge=MergeOptions(dtype="fp16"))).made == ()
    assert contents(store) == before


def test_a_file_that_goes_while_a_complaint_is_not_answered_is_made_again() -> None:
    store = MemoryStore()
    two_nodes(store)
    consolidate_due(store, BASE)
    complain(store, MODEL)
    consolidate_due(store, BASE)
    store.delete(MODEL)
    flip(store, CONFIG)  # which nobody has reported: it decides nothing
    assert consolidate_due(store, BASE).made[0].files == ("model.safetensors",)


def test_a_configuration_that_nothing_has_any_more_is_said_to_be_lost() -> None:
    store = MemoryStore()
    two_nodes(store)
    consolidate_due(store, BASE)
    store.delete(CONFIG)
    failed = consolidate_due(store, HeadOptions()).failed
    assert [type(f.error) for f in failed] == [Incomplete]
    assert "config.json: cannot be rebuilt" in str(failed[0].error)


def consolidated(store: MemoryStore) -> ModelRecord:
    seen = read_state(store).of("run", "checkpoint-4")
    assert seen
    assert seen.model_record
    return seen.model_record


def coded(directory: Path, own: Path, name: str) -> Path:
    """A copy with a configuration that leads to code, and the code."""
    copytree(own, directory)
    config = json.loads((DEMO / "base/config.json").read_text()) | {
        "auto_map": {"AutoModel": f"modeling_{name}.X"}
    }
    (directory / "config.json").write_text(json.dumps(config))
    (directory / f"modeling_{name}.py").write_text(name)
    return directory


@pytest.mark.parametrize("location", ["checkpoint-4", "final"])
def test_code_that_a_node_has_sent_is_left_out_at_once_and_later(
    tmp_path: Path, location: str
) -> None:
    for is_late in (False, True):
        store = MemoryStore()
        two_nodes(store)
        if is_late:
            consolidate_due(store, HeadOptions())
        directory = coded(tmp_path / f"{location}{is_late}", DEMO / "base", "theirs")
        if location == "final":
            send(store, directory, "node0", location)
        else:
            put_files(store, directory)
        consolidate_due(store, HeadOptions())
        model_record = consolidated(store)
        assert {f.path for f in model_record.files} >= {"config.json", "tokenizer.json"}
        assert not [f.path for f in model_record.files if f.path.endswith(".py")]
        assert model_record.left_out == ("config.json: auto_map", "modeling_theirs.py")
        assert b"auto_map" not in read_all(store, CONFIG)
        assert not summarize(look(store), {}).late


def put_files(store: MemoryStore, directory: Path, location: str = "checkpoint-4") -> None:
    """What a node sends later of a checkpoint, under a further manifest."""
    for path in directory.iterdir():
        store.write(f"run/{location}/{path.name}", [path.read_bytes()])
    late = manifest_of(directory, "node0", location)
    put(store, replace(late, n=1, demands=Demands(), sources=()))


def test_a_model_with_the_operators_code_is_made_again_as_it_was(tmp_path: Path) -> None:
    theirs = coded(tmp_path / "theirs", DEMO / "fsdp2/node0/checkpoint-4", "theirs")
    options = HeadOptions(config_from={"*": str(coded(tmp_path / "mine", DEMO / "base", "mine"))})
    store = MemoryStore()
    send(store, theirs, "node0")
    send(store, DEMO / "fsdp2/node1/checkpoint-4", "node1")
    consolidate_due(store, options)
    before = contents(store)
    assert consolidated(store).left_out == ("modeling_theirs.py",)
    assert json.loads(read_all(store, CONFIG))["auto_map"] == {"AutoModel": "modeling_mine.X"}
    for name in [name for name in before if "/consolidated/" in name]:
        store.delete(name)
    assert not consolidate_due(store, options).failed
    assert contents(store) == before


TIED = VECTORS / "acc-fsdp2-bf16-tied" / "out/checkpoints/checkpoint_0"


@pytest.mark.parametrize("location", ["checkpoint-4", "final"])
def test_ties_that_are_known_too_late_do_not_change_the_weights(
    tmp_path: Path, location: str
) -> None:
    store = MemoryStore()
    send(store, TIED, "node0")
    consolidate_due(store, HeadOptions())
    weights = contents(store)[MODEL]
    if location == "final":
        send(store, VECTORS / "base-tied", "node0", location)
    else:
        copyfile(VECTORS / "base-tied/config.json", tmp_path / "config.json")
        put_files(store, tmp_path)
    assert "config.json" in consolidate_due(store, HeadOptions()).made[0].files
    store.delete(MODEL)
    consolidate_due(store, HeadOptions())
    assert contents(store)[MODEL] == weights
    other = MemoryStore()
    send(other, TIED, "node0")
    consolidate_due(other, HeadOptions(config_from={"*": str(VECTORS / "base-tied")}))
    assert contents(other)[MODEL] != weights


def noted(tmp_path: Path, note: str) -> Path:
    """A configuration that says from which checkpoint it is."""
    config = json.loads((DEMO / "base/config.json").read_text()) | {"note": note}
    directory = tmp_path / note
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(config))
    return directory


def test_the_newest_checkpoint_with_the_same_tensors_lends_its_configuration(
    tmp_path: Path,
) -> None:
    store = MemoryStore()
    for step in (2, 3, 4):
        two_nodes(store, location=f"checkpoint-{step}")
        if step != 4:
            put_files(store, noted(tmp_path, str(step)), f"checkpoint-{step}")
    write_base(tmp_path / "another")
    send(store, tmp_path / "another", "node0", "checkpoint-5")
    consolidate_due(store, HeadOptions())
    consolidate_location(store, "run", "", HeadOptions())
    whole = contents(store)
    assert json.loads(whole[CONFIG])["note"] == "3"
    assert consolidated(store).options["config"] == "config.json=checkpoint-3"
    two_nodes(store, location="checkpoint-6")
    put_files(store, noted(tmp_path, "newer"), "checkpoint-6")
    consolidate_due(store, HeadOptions())
    store.delete(CONFIG)
    assert consolidate_location(store, "run", "checkpoint-4", HeadOptions())[0].files == (
        "config.json",
    )
    assert contents(store)[CONFIG] == whole[CONFIG]


def test_of_two_final_models_the_newer_one_lends_its_configuration(tmp_path: Path) -> None:
    store = MemoryStore()
    two_nodes(store)
    send(store, noted(tmp_path, "old"), "node0", "final~0123abcd", at=FIRST - 3600 * SECOND)
    send(store, noted(tmp_path, "new"), "node0", "final")
    consolidate_due(store, HeadOptions())
    assert json.loads(contents(store)[CONFIG])["note"] == "new"


def test_configuration_added_later_says_what_it_would_have_said_at_once() -> None:
    late, at_once = MemoryStore(), MemoryStore()
    two_nodes(late)
    two_nodes(at_once)
    options = replace(BASE, merge=MergeOptions(dtype="bf16"))
    consolidate_due(late, replace(options, config_from={}))
    consolidate_due(late, options)
    consolidate_due(at_once, options)
    assert contents(late)[CONFIG] == contents(at_once)[CONFIG]


def test_a_damaged_shard_repairs_nothing() -> None:
    store = MemoryStore()
    two_nodes(store)
    consolidate_due(store, BASE)
    store.delete(MODEL)
    flip(store, SHARD, 50_000)
    assert [type(f.error) for f in consolidate_due(store, BASE).failed] == [Corrupt]
    assert MODEL not in contents(store)


@pytest.mark.parametrize("word", ["CONFLICT", "RETIRED"])
def test_a_final_model_that_is_in_doubt_or_given_up_lends_no_configuration(word: str) -> None:
    store = MemoryStore()
    two_nodes(store)
    name = send(store, DEMO / "base", "node0", "final")
    if word == "RETIRED":
        put(store, Tombstone("run", "final", "final", 0, (name,), "old"))
    else:
        send(store, DEMO / "base", "node1", "final", at=FIRST + 3600 * SECOND)
    made = next(
        m for m in consolidate_due(store, HeadOptions()).made if m.location == "checkpoint-4"
    )
    assert made.files == ("model.safetensors",)


def test_an_adapter_is_not_given_the_base_models_configuration(tmp_path: Path) -> None:
    store = MemoryStore()
    source = next((VECTORS / "peft-adapter").rglob("adapter_config.json")).parent
    send(store, source, "node0")
    (tmp_path / "config.json").write_text("{}")
    options = HeadOptions(config_from={"*": str(tmp_path)})
    files = consolidate_due(store, options).made[0].files
    assert "adapter_config.json" in files
    assert "config.json" not in files
    assert consolidate_due(store, options).made == ()


ADAPTER = "run/consolidated/checkpoint-4/adapter_model.safetensors"


def test_an_adapter_out_of_shards_is_consolidated_repaired_and_completed_as_one(
    tmp_path: Path,
) -> None:
    store = MemoryStore()
    send(store, VECTORS / "hf-fsdp2-lora" / "out" / "checkpoint-4", "node0")
    assert consolidate_due(store, HeadOptions()).made[0].files == ("adapter_model.safetensors",)
    before = contents(store)[ADAPTER]
    (tmp_path / "adapter_config.json").write_text('{"bias": "none"}')
    found = HeadOptions(config_from={"run": str(tmp_path)})
    assert consolidate_due(store, found).made[0].files == ("adapter_config.json",)
    flip(store, ADAPTER, 2_000)
    complain(store, ADAPTER)
    assert consolidate_due(store, found).made[0].files == ("adapter_model.safetensors",)
    assert contents(store)[ADAPTER] == before


def test_an_upload_of_a_model_can_be_continued_by_a_head_that_makes_the_same_and_by_no_other() -> (
    None
):
    def origin(options: HeadOptions) -> str:
        abouts: dict[str, About] = {}
        store = Watched(abouts.__setitem__)
        two_nodes(store)
        consolidate_due(store, options)
        assert abouts[MODEL].size == store.size(MODEL)
        return abouts[MODEL].origin

    assert origin(BASE) == origin(BASE)
    assert origin(BASE) != origin(replace(BASE, merge=MergeOptions("bf16")))


def test_a_damaged_model_record_and_a_damaged_file_that_it_named_are_both_made_again() -> None:
    store = MemoryStore()
    two_nodes(store)
    consolidate_due(store, BASE)
    before = contents(store)
    flip(store, model_records(store)[0], 50)
    flip(store, MODEL, 30_000)
    assert [m.model_record for m in consolidate_due(store, BASE).made] == model_records(store)
    assert contents(store) == before


def test_an_adapter_is_summed_into_the_base_that_its_run_has_and_repaired_so(
    tmp_path: Path,
) -> None:
    base, out = tmp_path / "base", tmp_path / "checkpoint-4"
    tensors, own = write_base(base), adapter_pair(Q.removesuffix(".weight"), 1)
    write_adapter(out, own)
    options = HeadOptions(into={"run": str(base)})
    whole = MemoryStore("mem://store")
    send(whole, out, "node0")
    (model,) = consolidate_due(whole, options).made
    assert {"model.safetensors", "config.json", "tokenizer.json"} <= set(model.files)
    stored = {k: np.frombuffer(v, "<f4") for k, v in body(read_all(whole, MODEL)).items()}
    wanted = tensors | {Q: tensors[Q] + adapter_delta(own, Q.removesuffix(".weight"))}
    assert stored.keys() == wanted.keys()
    assert all(np.array_equal(stored[n], t.reshape(-1)) for n, t in wanted.items())
    for lives in itertools.count(1, EVERY_OTHER):
        store = MemoryStore("mem://store")
        send(store, out, "node0")
        try:
            consolidate_due(Dying(store, lives), options)
        except Crash:
            consolidate_due(store, options)
            assert contents(store) == contents(whole)
        else:
            break
    before = contents(whole)
    assert consolidated(whole).options["into"].startswith(f"{base} ")
    changed = Watched(lambda *_: (base / "config.json").write_text("{}"))
    send(changed, out, "node0")
    assert "changed while" in str(consolidate_due(changed, options).failed[0].error)
    (base / "config.json").write_bytes(before[CONFIG])
    whole.delete(MODEL)
    (failed,) = consolidate_due(whole, HeadOptions()).failed
    assert "head.adapters.into" in failed.error.hint
    assert consolidate_due(whole, options).made[0].files == ("model.safetensors",)
    assert contents(whole) == before
