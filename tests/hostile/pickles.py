"""Hostile pickles, as raw opcodes, in every place where the formats read one."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Mapping

from tests.hostile.attack import CORRUPT, INCOMPLETE, UNSUPPORTED, Attack
from tests.support.exhaustive import sampled
from tests.support.files_in_memory import safetensors_file, torch_zip_file

PROTO2, PROTO4 = b"\x80\x02", b"\x80\x04"
DCP = "torch.distributed.checkpoint"


def text(value: str) -> bytes:
    data = value.encode()
    return b"X" + struct.pack("<I", len(data)) + data


def number(value: int) -> bytes:
    data = value.to_bytes(16, "little", signed=True)
    return b"\x8a" + bytes([len(data)]) + data


def name(module: str, attribute: str) -> bytes:
    return f"c{module}\n{attribute}\n".encode()


def shape(*sizes: int) -> bytes:
    return b"(" + b"".join(map(number, sizes)) + b"t"


def dictionary(pairs: Mapping[str, bytes]) -> bytes:
    return b"}(" + b"".join(text(key) + value for key, value in pairs.items()) + b"u"


def made(module: str, kind: str, state: bytes) -> bytes:
    return name(module, kind) + b")\x81" + state + b"b"


def code(canary: str) -> dict[str, bytes]:
    """Pickles that run ``touch canary`` in Python's own unpickler."""
    command = text(f"touch {canary}")
    short = b"\x8c\x05posix\x8c\x06system\x93"
    system = name("posix", "system")
    setstate = b"}" + text("__setstate__") + system + b"sb"
    return {
        "reduce": PROTO2 + system + command + b"\x85R.",
        "os-reduce": PROTO2 + name("os", "system") + command + b"\x85R.",
        "eval": PROTO2 + name("builtins", "eval") + text(f"open({canary!r}, 'w')") + b"\x85R.",
        "stack-global": PROTO4 + short + command + b"\x85R.",
        "stack-global-by-memo": PROTO4
        + b"\x8c\x05posix\x94\x8c\x06system\x94h\x00h\x01\x93"
        + command
        + b"\x85R.",
        "dotted-name": PROTO4 + text("collections") + text("abc.sys.modules") + b"\x93.",
        "inst": b"(" + command + b"iposix\nsystem\n.",
        "obj": b"(" + system + command + b"o.",
        "newobj": PROTO2 + system + command + b"\x85\x81.",
        "newobj-ex": PROTO4 + system + command + b"\x85}\x92.",
        "setstate": PROTO2
        + made("torch.storage", "UntypedStorage", b"}")[:-2]
        + setstate
        + command
        + b"b.",
        "getattr": PROTO2
        + name("builtins", "getattr")
        + name("torch", "Size")
        + text("__class__")
        + b"\x86R.",
        "torch-load": PROTO2 + name("torch", "load") + command + b"\x85R.",
        "torch-hub": PROTO2 + name("torch.hub", "load") + command + command + b"\x86R.",
        "call-of-a-call": PROTO2 + name("torch", "Size") + b")\x85R" + command + b"\x85R.",
        "call-of-text": PROTO2 + text("posix.system") + command + b"\x85R.",
        "ext1": PROTO2 + b"\x82\x01" + command + b"\x85R.",
        "ext2": PROTO2 + b"\x83\x01\x00" + command + b"\x85R.",
        "ext4": PROTO2 + b"\x84\x01\x00\x00\x00" + command + b"\x85R.",
        "buffer": b"\x80\x05\x97\x98.",
        "name-with-newlines": PROTO4 + text("posix\nsystem") + text("x\ny") + b"\x93.",
        "name-of-megabytes": PROTO4 + text("a" * (1 << 20)) + text("b" * (1 << 20)) + b"\x93.",
    }


