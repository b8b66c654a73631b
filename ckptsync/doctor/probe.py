"""Gather the facts of a machine and of the Python that trains on it, as a dict that JSON can hold.

The training's Python may be another one, without ckptsync.  So this file uses the standard library
of Python 3.8 alone: `ckptsync doctor --python` runs it as a script there, and Ray sends `gather` to
its workers.  No library is imported to learn its version.  A value that cannot be read is left out
or empty.  Of the environment only what `read_variables` returns is included: nothing secret.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import hashlib
import json
import os
import platform
import re
import resource
import secrets
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

LIBRARIES = (
    "torch",
    "transformers",
    "accelerate",
    "deepspeed",
    "peft",
    "safetensors",
    "ray",
    "llamafactory",
    "trl",
)
NCCL = tuple(f"nvidia-nccl-cu{cuda}" for cuda in (13, 12, 11))  # as wheels call it
LAUNCH = (
    "NNODES",
    "NODE_RANK",
    "NPROC_PER_NODE",
    "WORLD_SIZE",
    "RDZV_ID",
    "MIN_NNODES",
    "MAX_NNODES",
)
MASTER = ("MASTER_ADDR", "MASTER_PORT")
DEVICES = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")
OTHERS = ("OMP_NUM_THREADS", "TP_SOCKET_IFNAME", "USE_RAY", "USE_V1", "FORCE_TORCHRUN")
PREFIXES = ("NCCL_", "RCCL_", "GLOO_", "TORCH_NCCL_")
NVIDIA, _NETWORK = Path("/proc/driver/nvidia"), Path("/proc/self/ns/net")
_SECRET = re.compile(r"KEY|TOKEN|SECRET|PASS|CRED|AUTH", re.IGNORECASE)
_LONGEST = 200  # characters of a value
# one address of a name is enough: not all need be of networks here
_BEST = ("answers", "refused", "silent", "unreachable")
_PATIENCE, _LOOKUP = 3.0, 15.0  # seconds for an answer of MASTER_ADDR, and of a name server
_NOBODY = 65534
# where nothing of ours is yet: the training makes the output directory itself
_BESIDE = ".ckptsync-doctor"
_BUILD = re.compile(r"^(cuda|hip)\b[^=\n]*=\s*['\"]([^'\"]+)['\"]", re.MULTILINE)


def gather(
    output_dirs: Sequence[str] = (),
    node: str = "",
    model: str = "",
    tokens: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """Return the facts of this machine and this Python.  May take a minute.

    It looks names up, connects to MASTER_ADDR, may run nvidia-smi, and writes tokens (`leave`).

    Args:
        output_dirs: output directories, whether they exist or not.
        node: the node's id; the host name by default.
        model: the directory of the model that is trained.
        tokens: what `leave` returned.  Without it `leave` is called now, and only nodes that gather
            later see the tokens.

    """
    node = node or socket.gethostname()
    nonces = leave(output_dirs, node) if tokens is None else tokens
    passed, uptime = read_variables(os.environ), _text("/proc/uptime").split(" ")[0]
    affinity = getattr(os, "sched_getaffinity", None)
    return {
        "format": 1,
        "at": time.time(),
        "node": node,
        "within": "ray" if getattr(sys.modules.get("ray"), "is_initialized", bool)() else "",
        "host": socket.gethostname(),
        "machine": _text("/etc/machine-id").strip(),
        "boot": _text("/proc/sys/kernel/random/boot_id").strip(),
        "network": str(_NETWORK.stat().st_ino) if _NETWORK.exists() else "",
        # on this clock; 0 where the system does not say
        "booted": (time.time() - float(uptime) if uptime else 0.0),
        "user": os.environ.get("LOGNAME") or os.environ.get("USER") or str(os.getuid()),
        "uid": os.getuid(),
        "cpus": len(affinity(0)) if affinity else os.cpu_count() or 0,
        "python": platform.python_version(),
        "prefix": sys.prefix,
        "versions": _versions(),
        "builds": _builds(),
        "gpus": _gpus(),
        "driver": _driver(),
        "driver_cuda": _driver_cuda(),
        "overrides": find_overrides(os.environ),
        "variables": passed,
        "interfaces": _interfaces(),
        "addresses": _addresses(socket.gethostname()),
        **_master(
            passed.get("MASTER_ADDR", ""),
            passed.get("MASTER_PORT", ""),
            is_first=passed.get("NODE_RANK", "0") == "0",
        ),
        "limits": _limits(),
        "output_dirs": {
            path: {"nonce": nonces.get(path, ""), "seen": _seen(path)} for path in output_dirs
        },
        "model": model,
        "digest": _digest(model) if model else "",
    }


def read_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables by which nodes find each other, cut to `_LONGEST` characters.

    What may be a secret is left out: names like KEY or TOKEN, values with ``://`` or ``@``.
    Variables in NCCL's own files count unless the environment has them.
    """
    names, variables = {*LAUNCH, *MASTER, *DEVICES, *OTHERS}, {}
    for name, value in sorted({**_nccl_files(environment), **environment}.items()):
        is_secret = _SECRET.search(name) or "://" in value or "@" in value
        if (name in names or name.startswith(PREFIXES)) and not is_secret:
            variables[name] = value[:_LONGEST]
    return variables


