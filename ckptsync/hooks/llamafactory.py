"""``ckptsync-llamafactory train x.yaml``: what ``llamafactory-cli train`` does, with the hook in every process.

For more than one device, or with ``FORCE_TORCHRUN=1``, it becomes torchrun, which starts it again as every rank; so it may also be given to a torchrun of one's
own, or to DeepSpeed's or accelerate's launcher: ``torchrun … -m ckptsync.hooks.llamafactory train x.yaml``.  LLaMA-Factory's own command would start its own module there, and patches made in the
parent would be gone.  Under ``USE_RAY=1`` the callback travels to the workers with ``run_exp``'s arguments.
"""

from __future__ import annotations

import contextlib
import inspect
import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from ckptsync.errors import CkptsyncError, ConfigError, Unsupported
from ckptsync.hooks import torchrun
from ckptsync.hooks.added import version_of
from ckptsync.hooks.asked import asked

_OLDEST = (0, 9)
_FILE = (".yaml", ".yml", ".json")
_RANK = re.compile(r"--local[-_]rank=[0-9]+")  # DeepSpeed's launcher puts it before all else; LOCAL_RANK says the same
_REPORTED = re.compile(r"""\breport_to["']?\s*[\s:=]\s*(\[[^\]]*\]|(?:\s*-\s+\S+)+|[^\s,}]+)""")


def main() -> int:
    """Train; what is refused is said as ``ckptsync`` says it, with the same exit codes."""
    try:
        return _run(sys.argv[1:])
    except CkptsyncError as e:
        sys.stderr.write(f"ckptsync-llamafactory: error: {e}\n")
        if e.hint:
            sys.stderr.write(f"ckptsync-llamafactory: hint: {e.hint}\n")
        return e.exit_code


def _run(given: Sequence[str]) -> int:
    words = [word for word in given if not _RANK.fullmatch(word)]
    if words[:1] != ["train"]:
        raise ConfigError(
            f"{words[0] if words else 'nothing'}: only training saves checkpoints: ckptsync-llamafactory train x.yaml",
            hint="llamafactory-cli has the other commands",
        )
    refuse(words[1:], os.environ, version_of("llamafactory"))
    if wrong := asked(os.environ).refused:
        raise wrong
    if not torchrun.is_within(os.environ):
        with _known():
            from llamafactory.extras.misc import get_device_count  # noqa: PLC0415  # what it imports is not needed to refuse
        devices = get_device_count()
        if torchrun.is_wanted(os.environ, devices):
            _become_torchrun(words, torchrun.where(os.environ, devices))
    sys.argv = [sys.argv[0], *words[1:]]  # which it reads itself
    _train()
    return 0


def refuse(words: Sequence[str], environment: Mapping[str, str], version: str) -> None:
    """Raises ConfigError or Unsupported for what would train without the hook, or not at all; ``version``: LLaMA-Factory's."""
    if torchrun.is_on(environment, "USE_V1"):
        raise Unsupported(
            "USE_V1=1: LLaMA-Factory's v1 tells no callback of the checkpoints that it saves on the way",
            hint="use llamafactory-cli, and let a worker watch the output directory: it goes by v1's CHECKPOINT_COMPLETE",
        )
    numbers = tuple(int(n) for n in re.findall(r"[0-9]+", version)[:2])
    if numbers and numbers < _OLDEST:
        raise Unsupported(f"LLaMA-Factory {version}: 0.9.0 or later is wanted", hint="pip install --upgrade llamafactory")
    text = " ".join(words) + "\n" + "".join(_text(word) for word in words if word.endswith(_FILE))
    if any("ckptsync" in re.findall(r"[\w.]+", told) for told in _REPORTED.findall(text)):
        raise ConfigError(
            "report_to: ckptsync: LLaMA-Factory takes the integrations of transformers alone there",
            hint="take it out: the hook is in every process without it",
        )


def _text(path: str) -> str:
    try:
        return Path(path).read_text("utf-8")
    except (OSError, ValueError):
        return ""  # LLaMA-Factory itself says what is wrong with it


def _become_torchrun(words: Sequence[str], where: Sequence[str]) -> None:
    """Does not return: signals and the exit code are torchrun's own."""
    command = [sys.executable, "-m", "torch.distributed.run", *where, "-m", "ckptsync.hooks.llamafactory", *words]
    sys.stdout.flush()
    sys.stderr.flush()
    os.execve(sys.executable, command, torchrun.environment_of(os.environ))  # noqa: S606  # no shell is wanted


def _train() -> None:
    with _known():
        from llamafactory.train.tuner import run_exp  # noqa: PLC0415  # long to import, in the processes that train alone
    if "callbacks" not in inspect.signature(run_exp).parameters:
        raise Unsupported(
            "this LLaMA-Factory's run_exp takes no callbacks",
            hint="ckptsync hook install, then CKPTSYNC_AUTOLOAD=1 llamafactory-cli train x.yaml",
        )
    from ckptsync.hooks.appended import FromEnvironment  # noqa: PLC0415  # it needs transformers

    run_exp(callbacks=[FromEnvironment()])


@contextlib.contextmanager
def _known() -> Iterator[None]:
    """Imports from LLaMA-Factory; raises ConfigError where it is not installed, and Unsupported where it has no such thing."""
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


if __name__ == "__main__":
    if sys.path[0] in ("", str(Path.cwd())):
        del sys.path[0]  # put there by ``-m``; a script of LLaMA-Factory's does not have it
    sys.exit(main())