def nonsense() -> dict[str, bytes]:
    """Pickles that are damaged, or want more than there is."""
    return {
        "empty": b"",
        "stop": b".",
        "protocol-255": b"\x80\xff.",
        "persistent-text": PROTO2 + b"Pstorage\n.",
        "persistent-list": PROTO2 + b"]Q.",
        "persistent-none": PROTO2 + b"NQ.",
        "persistent-odd-tuple": PROTO2 + b"(" + text("storage") + b"NNNNtQ.",
        "persistent-huge": PROTO2 + storage(2**62) + b".",
        "persistent-negative": PROTO2 + storage(-1) + b".",
        "memo-index": PROTO2 + b"Nr\xff\xff\xff\xff0j\xfe\xff\xff\xff.",
        "text-of-4GB": PROTO2 + b"X\xff\xff\xff\xff.",
        "text-of-2**63": PROTO4 + b"\x8d" + struct.pack("<Q", 2**63 - 1) + b".",
        "bytes-of-2**64": PROTO4 + b"\x8e" + b"\xff" * 8 + b".",
        "bytearray-of-2**62": b"\x80\x05\x96" + struct.pack("<Q", 2**62) + b".",
        "long-of-2GB": PROTO2 + b"\x8b\xff\xff\xff\x7f.",
        "long-negative": PROTO2 + b"\x8b\xff\xff\xff\xff.",
        "frame-of-2**63": PROTO4 + b"\x95" + b"\xff" * 8 + b".",
        "decimal-of-a-million-digits": b"I" + b"9" * 1_000_000 + b"\n.",
        "no-mark": PROTO2 + b"t.",
        "pop-of-nothing": PROTO2 + b"0.",
        "deep-lists": PROTO2 + b"]" * 50_000 + b"a" * 49_999 + b".",
        "deep-marks": PROTO2 + b"(" * 50_000 + b"t" * 50_000 + b".",
        "list-in-itself": PROTO2 + b"]q\x00h\x00a.",
        "list-as-key": PROTO2 + b"}]Ns.",
        "bomb-as-key": PROTO2 + b"}" + bomb() + b"Ns.",
    }


def bomb(levels: int = 60) -> bytes:
    """A tuple of a tuple twice, of a tuple twice, …: small in memory, endless for whoever hashes,
    prints or compares it.
    """
    return b")" + b"".join(
        b"q" + bytes([i]) + b"0h" + bytes([i]) + b"h" + bytes([i]) + b"\x86" for i in range(levels)
    )


def deep(levels: int = 20_000) -> bytes:
    return b"N" + b"\x85" * levels


# where a format reads a pickle: what is wrapped around it


def zipped(pickle: bytes, **records: bytes) -> bytes:
    return torch_zip_file({"data.pkl": pickle, "version": b"3", **records})


def in_metadata(pickle: bytes) -> dict[str, bytes]:
    root = "pytorch_model_fsdp_0"
    return {f"{root}/.metadata": pickle, f"{root}/__0_0.distcp": b"\0" * 100}


def in_model_states(pickle: bytes) -> dict[str, bytes]:
    return {
        "latest": b"global_step4",
        "global_step4/mp_rank_00_model_states.pt": zipped(pickle),
    }


def in_optim_states(pickle: bytes) -> dict[str, bytes]:
    optim = zipped(pickle)
    return {
        "global_step4/zero_pp_rank_0_mp_rank_00_optim_states.pt": optim,
        "global_step4/mp_rank_00_model_states.pt": optim,
    }


def in_an_item(pickle: bytes) -> dict[str, bytes]:
    item = torch_zip_file({"data.pkl": pickle, "data/0": b"\0" * 16, "version": b"3"})
    return {".metadata": metadata(len(item)), "__0_0.distcp": item}


PLACES: dict[str, Callable[[bytes], dict[str, bytes]]] = {
    "metadata": in_metadata,
    "model-states": in_model_states,
    "optim-states": in_optim_states,
    "item": in_an_item,
}


def metadata(
    item_size: int, path: bytes = text("__0_0.distcp"), size: bytes = shape(4), **more: bytes
) -> bytes:
    """A DCP's ``.metadata`` with one tensor, w, of four floats in one item.

    ``more`` replaces parts of it.
    """

    def of(kind: str, **fields: bytes) -> bytes:
        named = {key: more.get(key, value) for key, value in fields.items()}
        module = "filesystem" if kind == "_StorageInfo" else "metadata"
        return made(f"{DCP}.{module}", kind, dictionary(named))

    dtype = name("torch", "float32")
    properties = made(f"{DCP}.metadata", "TensorProperties", b"(" + dtype + b"N\x89N\x89t")
    chunk = of("ChunkStorageMetadata", offsets=shape(0), sizes=size)
    tensor = {"properties": properties, "size": size, "chunks": b"](" + chunk + b"e"}
    index = of("MetadataIndex", fqn=text("w"), offset=shape(0), index=b"K\x00")
    place = {
        "relative_path": path,
        "offset": more.get("start", b"K\x00"),
        "length": number(item_size),
        "transform_descriptors": more.get("transforms", b"N"),
    }
    state = {
        "state_dict_metadata": b"}" + text("w") + of("TensorStorageMetadata", **tensor) + b"s",
        "planner_data": more.get("planner", b"}"),
        "storage_data": b"}" + index + of("_StorageInfo", **place) + b"s",
    }
    return PROTO2 + made(f"{DCP}.metadata", "Metadata", dictionary(state)) + b"."


def storage(size: int) -> bytes:
    """Return what pickles a reference to the storage "0" of floats."""
    kind = text("storage") + name("torch", "FloatStorage")
    return b"(" + kind + text("0") + text("cpu") + number(size) + b"tQ"