def find_overrides(environment: Mapping[str, str]) -> list[str]:
    """Return the paths of the libnccl that LD_PRELOAD or LD_LIBRARY_PATH puts before torch's."""
    preloaded = re.split(r"[: ]+", environment.get("LD_PRELOAD", ""))
    paths = [Path(path) for path in preloaded if "nccl" in path]
    for folder in environment.get("LD_LIBRARY_PATH", "").split(":"):
        paths += sorted(Path(folder).glob("libnccl.so.[0-9]")) if folder.startswith("/") else []
    return [os.path.realpath(path) for path in dict.fromkeys(paths)]


def leave(output_dirs: Iterable[str], node: str) -> dict[str, str]:
    """Write a random token beside each directory; return the tokens that were written, by path.

    Makes directories for them; one that cannot be written has none. Nodes that see one share it.
    """
    name, tokens = re.sub(r"[^A-Za-z0-9_.-]", "-", node), {}
    for path in output_dirs:
        token = secrets.token_hex(8)
        # whether output can be written is another check's question
        with contextlib.suppress(OSError):
            _write_token(path, name, token)
            tokens[path] = token
    return tokens


def _write_token(output_dir: str, name: str, token: str) -> None:
    """Replace a node's token beside an output directory.  Raises OSError."""
    flags, draft = os.O_WRONLY | os.O_CREAT | os.O_EXCL, f".{name}.{token}"
    with _opened(output_dir, is_made=True) as fd:
        file = os.open(draft, flags | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644, dir_fd=fd)
        try:
            os.write(file, token.encode())
        finally:
            os.close(file)
        os.replace(draft, name, src_dir_fd=fd, dst_dir_fd=fd)


def _seen(output_dir: str) -> list[str]:
    """Return the readable tokens of all nodes beside an output directory, sorted; [] if none."""
    tokens, flags = [], os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    with contextlib.suppress(OSError), _opened(output_dir) as fd:
        names = os.listdir(fd)  # noqa: PTH208 - of an open directory
        for name in [name for name in names if not name.startswith(".")]:
            with contextlib.suppress(OSError):  # no file, or another user's
                file = os.open(name, flags, dir_fd=fd)
                try:
                    tokens.append(os.read(file, 64).decode("ascii", "replace"))
                finally:
                    os.close(file)
    return sorted(tokens)


@contextlib.contextmanager
def _opened(output_dir: str, *, is_made: bool = False) -> Iterator[int]:
    """Open the directory of tokens, and close it at the end of the block.

    It lies in the spool of an output directory, or above one that does not exist yet; ``is_made``
    makes it.  It is opened step by step, through no link, and root enters no other user's
    directory.  Raises OSError.
    """
    path = Path(output_dir).absolute()
    above = next(str(each) for each in [path, *path.parents] if each.is_dir())
    if above == "/":
        raise FileNotFoundError(errno.ENOENT, "no directory above it", output_dir)
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
    fd = os.open(above, flags)
    try:
        for step in ("", "_ckptsync", "doctor") if above == str(path) else ("", _BESIDE):
            if step:
                if is_made:
                    with contextlib.suppress(FileExistsError):
                        os.mkdir(step, 0o700, dir_fd=fd)
                below = os.open(step, flags | os.O_NOFOLLOW, dir_fd=fd)
                os.close(fd)
                fd = below
            if os.geteuid() == 0 and os.fstat(fd).st_uid not in (0, _NOBODY):
                raise PermissionError(errno.EACCES, "another user's", step or above)
        yield fd
    finally:
        os.close(fd)


