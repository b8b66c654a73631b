"""Tensors that are more than a view of a storage: read as torch loads them, or refused by name."""

from __future__ import annotations

import io
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.state_dict_saver import save as save_distributed

from ckptsync.errors import Corrupt, Unsupported
from ckptsync.formats import torch_pickle, torch_save
from ckptsync.formats.pickles import Name
from ckptsync.layouts.registry import WeightsSource, choose, tensors
from ckptsync.tensors import Extent
from tests.support.files_in_memory import (
    Call,
    Global,
    MemoryFiles,
    StorageId,
    contents,
    tensor_call,
    torch_zip_file,
)
from tests.support.files_in_memory import torch_pickle as pickled
from tests.support.gather_tensors import assembled
from tests.support.torch_bytes import raw, saved
from tests.support.vector import Bits

# one rank's, Lightning's and a whole model's file: each has a state dict at its top
FILES = {
    "bin": "pytorch_model.bin",
    "lightning": "last.ckpt",
    "per_rank": "actor/model_world_size_1_rank_0.pt",
}


LEGACY = {"_use_new_zipfile_serialization": False}
CONTAINERS: list[tuple[str, dict[str, bool]]] = [
    ("bin", {}),
    ("lightning", LEGACY),
    ("per_rank", {}),
]


def read_model(value: Any, layout: str = "bin", **options: Any) -> Bits:
    files = MemoryFiles({FILES[layout]: saved(value, **options)})
    return assembled(files, tensors(files, choose(files, None)))


def bits(value: dict[str, torch.Tensor]) -> dict[str, bytes]:
    return {name: raw(tensor.detach()) for name, tensor in value.items()}


def refusal(value: Any, layout: str = "bin", **options: Any) -> Unsupported:
    with pytest.raises(Unsupported) as e:
        read_model(value, layout, **options)
    return e.value


def test_every_function_that_rebuilds_a_tensor_in_this_torch_is_known() -> None:
    torchs = [
        (module.__name__, name)
        for module in (torch._utils, torch._tensor)
        for name in vars(module)
        if name.startswith("_rebuild_") and callable(getattr(module, name))
    ]
    assert ("torch._utils", "_rebuild_wrapper_subclass") in torchs
    assert {Name(*each) for each in torchs} <= torch_pickle.TENSORS.keys()


BASE = torch.complex(torch.randn(4, 6), torch.randn(4, 6))
VIEWS: dict[str, Callable[[], torch.Tensor]] = {
    "conj": BASE.conj,
    "conj of a part": BASE[1:3, 2:].conj,
    "conj transposed": lambda: BASE.mH,
    "neg": lambda: BASE.conj().imag,
    "neg of a part, transposed": lambda: BASE[1:].conj().imag.T,
    "both": lambda: torch._neg_view(BASE.conj()),
    "neg of integers": lambda: torch._neg_view(torch.arange(6)),
}


@pytest.mark.parametrize(("layout", "container"), CONTAINERS)
@pytest.mark.parametrize("view", VIEWS)
def test_values_that_are_not_those_stored_are_refused_by_the_bit(
    view: str, layout: str, container: dict[str, bool]
) -> None:
    tensor = VIEWS[view]()
    e = refusal({"a": torch.ones(2), "w": tensor}, layout, **container)
    bits_of = {"conj": tensor.is_conj(), "neg": tensor.is_neg()}
    assert any(f"w: a tensor with torch's {bit!r} bit" in str(e) for bit in bits_of if bits_of[bit])
    assert "resolve_conj" in e.hint
    clean = {"w": tensor.resolve_conj().resolve_neg()}
    assert {k: v[2] for k, v in read_model(clean, layout).items()} == bits(clean)


def test_metadata_that_says_nothing_is_none() -> None:
    assert read_model({"w": BASE.conj().conj(), "v": torch._neg_view(torch._neg_view(BASE))})


def with_attributes(tensor: torch.Tensor, **values: Any) -> Any:
    for name, value in values.items():
        setattr(tensor, name, value)
    return tensor


