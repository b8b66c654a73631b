"""Make the model that a ``config.json`` names, in a process that may be killed: ``python -m ckptsync.verify.model_child``, a socket as standard input.

It sends ``ready <libraries>`` as `child` does, then answers each request, a line of JSON, with one: ``directory``; ``forward``, whether the weights may be loaded and
the model be run; and ``wall``, as in `child`.  The answer has ``notes`` (what could not be done), ``faults``
(names and shapes that the model's own class does not accept, a tokenizer that does not load), ``tensors``, ``run`` (values that came out) and ``odd``
(how many of them are not finite).

The model's class is transformers' own: no code that comes with a model is run, nothing is asked of the network.  It is built on the meta device, which
holds no values, and transformers says which of the weights it takes; so what it renames when it loads is renamed here, too.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import tempfile
from pathlib import Path
from typing import Any

from ckptsync.verify import sandbox

_MISSING = 3
_TOKENIZER = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model", "tokenizer_config.json")
_MOST = 100  # faults told
_TOKENS = 8
_LACKING = ("trust_remote_code", "pip install")  # as transformers asks for what it needs besides, in errors of any class
_REPOSITORY = {"local_files_only": True, "trust_remote_code": False}


def main() -> int:
    """Until the socket ends."""
    os.dup2(2, 1)  # what libraries print is no answer
    lacks = sandbox.enter()
    try:
        import accelerate  # noqa: F401, PLC0415 - the meta device is chosen with it
        import torch  # noqa: PLC0415
        import transformers  # noqa: PLC0415
    except ImportError as e:
        sys.stderr.write(f"level model: {e.name} is not installed here\n")
        return _MISSING
    torch.set_num_threads(1)
    tempfile.gettempdir()  # writes a file to find it, once, which a limited process cannot: torch asks for it while a model is made
    with socket.socket(fileno=0) as asked:
        libraries = f"transformers {transformers.__version__}, torch {torch.__version__}"
        asked.sendall(f"ready {libraries}\t{lacks or sandbox.close()}\n".encode())
        with asked.makefile("rb") as lines:
            for line in lines:
                request = json.loads(line)
                signal.alarm(request["wall"])
                answer = look(Path(request["directory"]), torch, transformers, forward=request["forward"])
                signal.alarm(0)
                asked.sendall(json.dumps(answer).encode() + b"\n")
    return 0


def look(directory: Path, torch: Any, transformers: Any, *, forward: bool) -> dict[str, Any]:
    """The answer."""
    answer: dict[str, Any] = {"notes": [], "faults": [], "tensors": 0, "run": 0, "odd": 0}
    try:
        config = transformers.AutoConfig.from_pretrained(directory, **_REPOSITORY)
        for key in ("_attn_implementation", "_experts_implementation"):
            setattr(config, key, "eager")  # one may name a kernel of a repository, and that is code
        kind = getattr(transformers, (config.architectures or [""])[0], None)
    except Exception as e:  # noqa: BLE001 - a model of somebody's own, or newer than this transformers: it cannot be judged
        return answer | {"notes": [_brief("its configuration", e)]}
    if kind is None:
        return answer | {
            "notes": [f"transformers {transformers.__version__} has no class {(config.architectures or ['(none named)'])[0]}"]
        }
    try:
        answer["tensors"], faults = _taken(directory, config, kind)
        answer["faults"] += faults
    except Exception as e:  # noqa: BLE001 - what it cannot even begin with
        return answer | {_whose(e): [_brief(f"{kind.__name__} does not take it", e)]}
    try:
        _tokenizer(directory, transformers)
    except Exception as e:  # noqa: BLE001 - whatever it is, who wants to use the model gets it too
        answer[_whose(e)].append(_brief("the tokenizer does not load", e))
    if forward and not answer["faults"]:
        try:
            answer["run"], answer["odd"] = _run(directory, config, kind, torch)
        except Exception as e:  # noqa: BLE001 - what it needs beside tokens is not known here
            answer["notes"].append(_brief("a forward pass of a few tokens", e))
    return answer


def _taken(directory: Path, config: Any, kind: Any) -> tuple[int, list[str]]:
    """How many tensors the model has, and what is wrong with those that are here."""
    model, told = _loaded(directory, config, kind, device_map="meta")
    faults = [f"{name}: the model has it, and the weights do not" for name in sorted(told["missing_keys"])]
    faults += [f"{name}: the weights have it, and the model does not" for name in sorted(told["unexpected_keys"])]
    faults += [
        f"{name}: of shape {tuple(here)}, the model's is {tuple(wanted)}" for name, here, wanted in sorted(told["mismatched_keys"])
    ]
    faults += [str(message)[:300] for message in told.get("error_msgs", ())]
    more = [f"{len(faults) - _MOST} more tensors that do not fit"] if len(faults) > _MOST else []
    return len(model.state_dict()), [*faults[:_MOST], *more]


def _loaded(directory: Path, config: Any, kind: Any, **how: Any) -> tuple[Any, dict[str, Any]]:
    model, told = kind.from_pretrained(
        directory, config=config, output_loading_info=True, ignore_mismatched_sizes=True, use_safetensors=True, **_REPOSITORY, **how
    )
    return model, told


def _tokenizer(directory: Path, transformers: Any) -> None:
    if any((directory / name).exists() for name in _TOKENIZER):
        transformers.AutoTokenizer.from_pretrained(directory, **_REPOSITORY)("a")


def _run(directory: Path, config: Any, kind: Any, torch: Any) -> tuple[int, int]:
    """Values that come out of a few tokens, and how many of them are not finite."""
    if kind.main_input_name != "input_ids":
        raise ValueError(f"it takes {kind.main_input_name}")
    model, _ = _loaded(directory, config, kind, dtype="auto")
    model.eval()
    size = model.get_input_embeddings().weight.shape[0]
    tokens = (torch.arange(_TOKENS) % size)[None]
    more = {"decoder_input_ids": tokens} if config.is_encoder_decoder else {}
    with torch.inference_mode():
        told = model(input_ids=tokens, **more)
    values = told[0]
    return values.numel(), int((~values.float().isfinite()).sum())


def _whose(e: Exception) -> str:
    """Where an error belongs: what this machine lacks, or what it does not run, is no fault of the model."""
    is_lacking = isinstance(e, (ImportError, MemoryError)) or any(sign in str(e) for sign in _LACKING)
    return "notes" if is_lacking else "faults"


def _brief(what: str, e: Exception) -> str:
    return f"{what}: {type(e).__name__}: {' '.join(str(e).split())}"[:500]


if __name__ == "__main__":
    sys.exit(main())