def _version(library: str) -> str:
    """Return the version of an installed library, or ""."""
    with contextlib.suppress(metadata.PackageNotFoundError):
        return metadata.version(library) or ""
    return ""


def _versions() -> dict[str, str]:
    """Return the versions of the installed `LIBRARIES`, and of NCCL."""
    versions = {name: version for name in LIBRARIES if (version := _version(name))}
    nccl = [version for version in map(_version, NCCL) if version]
    return {**versions, "nccl": nccl[0]} if nccl else versions


def _builds() -> dict[str, str]:
    """Return torch's CUDA or HIP from torch/version.py, which is not run; {} without torch."""
    with contextlib.suppress(metadata.PackageNotFoundError):
        path = metadata.distribution("torch").locate_file("torch/version.py")
        return dict(_BUILD.findall(_text(str(path))))
    return {}


def _gpus() -> list[str]:
    """Return the models of the GPUs that NVIDIA's driver or nvidia-smi shows, else AMD's; or []."""
    text = "\n".join(_text(str(path)) for path in sorted(NVIDIA.glob("gpus/*/information")))
    models = re.findall(r"^Model:(.*)", text, re.MULTILINE) or _ask_nvidia_smi("name")
    if models:
        return [model.strip() for model in models]
    return [
        _text(f"{node}/name").strip() or "AMD"
        for node in sorted(Path("/sys/class/kfd/kfd/topology/nodes").glob("*"))
        if re.search(r"^simd_count [1-9]", _text(f"{node}/properties"), re.MULTILINE)
    ]


def _driver() -> str:
    """Return the version of NVIDIA's driver, else of AMD's, or ""; may run nvidia-smi."""
    first = _text(str(NVIDIA / "version")).partition("\n")[0]
    if match := re.search(r"\b\d{3,}\.\d+(\.\d+)?\b", first):
        return match[0]
    version = next(iter(_ask_nvidia_smi("driver_version")), "")
    return version or _text("/sys/module/amdgpu/version").strip()


def _ask_nvidia_smi(field: str) -> list[str]:
    """Return nvidia-smi's value of a field for each GPU; none if it fails or takes over 30 s."""
    command = ["nvidia-smi", f"--query-gpu={field}", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True)  # noqa: S603 - as the training would find it
    except (OSError, subprocess.SubprocessError):
        return []  # a driver that does not answer shows no GPUs to anybody
    return [line.strip() for line in done.stdout.splitlines() if line.strip()]


def _driver_cuda() -> str:
    """Load NVIDIA's driver and return the newest CUDA that it supports, as ``12.8``, or ""."""
    version = ctypes.c_int()
    with contextlib.suppress(OSError, AttributeError):  # no driver of NVIDIA's
        if not ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version)):
            return f"{version.value // 1000}.{version.value % 1000 // 10}"
    return ""


def _interfaces() -> dict[str, dict[str, str]]:
    """Return by interface its link's state, MTU, speed in Mb/s, and whether it has an address."""
    keys, interfaces = {"state": "operstate", "mtu": "mtu", "speed": "speed"}, {}
    for _, name in socket.if_nameindex():
        about = {key: _text(f"/sys/class/net/{name}/{file}").strip() for key, file in keys.items()}
        about["address"] = _address(name) if Path("/proc/net").exists() else ""
        interfaces[name] = about
    return interfaces


def _address(name: str) -> str:
    """Return "yes" if an interface has an IPv4 address, or IPv6 beyond its own link, else "no".

    See netdevice(7) for IPv4, and the kernel's list for IPv6.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking, contextlib.suppress(OSError):
        fcntl.ioctl(asking.fileno(), 0x8915, name.encode().ljust(40, b"\0"))  # SIOCGIFADDR
        return "yes"
    rows = [line.split() for line in _text("/proc/net/if_inet6").splitlines()]
    has_ipv6 = any(words[5] == name and words[3] != "20" for words in rows if len(words) == 6)
    return "yes" if has_ipv6 else "no"


def _addresses(host: str) -> list[str]:
    """Return a host's addresses, sorted; [] if it is unknown or that takes over `_LOOKUP` seconds.

    A thread asks, and is left behind then: a resolver may take minutes to give up its servers.
    """
    addresses: list[str] = []

    def ask() -> None:
        """Look the host up; the thread's main function."""
        with contextlib.suppress(OSError, UnicodeError):  # a name that is none
            answers = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
            addresses.extend(sorted({str(answer[4][0]) for answer in answers}))

    asking = threading.Thread(target=ask, daemon=True)
    try:
        asking.start()
    except RuntimeError:  # the system gives no more: it stays unknown
        return []
    asking.join(_LOOKUP)
    return list(addresses)