@pytest.mark.parametrize(("layout", "container"), CONTAINERS)
def test_attributes_of_parameters_and_tensors_do_not_hinder(
    layout: str, container: dict[str, bool]
) -> None:
    weight = with_attributes(
        torch.nn.Parameter(torch.randn(3, 4)), _is_hf_initialized=True, partition_dim=0
    )
    state = {
        "w": weight,
        "tied": weight,
        "transposed": with_attributes(weight.detach().T[1:], spec=(0, None)),
        "fp8": with_attributes(
            torch.nn.Parameter(torch.randn(8).to(torch.float8_e4m3fn), requires_grad=False), a="b"
        ),
        "buffer": torch.nn.Buffer(torch.arange(3)),
    }
    found = read_model(state, layout, **container)
    loaded = torch.load(io.BytesIO(saved(state)), weights_only=False)
    assert {k: v[2] for k, v in found.items()} == bits(loaded)


def test_an_attribute_of_a_class_that_no_checkpoint_has_is_refused() -> None:
    weight = torch.nn.Parameter(torch.ones(2))
    state = {"w": with_attributes(weight, origin=types.SimpleNamespace(a=1))}
    assert read_model(state, "lightning")  # there scripts name what they like
    assert "types.SimpleNamespace" in str(refusal(state))  # though the same pickle was read


def test_parameters_of_bitsandbytes_are_known_by_their_attributes(wrapper: Any) -> None:
    wrapper("bitsandbytes.functional", "Params4bit")
    state = sys.modules["bitsandbytes.functional"].Config(4)
    packed = torch.nn.Parameter(torch.ones(8, 1, dtype=torch.uint8), requires_grad=False)
    with_attributes(packed, quant_state=state)
    assert "bitsandbytes.functional.Config" in str(refusal({"w": packed}))
    scaled = torch.nn.Parameter(torch.ones(8, dtype=torch.int8), requires_grad=False)
    with_attributes(scaled, SCB=torch.ones(1))
    assert "w: a parameter that is no float and has a tensor as its 'SCB'" in str(
        refusal({"w": scaled})
    )
    plain = with_attributes(torch.nn.Parameter(torch.ones(8)), main_grad=torch.ones(8))
    assert read_model({"w": plain}).keys() == {"w"}


class _Wrapper(torch.Tensor):
    """As torchao's: an outer tensor without storage, and an inner one."""

    @staticmethod
    def __new__(cls: Any, inner: torch.Tensor, dtype: torch.dtype | None = None) -> Any:
        return torch.Tensor._make_wrapper_subclass(
            cls, inner.shape, dtype=dtype or inner.dtype, strides=inner.stride()
        )

    def __init__(self, inner: torch.Tensor, dtype: torch.dtype | None = None) -> None:
        self._data = inner
        self.config = sys.modules[type(self).__module__].Config(3)

    def __repr__(self) -> str:  # type: ignore[override]
        return "a wrapper"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch does not show that it is one
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func is torch.ops.aten.detach.default:
            return args[0]
        raise NotImplementedError(func)


class _Config:
    def __init__(self, number: int) -> None:
        self.number = number


@pytest.fixture
def wrapper(monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str], Any]:
    """Return classes of a library that is not installed here."""

    def made(module: str, name: str) -> Any:
        there = types.ModuleType(module)
        kind = type(name, (_Wrapper,), {"__module__": module})
        config = type("Config", (_Config,), {"__module__": module})
        vars(there).update({name: kind, "Config": config})
        for n in range(module.count(".") + 1):
            above = module.rsplit(".", n)[0]
            monkeypatch.setitem(sys.modules, above, there if n == 0 else types.ModuleType(above))
        return kind

    return made


@pytest.mark.parametrize("layout", FILES)
def test_a_wrapper_around_a_plain_weight_is_the_weight(layout: str, wrapper: Any) -> None:
    kind = wrapper(
        "torchao.prototype.quantized_training.int8_mixed_precision",
        "Int8MixedPrecisionTrainingLinearWeight",
    )
    weight = torch.randn(4, 6, dtype=torch.bfloat16)
    found = read_model({"w": kind(weight), "p": torch.nn.Parameter(kind(weight))}, layout)
    assert found == {"w": ("BF16", (4, 6), raw(weight)), "p": ("BF16", (4, 6), raw(weight))}
    e = refusal({"w": kind(weight, torch.float32)}, layout)  # a cast that nobody knows
    assert "Int8MixedPrecisionTrainingLinearWeight" in str(e)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("layout", ["bin", "lightning"])
