"""Adapters summed into their base: numpy's values, however they are cut and written."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load, save_file

from ckptsync.errors import ConfigError, Corrupt, Unsupported
from ckptsync.merger import adapter_sums, read_units
from ckptsync.merger.cast import Array
from ckptsync.merger.destination import check_free, merge
from ckptsync.merger.engine import MergeResult
from ckptsync.merger.inputs import MergeRequest
from ckptsync.merger.into_base import AS_BASE, open_into_base
from ckptsync.merger.plan import MergeOptions, MergeResources
from ckptsync.stores.checkpoint_files import MERGING
from ckptsync.stores.contract import Store
from ckptsync.stores.memory import MemoryStore
from ckptsync.stores.opening import Access
from ckptsync.stores.path_or_url import PathOrUrl
from tests.support.adapters import (
    DOWN,
    EMBED,
    HEAD,
    LIVE,
    NORM,
    Q,
    delta,
    pair,
    read_model,
    whole_numbers,
    write_adapter,
    write_base,
)
from tests.support.crashing_store import Crash, Dying
from tests.support.files_in_memory import contents
from tests.support.filled_stores import contents as content
from tests.support.remote_stores import OUT, reaching
from tests.support.torch_bytes import saved

Q_PROJ, DOWN_PROJ = Q.removesuffix(".weight"), DOWN.removesuffix(".weight")
EMBEDDING = f"{LIVE}model.embed_tokens.lora_embedding"


def merge_into_base(
    adapters: list[Path],
    base: Path,
    out: PathOrUrl,
    *,
    jobs: int = 1,
    access: Access | None = None,
    is_changed_base: bool = False,
    **options: Any,
) -> MergeResult:
    written = MergeOptions(max_shard_size=AS_BASE, **options)
    request = MergeRequest(adapters, out, written, into=base, is_changed_base=is_changed_base)
    access = access or Access()
    check_free(request, access)
    return merge(open_into_base(request, access), access, work=MergeResources(jobs))


def every_change(seed: int) -> dict[str, Array]:
    """An adapter of linear modules and of an embedding, with a norm saved whole."""
    return {
        **pair(Q_PROJ, seed + 1),
        **pair(DOWN_PROJ, seed + 3),
        f"{EMBEDDING}_A": whole_numbers(seed + 5, (4, 50), 2),
        f"{EMBEDDING}_B": whole_numbers(seed + 6, (24, 4), 2),
        f"{LIVE}{NORM}": whole_numbers(seed + 7, (24,)),
    }


def added(own: dict[str, Array]) -> dict[str, Array]:
    """Return the products of an adapter, by the name of the base's tensor."""
    embedding = 3 * (own[f"{EMBEDDING}_B"] @ own[f"{EMBEDDING}_A"]).T
    return {Q: delta(own, Q_PROJ), DOWN: delta(own, DOWN_PROJ), EMBED: embedding}


def torch_file(tensors: dict[str, Array]) -> bytes:
    return saved({name: torch.from_numpy(values) for name, values in tensors.items()})


