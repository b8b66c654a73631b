"""``ckptsync-llamafactory train x.yaml``: what ``llamafactory-cli train`` does, with the hook in every process.

For more than one device, or with ``FORCE_TORCHRUN=1``, it becomes torchrun, which starts it again as every rank.  So it may also be
started by a torchrun of one's own, or by DeepSpeed's or accelerate's launcher:
``torchrun … -m ckptsync.hooks.llamafactory train x.yaml``.  LLaMA-Factory's own command would start its own module there,
without the hook.  Under ``USE_RAY=1`` the callback travels to the workers with ``run_exp``'s arguments.

torchrun's options come from the variables that LLaMA-Factory's own command reads (0.9.5, ``llamafactory/launcher.py``).
"""

from __future__ import annotations

import contextlib
import inspect
import os
import re
import socket
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from ckptsync.errors import CkptsyncError, ConfigError, Unsupported
from ckptsync.hooks import embedded
from ckptsync.hooks.model_facts import version_of

_OLDEST = (0, 9)
_FILE = (".yaml", ".yml", ".json")
_LOCAL_RANK = re.compile(r"--local[-_]rank=[0-9]+")  # DeepSpeed's launcher puts it first; LOCAL_RANK says the same
_REPORT_TO = re.compile(r"""\breport_to["']?\s*[\s:=]\s*(\[[^\]]*\]|(?:\s*-\s+\S+)+|[^\s,}]+)""")
_TRUE = frozenset({"1", "true", "y"})
_FORCE_TORCHRUN = ("FORCE_TORCHRUN", "USE_MCA", "USE_MEGATRON_BRIDGE")
_NO_TORCHRUN = ("USE_RAY", "USE_KT")  # Ray starts the processes itself; KTransformers has one for all devices
_OPTIM_TORCH = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True", "TORCH_NCCL_AVOID_RECORD_STREAMS": "1"}


def main() -> int:
    """Train; print errors as ``ckptsync`` does, and return its exit codes."""
    try:
        return _run(sys.argv[1:])
    except CkptsyncError as e:
        sys.stderr.write(f"ckptsync-llamafactory: error: {e}\n")
        if e.hint:
            sys.stderr.write(f"ckptsync-llamafactory: hint: {e.hint}\n")
        return e.exit_code


def _run(arguments: Sequence[str]) -> int:
    words = [word for word in arguments if not _LOCAL_RANK.fullmatch(word)]
    if words[:1] != ["train"]:
        raise ConfigError(
            f"{words[0] if words else 'nothing'}: only training saves checkpoints: ckptsync-llamafactory train x.yaml",
            hint="llamafactory-cli has the other commands",
        )
    check(words[1:], os.environ, version_of("llamafactory"))
    if error := embedded.from_environment(os.environ).error:
        raise error
    if not is_rank(os.environ):
        with _import_errors():
            from llamafactory.extras.misc import get_device_count  # noqa: PLC0415  # what it imports is not needed to refuse
        devices = get_device_count()
        if needs_torchrun(os.environ, devices):
            _become_torchrun(words, torchrun_options(os.environ, devices))
    sys.argv = [sys.argv[0], *words[1:]]  # LLaMA-Factory reads it itself
    _train()
    return 0


def check(words: Sequence[str], environment: Mapping[str, str], version: str) -> None:
    """Raise ConfigError or Unsupported for what would train without the hook, or not at all; ``version``: LLaMA-Factory's."""
    if _is_on(environment, "USE_V1"):
        raise Unsupported(
            "USE_V1=1: LLaMA-Factory's v1 tells no callback of the checkpoints that it saves on the way",
            hint="use llamafactory-cli, and let a worker watch the output directory: it goes by v1's CHECKPOINT_COMPLETE",
        )
    numbers = tuple(int(n) for n in re.findall(r"[0-9]+", version)[:2])
    if numbers and numbers < _OLDEST:
        raise Unsupported(f"LLaMA-Factory {version}: 0.9.0 or later is needed", hint="pip install --upgrade llamafactory")
    text = " ".join(words) + "\n" + "".join(_read(word) for word in words if word.endswith(_FILE))
    if any("ckptsync" in re.findall(r"[\w.]+", value) for value in _REPORT_TO.findall(text)):
        raise ConfigError(
            "report_to: ckptsync: LLaMA-Factory takes the integrations of transformers alone there",
            hint="take it out: the hook is in every process without it",
        )


def _read(path: str) -> str:
    try:
        return Path(path).read_text("utf-8")
    except (OSError, ValueError):
        return ""  # LLaMA-Factory itself says what is wrong with it