def _master(address: str, port: str, *, is_first: bool) -> dict[str, Any]:
    """Return the addresses of MASTER_ADDR, whether they are this machine's, and its port's state.

    ``is_first``: this node is, or may be, the one that listens there.  The state is free or taken
    for that node on its own machine; else answers, refused, silent or unreachable.  Only that node
    binds the port: of two nodes on one machine that bind it at once, one would see it taken.
    """
    addresses = _addresses(address) if address else []
    own_addresses = [candidate for candidate in addresses if _port_state(candidate, 0) == "free"]
    state = ""
    if addresses and port.isdecimal() and 0 < int(port) < 65536:
        number = int(port)
        state = _port_state(own_addresses[0], number) if own_addresses and is_first else ""
        state = state or min(
            (_answers(candidate, number) for candidate in addresses), key=_BEST.index
        )
    return {
        "master": addresses,
        "is_master": bool(own_addresses) if address else None,
        "port": state,
    }


def _port_state(address: str, port: int) -> str:
    """Return "free" if this machine can listen on an address, "taken" if another program does.

    "" if that cannot be told, as for an address of another machine.  Listens for a moment.
    """
    with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET) as trial:
        # as torch's own store does, over what lingers of a training
        trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            trial.bind((address, port))
            if port:
                trial.listen(1)
        except OSError as e:
            return "taken" if e.errno == errno.EADDRINUSE else ""
        return "free"


def _answers(address: str, port: int) -> str:
    """Connect to a port; return answers, refused, silent (for `_PATIENCE` s) or unreachable."""
    try:
        socket.create_connection((address, port), _PATIENCE).close()
    except ConnectionRefusedError:
        return "refused"
    except socket.timeout:  # noqa: UP041 - before Python 3.10 it is not TimeoutError
        return "silent"
    except OSError:
        return "unreachable"
    return "answers"


def _limits() -> dict[str, int]:
    """Return this process's limits by name, -1 for no limit.

    ``nofile``: files; ``memlock``: bytes; ``shm``: bytes that are free in /dev/shm; ``hcas``: the
    number of adapters for RDMA.
    """
    resources = {"nofile": resource.RLIMIT_NOFILE, "memlock": resource.RLIMIT_MEMLOCK}
    soft = {name: resource.getrlimit(number)[0] for name, number in resources.items()}
    limits = {
        name: -1 if limit == resource.RLIM_INFINITY else limit for name, limit in soft.items()
    }
    with contextlib.suppress(OSError):  # containers without it
        shm = os.statvfs("/dev/shm")  # noqa: S108 - looked at, and never written
        limits["shm"] = shm.f_bavail * shm.f_frsize
    return {**limits, "hcas": len(list(Path("/sys/class/infiniband").glob("*")))}


def _digest(model: str) -> str:
    """Return a digest of a model's configuration and indexes, and its safetensors' names and sizes.

    It has 16 hex digits; "" if the directory has no config.json.
    """
    folder, parts = Path(model), [_text(f"{model}/config.json")]
    if not parts[0]:  # it may be anything
        return ""
    parts += [_text(str(path)) for path in sorted(folder.glob("*.index.json"))]
    weights = [path for path in sorted(folder.glob("*.safetensors")) if path.is_file()]
    parts += [f"{path.name} {path.stat().st_size}" for path in weights]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


def _nccl_files(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of NCCL's own files; the user's override /etc/nccl.conf's."""
    user_file = environment.get("NCCL_CONF_FILE") or str(
        Path(environment.get("HOME", ""), ".nccl.conf")
    )
    variables = {}
    for line in [*_text("/etc/nccl.conf").splitlines(), *_text(user_file).splitlines()]:
        name, has_value, value = line.partition("=")
        if has_value and not line.lstrip().startswith("#"):
            variables[name.strip()] = value.strip()
    return variables


def _text(path: str) -> str:
    """Return a file's text as UTF-8, damage replaced; "" if it is no file or cannot be read."""
    with contextlib.suppress(OSError):  # the system does not say
        if Path(path).is_file():
            return Path(path).read_text("utf-8", "replace")
    return ""


if __name__ == "__main__":
    sys.stdout.write(json.dumps(gather(**json.loads(sys.argv[1]))))
