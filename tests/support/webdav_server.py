"""A real WebDAV server on a directory: wsgidav below cheroot, in a process that ends with this
one.
"""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

SERVER = """
import os, sys, threading
from cheroot import wsgi
from wsgidav.wsgidav_app import WsgiDAVApp
app = WsgiDAVApp({
    "provider_mapping": {"/": sys.argv[1]}, "simple_dc": {"user_mapping": {"*": True}},
    "logging": {"enable": False}, "verbose": 0, "lock_storage": False,
})
server = wsgi.Server(("127.0.0.1", 0), app)
server.prepare()
print(server.bind_addr[1], flush=True)
threading.Thread(target=server.serve, daemon=True).start()
sys.stdin.read()  # until whoever started this closes it, or dies
os._exit(0)
"""


@contextlib.contextmanager
def served(directory: Path) -> Iterator[str]:
    """Its URL; anybody may write."""
    with subprocess.Popen(
        [sys.executable, "-c", SERVER, str(directory)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    ) as process:
        assert process.stdin
        assert process.stdout
        yield f"http://127.0.0.1:{int(process.stdout.readline())}"
        process.stdin.close()