@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("torchao.quantization", "Int8Tensor"),
        ("transformer_engine.pytorch.tensor.float8_tensor", "Float8Tensor"),
        ("optimum.quanto.tensor", "WeightQBytesTensor"),
        ("torch.masked.maskedtensor.core", "MaskedTensor"),
    ],
)
def test_a_librarys_tensors_are_refused_by_module_and_class(
    module: str, name: str, layout: str, wrapper: Any
) -> None:
    if module.startswith("torch."):
        tensor = torch.masked.masked_tensor(torch.ones(2), torch.tensor([True, False]))
    else:
        tensor = wrapper(module, name)(torch.ones(2))
    e = refusal({"a": torch.ones(2), "w": tensor}, layout)
    library = module.partition(".")[0]
    assert f"w: a {module}.{name}, whose values only {library} can read" in str(e)
    assert ("plain, dense" if library == "torch" else "dequantised") in e.hint


def test_a_subclass_of_a_scripts_own_is_refused_by_module_and_class() -> None:
    class Mine(torch.Tensor):
        pass

    Mine.__module__, Mine.__qualname__ = __name__, "Mine"
    globals()["Mine"] = Mine
    tensor = torch.ones(2).as_subclass(Mine)
    assert f"{__name__}.Mine" in str(refusal({"w": tensor}))
    assert f"w: a {__name__}.Mine" in str(refusal({"w": tensor}, "lightning"))


