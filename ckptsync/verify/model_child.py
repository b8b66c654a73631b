"""Make the model that a ``config.json`` names: ``python -m ckptsync.verify.model_child``.

Requests and answers are as in `sandbox.serve`.  A request has ``directory``, and ``forward``: may
the weights be loaded and the model be run?  The answer has ``notes`` (what could not be done),
``faults`` (names and shapes that the model's class refuses, a tokenizer that does not load),
``tensors``, ``run`` (values that came out) and ``odd`` (how many of them are not finite).

The model's class is transformers' own: no code that comes with a model is run, nothing is asked of
the network.  It is built on the meta device, which holds no values, and transformers says which
weights it takes; so what it renames when it loads is renamed here, too.
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path
from typing import Any

from ckptsync.verify import sandbox

_TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model")
_TOKENIZER = (*_TOKENIZERS, "tokenizer_config.json")
_MOST = 100  # faults in an answer
_TOKENS = 8
_LACKING = ("trust_remote_code", "pip install")  # in transformers' errors of any class
_REPOSITORY = {"local_files_only": True, "trust_remote_code": False}


def main() -> int:
    """Answer requests until the socket ends."""
    os.dup2(2, 1)  # what libraries print is no answer
    lacks = sandbox.enter()
    try:
        import accelerate  # noqa: F401, PLC0415 - the meta device is chosen with it
        import torch  # noqa: PLC0415
        import transformers  # noqa: PLC0415
    except ImportError as e:
        sys.stderr.write(f"level model: {e.name} is not installed here\n")
        return sandbox.MISSING
    torch.set_num_threads(1)
    # Torch asks for it while a model is made, and finding it writes a file: not possible later.
    tempfile.gettempdir()

    def answer(request: dict[str, Any], _path: str) -> dict[str, Any]:
        forward = request["forward"]
        return examine(Path(request["directory"]), torch, transformers, forward=forward)

    libraries = f"transformers {transformers.__version__}, torch {torch.__version__}"
    sandbox.serve(libraries, lacks, answer)
    return 0


def examine(directory: Path, torch: Any, transformers: Any, *, forward: bool) -> dict[str, Any]:
    """Return the answer about a model's directory."""
    answer: dict[str, Any] = {"notes": [], "faults": [], "tensors": 0, "run": 0, "odd": 0}
    try:
        config = transformers.AutoConfig.from_pretrained(directory, **_REPOSITORY)
        for key in ("_attn_implementation", "_experts_implementation"):
            setattr(config, key, "eager")  # one may name a kernel of a repository, and that is code
        name = (config.architectures or ["(none named)"])[0]
        kind = getattr(transformers, name, None)
    except Exception as e:  # noqa: BLE001 - somebody's own model, or newer than this transformers
        return answer | {"notes": [_brief("its configuration", e)]}
    if kind is None:
        return answer | {"notes": [f"transformers {transformers.__version__} has no class {name}"]}
    try:
        answer["tensors"], answer["faults"] = _compare(directory, config, kind)
    except Exception as e:  # noqa: BLE001 - what it cannot even begin with
        return answer | {blame(e): [_brief(f"{kind.__name__} does not take it", e)]}
    try:
        if any((directory / name).exists() for name in _TOKENIZER):
            transformers.AutoTokenizer.from_pretrained(directory, **_REPOSITORY)("a")
    except Exception as e:  # noqa: BLE001 - whoever uses the model gets it, too
        answer[blame(e)].append(_brief("the tokenizer does not load", e))
    if forward and not answer["faults"]:
        try:
            answer["run"], answer["odd"] = _run(directory, config, kind, torch)
        except Exception as e:  # noqa: BLE001 - what it needs beside tokens is not known here
            answer["notes"].append(_brief("a forward pass of a few tokens", e))
    return answer


def _compare(directory: Path, config: Any, kind: Any) -> tuple[int, list[str]]:
    """Return how many tensors the model has, and what is wrong with those that are here."""
    model, loading = _load(directory, config, kind, device_map="meta")
    missing, unexpected = sorted(loading["missing_keys"]), sorted(loading["unexpected_keys"])
    faults = [f"{name}: the model has it, the weights do not" for name in missing]
    faults += [f"{name}: the weights have it, the model does not" for name in unexpected]
    for name, here, expected in sorted(loading["mismatched_keys"]):
        faults.append(f"{name}: of shape {tuple(here)}, the model's is {tuple(expected)}")
    faults += [str(message)[:300] for message in loading.get("error_msgs", ())]
    if len(faults) > _MOST:
        faults = [*faults[:_MOST], f"{len(faults) - _MOST} more tensors that do not fit"]
    return len(model.state_dict()), faults


def _load(directory: Path, config: Any, kind: Any, **how: Any) -> tuple[Any, dict[str, Any]]:
    how |= {"output_loading_info": True, "ignore_mismatched_sizes": True, "use_safetensors": True}
    model, loading = kind.from_pretrained(directory, config=config, **_REPOSITORY, **how)
    return model, loading


def _run(directory: Path, config: Any, kind: Any, torch: Any) -> tuple[int, int]:
    """Return how many values come out of a few tokens, and how many of them are not finite."""
    if kind.main_input_name != "input_ids":
        raise ValueError(f"it takes {kind.main_input_name}")
    model, _ = _load(directory, config, kind, dtype="auto")
    model.eval()
    size = model.get_input_embeddings().weight.shape[0]
    tokens = (torch.arange(_TOKENS) % size)[None]
    more = {"decoder_input_ids": tokens} if config.is_encoder_decoder else {}
    with torch.inference_mode():
        values = model(input_ids=tokens, **more)[0]
    return values.numel(), int((~values.float().isfinite()).sum())


def blame(e: Exception) -> str:
    """Return where an error belongs: what this machine lacks, or does not run, is no fault."""
    if isinstance(e, (ImportError, MemoryError)) or any(sign in str(e) for sign in _LACKING):
        return "notes"
    return "faults"


def _brief(what: str, e: Exception) -> str:
    return f"{what}: {type(e).__name__}: {' '.join(str(e).split())}"[:500]


if __name__ == "__main__":
    sys.exit(main())