@pytest.mark.parametrize(
    ("window", "jobs", "whole"),
    [(64, 1, 0), (100, 3, 4 << 20), (1000, 1, 4 << 20), (1000, 3, 0), (4 << 20, 1, 0)],
)
def test_each_way_to_cut_it_gives_the_values_that_numpy_gives(
    window: int, jobs: int, whole: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(read_units, "WINDOW", window)
    monkeypatch.setattr(adapter_sums, "BLOCK", max(7, window // 16))
    monkeypatch.setattr(adapter_sums, "_WHOLE", whole)
    base, own = write_base(tmp_path / "base"), every_change(10)
    adapter = write_adapter(tmp_path / "adapter", own, modules_to_save=["norm"])
    merged = merge_into_base([adapter], tmp_path / "base", tmp_path / "out", jobs=jobs)
    found = read_model(tmp_path / "out")
    wanted = base | {n: base[n] + more for n, more in added(own).items()}
    wanted[NORM] = own[f"{LIVE}{NORM}"]
    assert found.keys() == wanted.keys()
    for name, values in wanted.items():
        assert np.array_equal(found[name], values), name
    total = merged.changes[Q]
    assert total.relative == pytest.approx(
        np.linalg.norm(delta(own, Q_PROJ)) / np.linalg.norm(base[Q])
    )


@pytest.mark.parametrize("window", [100, 1000, 4 << 20])
def test_dora_takes_the_norms_of_whole_rows_and_of_an_embedding_those_over_the_vocabulary(
    window: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(read_units, "WINDOW", window)
    monkeypatch.setattr(adapter_sums, "BLOCK", max(7, window // 16))
    base = wanted = write_base(tmp_path / "base")
    adapters = []
    for seed in (10, 50):
        own, axes = every_change(seed), {Q: 1, DOWN: 1, EMBED: 0}
        vectors = {n: f"{LIVE}{n.removesuffix('.weight')}.lora_magnitude_vector" for n in axes}
        own |= {vectors[n]: whole_numbers(seed + at, (24,)) + 30 for at, n in enumerate(axes)}
        config = {"use_dora": True, "modules_to_save": ["norm"]}
        adapters.append(write_adapter(tmp_path / str(seed), own, **config))
        for name, change in added(own).items():
            # the norm is the unmerged base's, also for the second adapter
            norm = np.linalg.norm(base[name] + change, axis=axes[name], keepdims=True)
            scale = np.expand_dims(own[vectors[name]], axes[name]) / norm
            wanted = wanted | {name: scale * (wanted[name] + change)}
    merged = merge_into_base(adapters, tmp_path / "base", tmp_path / "out", jobs=2)
    found = read_model(tmp_path / "out")
    for name in axes:
        assert np.allclose(found[name], wanted[name], rtol=1e-5, atol=1e-5), name
    assert merged.changes[EMBED].magnitudes == 2 * 24


def test_several_adapters_are_summed_in_order_and_rounded_after_each(tmp_path: Path) -> None:
    base = write_base(tmp_path / "base", "<f2")
    one, two = pair(Q_PROJ, 1), pair(Q_PROJ, 3)
    one = {n: t * 1e-3 for n, t in one.items()}
    adapters = [write_adapter(tmp_path / n, t) for n, t in (("one", one), ("two", two))]
    merge_into_base(adapters, tmp_path / "base", tmp_path / "out")
    merge_into_base(adapters[:1], tmp_path / "base", tmp_path / "first")
    merge_into_base(adapters[1:], tmp_path / "first", tmp_path / "second")
    assert contents(tmp_path / "out") == contents(tmp_path / "second")
    merge_into_base(adapters, tmp_path / "base", tmp_path / "single", dtype="fp32")
    wanted = base[Q].astype("<f4") + delta(one, Q_PROJ) + delta(two, Q_PROJ)
    found = read_model(tmp_path / "single")
    assert np.allclose(found[Q], wanted, rtol=1e-6)
    assert json.loads((tmp_path / "single" / "config.json").read_text())["dtype"] == "float32"
    whole = {f"{LIVE}{Q}": whole_numbers(7, (24, 24)), **pair(DOWN_PROJ, 5)}
    adapters[1] = write_adapter(tmp_path / "whole", whole, modules_to_save=["q_proj"])
    merge_into_base(adapters, tmp_path / "base", tmp_path / "replaced")
    assert np.array_equal(read_model(tmp_path / "replaced")[Q], whole[f"{LIVE}{Q}"])


def test_an_adapter_after_one_that_untied_the_head_changes_the_embedding_alone(
    tmp_path: Path,
) -> None:
    base, config = write_base(tmp_path / "base", files=1), tmp_path / "base/config.json"
    head, own = base.pop(HEAD) + 1, every_change(10)
    save_file(base, tmp_path / "base/model.safetensors", {"format": "pt"})
    text = '"text_config": {"tie_word_embeddings": true, "x": 1}'
    config.write_text(config.read_text().replace('"tie_word_embeddings": false', text))
    saved_head = {**pair(Q_PROJ, 1), f"{LIVE}{HEAD}": head}
    adapters = [
        write_adapter(tmp_path / "one", saved_head, modules_to_save=["lm_head"]),
        write_adapter(tmp_path / "two", {n: t for n, t in own.items() if "embedding" in n}),
    ]
    merge_into_base(adapters, tmp_path / "base", tmp_path / "out")
    found = read_model(tmp_path / "out")
    assert np.array_equal(found[HEAD], head)
    assert np.array_equal(found[EMBED], base[EMBED] + added(own)[EMBED])
    told = json.loads((tmp_path / "out/config.json").read_text())
    assert told["text_config"] == {"tie_word_embeddings": False, "x": 1}


def test_the_adapter_and_the_base_are_those_that_the_user_names(tmp_path: Path) -> None:
    base = write_base(tmp_path / "base")
    write_adapter(tmp_path / "adapters", pair(Q_PROJ, 1))
    own = pair(Q_PROJ, 3)
    write_adapter(tmp_path / "adapters/ref", own, init_lora_weights="pissa")
    arguments = [tmp_path / "adapters"], tmp_path / "base", tmp_path / "out"
    with pytest.raises(Unsupported, match="PiSSA"):
        merge_into_base(*arguments, source="ref")
    merge_into_base(*arguments, source="ref", is_changed_base=True)
    assert np.array_equal(read_model(tmp_path / "out")[Q], base[Q] + delta(own, Q_PROJ))


def test_a_classifier_is_written_in_the_bases_type_instead_of_the_head(tmp_path: Path) -> None:
    write_base(tmp_path / "base", "<f2")
    own = {**pair(Q_PROJ, 1), f"{LIVE}score.weight": whole_numbers(3, (2, 24))}
    adapter = write_adapter(tmp_path / "adapter", own, task_type="SEQ_CLS")
    merge_into_base([adapter], tmp_path / "base", tmp_path / "out")
    found = read_model(tmp_path / "out")
    assert {t.dtype for t in found.values()} == {np.dtype("<f2")}
    assert found.keys() == {EMBED, Q, DOWN, NORM, "score.weight"}
    assert np.array_equal(found["score.weight"], own[f"{LIVE}score.weight"])


def test_files_are_cut_as_the_base_is_and_hold_the_adapters_tokenizer(tmp_path: Path) -> None:
    base = tmp_path / "base"
    write_base(base, files=3)
    (base / "chat_template.jinja").write_text("the base's")
    (base / "merges.txt").write_text("the base's")
    (base / "generation_config.json").write_text("{}")
    (base / "tokenizer_config.json").write_text('{"chat_template": "the base\'s"}')
    adapter = write_adapter(tmp_path / "adapter", pair(Q_PROJ, 1))
    (adapter / "tokenizer.json").write_text('{"of": "the adapter"}')
    (adapter / "tokenizer_config.json").write_text('{"chat_template": "its own"}')
    head = {"v_head.summary.weight": whole_numbers(9, (1, 24))}
    save_file(head, adapter / "value_head.safetensors", {"format": "pt"})
    (adapter / "modeling_x.py").write_text("x")
    merge_into_base([adapter], base, tmp_path / "out", allow_code=True)
    out = contents(tmp_path / "out")
    names = {path.name for path in base.iterdir()} - {"chat_template.jinja", "merges.txt"}
    assert out.keys() == names | {"value_head.safetensors"}
    assert json.loads(out["tokenizer_config.json"]) == {"chat_template": "its own"}
    for name, values in head.items():
        assert np.array_equal(load(out["value_head.safetensors"])[name], values)
    for path in base.glob("*.safetensors"):
        assert len(out[path.name]) == path.stat().st_size
    maps = [
        json.loads(d)["weight_map"]
        for d in (
            out["model.safetensors.index.json"],
            (base / "model.safetensors.index.json").read_bytes(),
        )
    ]
    assert maps[0] == maps[1]
    assert json.loads(out["tokenizer.json"]) == {"of": "the adapter"}
    assert "adapter_config.json" not in out


def left_behind(adapter: Path, base: Path) -> list[Store]:
    """What merges have left that died, each at another moment."""
    found: list[Store] = []
    for lives in itertools.count(1):
        store = MemoryStore("mem://out")
        try:
            access = reaching({OUT: Dying(store, lives)})
            merge_into_base([adapter], base, OUT, access=access)
        except Crash:
            found.append(store)
        else:
            return found
    raise AssertionError


def test_killed_into_a_store_it_continues_and_tells_of_every_change(tmp_path: Path) -> None:
    base, adapter = tmp_path / "base", tmp_path / "adapter"
    write_base(base, files=3)
    own = pair(Q_PROJ, 1) | pair(DOWN_PROJ, 3)
    write_adapter(adapter, own)
    wanted = merge_into_base([adapter], base, tmp_path / "out")
    states = left_behind(adapter, base)
    assert len(states) > 10
    other = write_adapter(tmp_path / "other", pair(Q_PROJ, 5) | pair(DOWN_PROJ, 7))
    with pytest.raises(ConfigError, match="of other sources"):
        merge_into_base([other], base, OUT, access=reaching({OUT: states[5]}))
    continued = 0
    for store in states:
        begun = MERGING in content(store)
        if not begun and content(store):
            continue  # it had ended
        merged = merge_into_base([adapter], base, OUT, access=reaching({OUT: store}))
        assert content(store) == contents(tmp_path / "out")
        assert merged.changes == wanted.changes
        continued += any("from an earlier merge" in note for note in merged.notes)
    assert continued


def test_what_is_wrong_with_values_is_said(tmp_path: Path) -> None:
    base = tmp_path / "base"
    tensors = write_base(base)
    own = pair(Q_PROJ, 1) | pair(DOWN_PROJ, 3)

    def notes(name: str, changed: dict[str, Array], into: Path = base, **config: object) -> str:
        adapter = write_adapter(tmp_path / name, own | changed, **config)
        merged = merge_into_base([adapter], into, tmp_path / f"{name}-out")
        return "\n".join(merged.notes)

    still = {f"{LIVE}{Q_PROJ}.lora_B.weight": np.zeros((24, 4), "<f4")}
    zeros = {name: np.zeros_like(t) for name, t in own.items() if "lora_B" in name}
    assert "warning" not in notes("trained", {})
    assert f"1 of 2 modules are not changed (B is all zero): {Q_PROJ}" in notes("some", still)
    assert "this adapter changes nothing" in notes("none", zeros)
    assert contents(tmp_path / "none-out").keys() == contents(base).keys()
    assert "contain this adapter already" in notes("again", {}, tmp_path / "trained-out")
    odd = {f"{LIVE}{m}.lora_magnitude_vector": np.full(24, 900, "<f4") for m in (Q_PROJ, DOWN_PROJ)}
    assert "48 of 48 magnitudes" in notes("dora", odd, use_dora=True)
    norms = {
        f"{LIVE}{n.removesuffix('.weight')}.lora_magnitude_vector": np.linalg.norm(
            tensors[n], axis=1
        )
        for n in (Q, DOWN)
    }
    assert "warning" not in notes("right", norms, use_dora=True)


@pytest.mark.parametrize("value", [np.nan, np.inf, 3e38, 1e5])
def test_a_sum_that_is_no_finite_number_is_refused_by_name(value: float, tmp_path: Path) -> None:
    write_base(tmp_path / "base", "<f2")
    own = pair(Q_PROJ, 1)
    own[f"{LIVE}{Q_PROJ}.lora_B.weight"][3, 2] = value
    adapter = write_adapter(tmp_path / "adapter", own)
    with pytest.raises(Corrupt, match=Q_PROJ):
        merge_into_base([adapter], tmp_path / "base", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_flipped_bit_in_any_tensor_of_an_adapter_is_found(tmp_path: Path) -> None:
    base = write_base(tmp_path / "base", files=1)
    (tmp_path / "base/model.safetensors").unlink()
    (tmp_path / "base/pytorch_model.bin").write_bytes(torch_file(base))
    own = pair(Q_PROJ, 1) | {f"{LIVE}{NORM}": whole_numbers(3, (24,))}
    own[f"{LIVE}{Q_PROJ}.lora_magnitude_vector"] = whole_numbers(4, (24,)) + 30
    own[f"{LIVE}lm_head.token_adapter.trainable_tokens_delta"] = whole_numbers(5, (2, 24))
    config = {"use_dora": True, "trainable_token_indices": [3, 7]}
    adapter = write_adapter(tmp_path / "adapter", own, **config)
    (adapter / "adapter_model.safetensors").unlink()
    data = torch_file(own)
    for name, values in own.items():
        damaged = bytearray(data)
        damaged[data.index(values.tobytes())] ^= 1
        (adapter / "adapter_model.bin").write_bytes(damaged)
        with pytest.raises(Corrupt, match="CRC32"):
            merge_into_base([adapter], tmp_path / "base", tmp_path / "out")
        assert not (tmp_path / "out").exists(), name
    (adapter / "adapter_model.bin").write_bytes(data)
    merge_into_base([adapter], tmp_path / "base", tmp_path / "out")
    assert read_model(tmp_path / "out").keys() == base.keys()
