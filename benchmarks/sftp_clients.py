"""SFTP clients, compared: that the SFTP store speaks SFTP itself, over the pipes of ``ssh``, was
decided by these figures.

    python -m benchmarks.sftp_clients --python /a/venv/bin/python --folder /dev/shm

Against one sshd on this machine each client, in a process of its own, sends a file and gets it
back.  A client that this Python has not is looked for in those given by ``--python``.  CPU seconds
are of the client and the programs it starts; what sshd needs is the same for all.  Ours syncs the
file and its name to the disk, the others do not.
"""

# ruff: noqa: PLC0415  each process imports one client alone

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

Move = Callable[[], object]
PIECE = 8 << 20


def ours(at: dict[str, Any], threads: int = 4) -> tuple[Move, Move]:
    """`SftpStore`, a connection a thread, at most."""
    from concurrent.futures import ThreadPoolExecutor

    from ckptsync.stores.contract import About
    from ckptsync.stores.limits import Limits
    from ckptsync.stores.sftp.store import SftpStore
    from ckptsync.stores.urls import located

    place: Any = located(at["url"])
    store = SftpStore(place, at["options"], Limits(threads=threads))
    size = Path(at["file"]).stat().st_size

    def up() -> None:
        with Path(at["file"]).open("rb") as file:
            store.write("file", iter(lambda: file.read(PIECE), b""), About(size, "bench"))

    def down() -> None:
        def read(start: int) -> None:
            out = bytearray(min(PIECE, size - start))
            store.read_into("file", start, memoryview(out))
            os.pwrite(fd, out, start)

        fd = os.open(at["back"], os.O_WRONLY | os.O_CREAT)
        with ThreadPoolExecutor(threads) as pool:
            list(pool.map(read, range(0, size, PIECE)))
        os.close(fd)

    return up, down


def one_connection(at: dict[str, Any]) -> tuple[Move, Move]:
    """`SftpStore` with a single connection."""
    return ours(at, 1)


def sftp(at: dict[str, Any]) -> tuple[Move, Move]:
    """OpenSSH's own."""
    command = ["sftp", "-q", "-b", "-", *at["words"], at["host"]]

    def do(line: str) -> Move:
        return lambda: subprocess.run(
            command, input=line.encode(), check=True, stdout=subprocess.DEVNULL
        )

    return do(f"put {at['file']} {at['there']}/file\n"), do(
        f"get {at['there']}/file {at['back']}\n"
    )


def paramiko(at: dict[str, Any]) -> tuple[Move, Move]:
    """Its `put` and `get`, which are pipelined."""
    import paramiko

    client = paramiko.SSHClient()
    client.load_host_keys(at["known_hosts"])
    client.connect("127.0.0.1", at["port"], key_filename=at["key"])
    files = client.open_sftp()
    return lambda: files.put(at["file"], f"{at['there']}/file"), lambda: files.get(
        f"{at['there']}/file", at["back"]
    )


def asyncssh(at: dict[str, Any]) -> tuple[Move, Move]:
    """Its `put` and `get`, with the blocks and the number of requests that it takes by itself."""
    import asyncio

    import asyncssh

    async def do(name: str, *paths: str) -> None:
        async with (
            asyncssh.connect(
                "127.0.0.1",
                at["port"],
                known_hosts=at["known_hosts"],
                client_keys=[at["key"]],
                config=None,
            ) as connection,
            connection.start_sftp_client() as files,
        ):
            await getattr(files, name)(*paths)

    there = f"{at['there']}/file"
    return lambda: asyncio.run(do("put", at["file"], there)), lambda: asyncio.run(
        do("get", there, at["back"])
    )


CLIENTS: dict[str, tuple[Callable[[dict[str, Any]], tuple[Move, Move]], str]] = {
    "sftp": (sftp, "sys"),
    "ours": (ours, "ckptsync"),
    "ours, 1 connection": (one_connection, "ckptsync"),
    "asyncssh": (asyncssh, "asyncssh"),
    "paramiko": (paramiko, "paramiko"),
}


