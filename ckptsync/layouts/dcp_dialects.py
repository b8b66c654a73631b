"""Names that a ``.metadata`` may mention beside those of torch's own present classes: older torch's, and Megatron-Core's.

torch 2.1 and 2.2 took ``TensorProperties`` from the sharded tensors (``torch/distributed/checkpoint/metadata.py`` of v2.2).  Megatron-Core keeps
every rank's plan of the save beside the metadata (``megatron/core/dist_checkpointing/strategies/{torch,state_dict_saver}.py``, 0.12 to 0.16), in
classes of its own in some versions.  None of them says where a tensor lies.
"""

from __future__ import annotations

from ckptsync.formats.mentioned import Name

_SHARDED = "torch.distributed._shard.sharded_tensor.metadata"
_PLANNER = "torch.distributed.checkpoint.planner"
_MEGATRON = "megatron.core.dist_checkpointing.strategies.torch"

METADATA = ("Metadata", "MCoreMetadata")  # the classes that the whole may be of
NAMES = (
    *(Name(_SHARDED, name) for name in ("TensorProperties", "MEM_FORMAT_ENCODING")),
    *(Name(_PLANNER, name) for name in ("SavePlan", "WriteItem", "WriteItemType", "TensorWriteData", "BytesIOWriteData")),
    Name("torch.distributed.checkpoint.filesystem", "_StoragePrefix"),
    *(Name(_MEGATRON, name) for name in ("MCoreMetadata", "MCoreSavePlan")),
)