def floats() -> bytes:
    """Return what pickles a tensor of four floats that are in a file beside it."""
    arguments = storage(4) + b"K\x00" + shape(4) + shape(1) + b"\x89}"
    return name("torch._utils", "_rebuild_tensor_v2") + b"(" + arguments + b"tR"


def item() -> bytes:
    """Four zeros, as one item of a DCP."""
    return torch_zip_file(
        {"data.pkl": PROTO2 + floats() + b".", "data/0": b"\0" * 16, "version": b"3"}
    )


def optim(**more: bytes) -> dict[str, bytes]:
    """A ZeRO checkpoint of one rank whose optimizer file says what ``more`` says."""
    state = {"zero_stage": b"K\x02", "partition_count": b"K\x01", **more}
    pickle = PROTO2 + dictionary({"optimizer_state_dict": dictionary(state)}) + b"."
    model = PROTO2 + dictionary({"module": b"}", "param_shapes": b"]"}) + b"."
    return {
        "global_step4/zero_pp_rank_0_mp_rank_00_optim_states.pt": zipped(pickle),
        "global_step4/mp_rank_00_model_states.pt": zipped(model),
    }


def model(**more: bytes) -> dict[str, bytes]:
    """A DeepSpeed checkpoint without ZeRO whose model file says what ``more`` says."""
    state = {"dp_world_size": b"K\x01", "ds_config": b"}", "module": b"}", **more}
    return {"global_step4/mp_rank_00_model_states.pt": zipped(PROTO2 + dictionary(state) + b".")}


def _whole(files: dict[str, bytes], **more: bytes) -> dict[str, bytes]:
    return {**files, ".metadata": metadata(len(item()), **more), "__0_0.distcp": item()}


OF_OPTIM = """partition_count zero_stage single_partition_of_fp32_groups group_paddings
    param_alignment_paddings""".split()  # noqa: SIM905
OF_MODEL = """dp_world_size ds_config module shared_params buffer_names
    frozen_param_shapes""".split()  # noqa: SIM905
OF_METADATA = """path fqn transforms start length size sizes offsets chunks properties
    planner""".split()  # noqa: SIM905


def values() -> dict[str, dict[str, bytes]]:
    """Well-formed pickles whose values are not what they should be: endless ones, huge numbers,
    other types.
    """
    found: dict[str, dict[str, bytes]] = {}
    for kind, value in {
        "bomb": bomb(),
        "deep": deep(),
        "huge": number(2**62),
        "negative": number(-1),
        "endless": b"\x8b\x00\x00\x01\x00" + b"\x7f" * (1 << 16),
        "text": text("x"),
        "none": b"N",
        "dict": b"}",
    }.items():
        for field in OF_OPTIM:
            found[f"optim-{field}-{kind}"] = optim(**{field: value})
        for field in OF_MODEL:
            found[f"model-{field}-{kind}"] = model(**{field: value})
        for field in OF_METADATA:
            if f"{field} {kind}" not in ("planner dict", "transforms none", "transforms dict"):
                # not what torch writes
                found[f"metadata-{field}-{kind}"] = _whole({}, **{field: value})
    found["metadata-tensor-of-2**62"] = _whole({}, size=shape(2**62))
    found["metadata-tensor-of-many-axes"] = _whole(
        {}, size=shape(*[2**40] * 1000), offsets=shape(*[0] * 1000)
    )
    found["metadata-planner-of-bombs"] = _whole({}, planner=b"}" + text("w") + bomb() + b"s")
    found["model-buffer-of-a-bomb"] = model(buffer_names=b"](" + bomb() + b"e")
    found["model-shares-a-bomb"] = model(shared_params=b"}" + text("a") + bomb() + b"s")
    found["model-shares-by-bomb"] = model(shared_params=b"}" + text("a") + deep() + b"s")
    return found


def attacks(canary: str) -> Iterator[Attack]:
    """Yield every kind in one of the places, in all of them if exhaustive, and every value."""
    for number, (kind, pickle) in enumerate({**code(canary), **nonsense()}.items()):
        for where in sampled(PLACES, len(PLACES), number):
            yield Attack(f"{kind}-in-{where}", PLACES[where](pickle), (UNSUPPORTED, CORRUPT))
    for kind, files in values().items():
        yield Attack(
            kind,
            files,
            (INCOMPLETE, UNSUPPORTED, CORRUPT),
            harmless=kind.startswith(("model-", "optim-", "metadata-planner")),
        )
    beside = {"model.safetensors": safetensors_file({"a": ("U8", (1,), b"x")})}
    yield Attack(
        "code-beside-a-whole-model",
        {**beside, "training_args.bin": code(canary)["reduce"]},
        (),
        harmless=True,
    )
