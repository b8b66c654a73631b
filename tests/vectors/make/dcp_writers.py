"""torch.distributed.checkpoint written in its less usual ways: dcp_writers.py {local,threads,safetensors} {dress,mesh} --reference DIR.

The states are raw_dcp.py's. local: no rank knows of another, and each has its __R.metadata, beside
rng_state_R.pth as HF Trainer writes them; threads: three files a rank; safetensors: one block at the end of each file, which has no items.
"""

from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from common import RANK, finish, parser, save_reference
from raw_dcp import STATES, flatten
from torch.distributed.checkpoint.filesystem import SerializationFormat


WRITERS: dict[str, dict[str, Any]] = {
    "local": {},
    "threads": {"thread_count": 3},
    "safetensors": {"serialization_format": SerializationFormat.SAFETENSORS},
}


def main() -> None:
    """Build the state, save it, gather it."""
    words = parser(__doc__, WRITERS)
    words.add_argument("state", choices=STATES)
    options = words.parse_args()
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    state = {"model": STATES[options.state]()}
    writer = dcp.FileSystemWriter("out", **WRITERS[options.kind])
    dcp.save(state, storage_writer=writer, use_collectives=options.kind != "local")
    if options.kind == "local":
        torch.save(torch.get_rng_state(), f"out/rng_state_{RANK}.pth")
    save_reference(options.reference / "full.safetensors", flatten(state["model"]))
    finish()


if __name__ == "__main__":
    main()