def _train() -> None:
    with _import_errors():
        from llamafactory.train.tuner import run_exp  # noqa: PLC0415  # long to import, in the processes that train alone
    if "callbacks" not in inspect.signature(run_exp).parameters:
        raise Unsupported(
            "this LLaMA-Factory's run_exp takes no callbacks",
            hint="ckptsync hook install, then CKPTSYNC_AUTOLOAD=1 llamafactory-cli train x.yaml",
        )
    from ckptsync.hooks.hf import FromEnvironment  # noqa: PLC0415  # it needs transformers

    run_exp(callbacks=[FromEnvironment()])


@contextlib.contextmanager
def _import_errors() -> Iterator[None]:
    """Raise ConfigError where LLaMA-Factory is not installed, Unsupported where it lacks what is imported."""
    try:
        yield
    except ImportError as e:
        name = str(e.name)
        if name == "llamafactory" and isinstance(e, ModuleNotFoundError):
            raise ConfigError(
                f"LLaMA-Factory is not installed for {sys.executable}", hint="install both into one environment"
            ) from e
        if not name.startswith("llamafactory"):
            raise  # one of its own dependencies: its words are better
        raise Unsupported(f"this LLaMA-Factory has another structure: {e}", hint="0.9.0 to 0.9.5 are known") from e


# --- torchrun


def is_rank(environment: Mapping[str, str]) -> bool:
    """Return whether a launcher started this process as a rank: torchrun, accelerate's and DeepSpeed's all set these variables."""
    return all(environment.get(variable) for variable in ("LOCAL_RANK", "RANK", "WORLD_SIZE"))


def needs_torchrun(environment: Mapping[str, str], devices: int) -> bool:
    """Return whether LLaMA-Factory would start several processes by torchrun."""
    alone = any(_is_on(environment, variable) for variable in _NO_TORCHRUN)
    return any(_is_on(environment, variable) for variable in _FORCE_TORCHRUN) or (devices > 1 and not alone)


def torchrun_options(environment: Mapping[str, str], devices: int) -> list[str]:
    """Return torchrun's options; an empty variable counts as none.  Raises ConfigError where the nodes could never meet."""

    def value(variable: str, default: str = "") -> str:
        return environment.get(variable, "").strip() or default

    nodes, node, name = value("NNODES", "1"), value("NODE_RANK", "0"), value("RDZV_ID")
    if name and value("MIN_NNODES") and value("MAX_NNODES"):
        nodes = f"{value('MIN_NNODES')}:{value('MAX_NNODES')}"
    _check_rendezvous([variable for variable in ("MASTER_ADDR", "MASTER_PORT") if not value(variable)], nodes, node, name)
    address, port = value("MASTER_ADDR", "127.0.0.1"), value("MASTER_PORT") or _free_port()
    processes = ["--nproc-per-node", value("NPROC_PER_NODE", str(max(1, devices)))]
    if not name:
        return ["--nnodes", nodes, "--node-rank", node, *processes, "--master-addr", address, "--master-port", port]
    rendezvous = ["--rdzv-id", name, "--rdzv-backend", "c10d", "--rdzv-endpoint", f"{address}:{port}"]
    return ["--nnodes", nodes, *processes, *rendezvous, "--max-restarts", value("MAX_RESTARTS", "0")]


def torchrun_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of torchrun's processes."""
    return {**environment, **(_OPTIM_TORCH if _is_on(environment, "OPTIM_TORCH", "1") else {})}


def _become_torchrun(words: Sequence[str], options: Sequence[str]) -> None:
    """Replace this process: signals and the exit code are torchrun's own."""
    command = [sys.executable, "-m", "torch.distributed.run", *options, "-m", "ckptsync.hooks.llamafactory", *words]
    sys.stdout.flush()
    sys.stderr.flush()
    os.execve(sys.executable, command, torchrun_environment(os.environ))  # noqa: S606  # no shell is wanted


def _check_rendezvous(missing: Sequence[str], nodes: str, node: str, name: str) -> None:
    """Raise ConfigError where nobody can guess the address: the first node's own will do, but never its port."""
    if node == "0" and not name:
        missing = [variable for variable in missing if variable != "MASTER_ADDR"]
    if missing and (node != "0" or nodes.partition(":")[0] not in ("0", "1")):
        why = f"NODE_RANK={node}" if node != "0" else f"NNODES={nodes}"
        raise ConfigError(
            f"{' and '.join(missing)}: not set, and {why}: the nodes would wait for each other for ever",
            hint="give every node the same MASTER_ADDR and MASTER_PORT: the first node's address, and a free port there",
        )


def _free_port() -> str:
    with socket.socket() as bound:
        bound.bind(("", 0))
        return str(bound.getsockname()[1])


def _is_on(environment: Mapping[str, str], variable: str, default: str = "0") -> bool:
    """Read a switch as LLaMA-Factory does."""
    return environment.get(variable, default).lower() in _TRUE


if __name__ == "__main__":
    if sys.path[0] in ("", str(Path.cwd())):
        del sys.path[0]  # put there by ``-m``; a script of LLaMA-Factory's does not have it
    sys.exit(main())