TWO = [torch.ones(2), torch.ones(3)]
TWO_SCALES = torch.ones(2), torch.zeros(2)
ODD: dict[str, tuple[Callable[[], torch.Tensor], str, str]] = {
    "coo": (torch.eye(3).to_sparse, "a sparse tensor", "to_dense"),
    "csr": (lambda: torch.eye(3).to_sparse_csr(), "a sparse tensor", "to_dense"),
    "nested": (lambda: torch.nested.nested_tensor(TWO), "a nested tensor", "components"),
    "jagged": (
        lambda: torch.nested.nested_tensor(TWO, layout=torch.jagged),
        "nested_tensor.NestedTensor",
        "plain, dense",
    ),
    "qint8": (
        lambda: torch.quantize_per_tensor(torch.ones(4), 0.1, 0, torch.qint8),
        "quantized",
        "dequantised",
    ),
    "quint8": (
        lambda: torch.quantize_per_channel(torch.ones(2, 4), *TWO_SCALES, 0, torch.quint8),
        "quantized",
        "dequantised",
    ),
    "meta": (lambda: torch.ones(3, device="meta"), "meta device", "real device"),
    "complex128": (lambda: torch.ones(3, dtype=torch.complex128), "torch.complex128", "complex64"),
    "complex32": (lambda: BASE.to(torch.complex32), "torch.complex32", "complex64"),
    "float4": (
        lambda: torch.ones(4, dtype=torch.uint8).view(torch.float4_e2m1fn_x2),
        "torch.float4_e2m1fn_x2",
        "view(torch.uint8)",
    ),
    "bits": (lambda: torch.ones(4, dtype=torch.uint8).view(torch.bits8), "torch.bits8", "uint8"),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("layout", ["bin", "lightning"])
@pytest.mark.parametrize("kind", ODD)
def test_what_safetensors_cannot_hold_is_refused_with_what_to_do(kind: str, layout: str) -> None:
    make, said, hint = ODD[kind]
    e = refusal({"a": torch.ones(2), "w": make()}, layout)
    assert "w: " in str(e)
    assert said in str(e)
    assert hint in e.hint
    if layout == "lightning":  # an optimizer's state is nobody's weight
        value = {"state_dict": {"a": torch.ones(2)}, "optimizer_states": [{"x": make()}]}
        assert read_model(value, layout).keys() == {"a"}


@pytest.mark.parametrize("dtype", [torch.complex128, torch.float64])
def test_storages_of_the_legacy_container_lie_where_the_ones_before_end(dtype: torch.dtype) -> None:
    value = {"optimizer_states": [torch.ones(3, dtype=dtype)], "state_dict": {"w": torch.ones(5)}}
    found = read_model(value, "lightning", **LEGACY)
    assert found == {"w": ("F32", (5,), raw(torch.ones(5)))}


def _called(function: str, *args: Any) -> MemoryFiles:
    value = {"w": Call(Global("torch._utils", function), *args)}
    return MemoryFiles(
        {
            "pytorch_model.bin": torch_zip_file(
                {"data.pkl": pickled(value), "data/0": bytes(16), "version": b"3\n"}
            )
        }
    )


F32, F16 = Global("torch", "float32"), Global("torch", "float16")
DATA = tensor_call(StorageId("FloatStorage", "0", 4), 0, (4,), (1,))
BYTES = tensor_call(StorageId("ByteStorage", "0", 16), 0, (5,), (1,))
BIN = WeightsSource("bin", "pytorch_model")


def test_a_tensor_of_another_device_is_the_cpus_copy_unless_it_is_cast() -> None:
    name, rest = "_rebuild_device_tensor_from_cpu_tensor", ("xla:0", False)
    assert tensors(_called(name, DATA, F32, *rest), BIN)[0].shape == (4,)
    with pytest.raises(Unsupported, match="casts"):
        tensors(_called(name, DATA, F16, *rest), BIN)
    with pytest.raises(Corrupt):
        tensors(_called(name, 3, F16, *rest), BIN)
    with pytest.raises(Unsupported, match="'conj' bit"):
        tensors(_called("_rebuild_tensor_v3", *DATA.args, F32, {"conj": True}), BIN)
    with pytest.raises(Unsupported, match=r"w: .*numpy"):
        tensors(_called("_rebuild_device_tensor_from_numpy", 3, F16, *rest), BIN)


@pytest.mark.parametrize(
    ("function", "args"),
    [
        ("_rebuild_parameter", (3, True, {})),
        ("_rebuild_parameter_with_state", (DATA, True, {}, {}, {})),
        ("_rebuild_parameter_with_state", (DATA, True, {}, {str(n): n for n in range(101)})),
        ("_rebuild_tensor", (3, 0, (1,), (1,))),
        ("_rebuild_tensor_v3", (3, 0, (1,), (1,), False, {}, F32, {}, {})),
        ("_rebuild_tensor_v3", (*DATA.args, F32, [1])),
        ("_rebuild_tensor_v3", (*BYTES.args, F32)),  # five floats in 16 bytes
    ],
)
def test_arguments_that_torch_does_not_write_are_corrupt(function: str, args: Any) -> None:
    with pytest.raises(Corrupt):
        tensors(_called(function, *args), BIN)


@pytest.mark.filterwarnings("ignore")
def test_items_of_a_distributed_checkpoint_are_refused_with_their_tensors_name(
    tmp_path: Path, wrapper: Any
) -> None:
    weight = torch.randn(4, 6)
    kind = wrapper("torchao.prototype.moe_training.tensor", "ScaledGroupedMMTensor")
    odd: dict[str, torch.Tensor] = {
        "conj": BASE.clone().conj(),
        "c128": torch.ones(3, dtype=torch.complex128),
        "f4": torch.ones(4, dtype=torch.uint8).view(torch.float4_e2m1fn_x2),
    }
    for name, tensor in odd.items():
        save_distributed({"w": weight, name: tensor}, checkpoint_id=tmp_path / name, no_dist=True)
        files = MemoryFiles(contents(tmp_path / name))
        with pytest.raises(Unsupported, match=f"{name}: |conj"):
            tensors(files, choose(files, None))
    optimizer = {"state": {"w": {"exp_avg": odd["c128"]}}, "param_groups": [{"lr": 1.0}]}
    value = {"model": {"w": weight}, "optimizer": optimizer}
    save_distributed(value, checkpoint_id=tmp_path / "all", no_dist=True)
    files = MemoryFiles(contents(tmp_path / "all"))
    found = tensors(files, choose(files, None))
    assert assembled(files, found) == {"w": ("F32", (4, 6), raw(weight))}
    assert torch_save.load_tensor(
        MemoryFiles({"m": (item := saved(kind(weight)))}), Extent("m", 0, len(item))
    )[0].shape == (4, 6)