def _measured(name: str, at: dict[str, Any]) -> dict[str, float]:
    found = {}
    for way, move in zip(("up", "down"), CLIENTS[name][0](at), strict=True):
        wall, cpu = time.perf_counter(), _cpu()
        move()
        found[way], found[f"{way} cpu"] = time.perf_counter() - wall, _cpu() - cpu
    return found


def _cpu() -> float:
    """Of this process and its children, also those that still run."""
    own, ended = (
        resource.getrusage(resource.RUSAGE_SELF),
        resource.getrusage(resource.RUSAGE_CHILDREN),
    )
    running = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
    return sum(r.ru_utime + r.ru_stime for r in (own, ended)) + sum(_cpu_of(pid) for pid in running)


def _cpu_of(pid: str) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _run(python: str, name: str, at: dict[str, Any]) -> dict[str, float]:
    found = subprocess.run(
        [python, __file__, "--one", json.dumps([name, at])], check=True, capture_output=True
    )
    if Path(at["back"]).read_bytes() != Path(at["file"]).read_bytes():
        raise SystemExit(f"{name}: what came back is not what was sent")
    Path(at["back"]).unlink()
    Path(at["there"], "file").unlink()
    return dict(json.loads(found.stdout))


def _python_of(module: str, others: list[str]) -> str | None:
    if importlib.util.find_spec(module):
        return sys.executable
    check = f"import importlib.util, sys; sys.exit(importlib.util.find_spec({module!r}) is None)"
    return next(
        (p for p in others if not subprocess.run([p, "-c", check], check=False).returncode), None
    )


def main() -> None:
    """Compare them, and print a table: medians, and ratios to sftp's of the same round."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--python", action="append", default=[])
    parser.add_argument("--mib", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--folder", type=Path, default=None, help="where the files are; best in memory"
    )
    parser.add_argument("--one", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.one:
        print(json.dumps(_measured(*json.loads(given.one))))
        return
    from tests.support.sshd import another_sshd

    pythons = {
        name: found
        for name, (_, module) in CLIENTS.items()
        if (found := _python_of(module, given.python))
    }
    with another_sshd() as server, tempfile.TemporaryDirectory(dir=given.folder) as folder:
        Path(folder, "there").mkdir()
        Path(folder, "file").write_bytes(os.urandom(given.mib << 20))
        words = [
            "-F",
            "none",
            "-P",
            str(server.port),
            "-i",
            str(server.key),
            "-o",
            f"UserKnownHostsFile={server.known_hosts}",
        ]
        at = {
            **{name: str(Path(folder, name)) for name in ("there", "file", "back")},
            "url": server.url(f"{folder}/there"),
            "options": dict(server.options),
            "known_hosts": str(server.known_hosts),
            "key": str(server.key),
            "port": server.port,
            "words": words,
            "host": f"{server.user}@127.0.0.1",
        }
        rounds = [
            {name: _run(python, name, at) for name, python in pythons.items()}
            for _ in range(given.rounds)
        ]
    print(
        f"{given.mib} MiB, {given.rounds} rounds: median seconds, and in brackets the median of the"
        " rounds' ratios to sftp's.\n"
    )
    print("| client | up | down | up, CPU | down, CPU |\n|---|---|---|---|---|")
    for name in pythons:
        print(
            f"| {name} | "
            + " | ".join(_cell(rounds, name, what) for what in ("up", "down", "up cpu", "down cpu"))
            + " |"
        )


def _cell(rounds: list[dict[str, dict[str, float]]], name: str, what: str) -> str:
    middle = statistics.median(r[name][what] for r in rounds)
    ratio = statistics.median(r[name][what] / r["sftp"][what] for r in rounds)
    return f"{middle:.2f} ({ratio:.2f})"


if __name__ == "__main__":
    main()
