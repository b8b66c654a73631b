"""A real HTTP server that takes what is posted."""

import json
import queue
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@dataclass
class Hook:
    """``taken``: path, headers and document of each request, in order.

    ``answer``: the status; while ``gate`` is not set, nobody is answered.
    """

    url: str = ""
    answer: int = 200
    taken: "queue.Queue[tuple[str, dict[str, str], Any]]" = field(default_factory=queue.Queue)
    gate: threading.Event = field(default_factory=threading.Event)

    def json_url(self, path: str = "") -> str:
        """Return Apprise's URL of a path here; its 4 s are too few on a busy machine."""
        query = "&" if "?" in path else "?"
        host = self.url.replace("http://", "json://")
        return f"{host}/{path}{query}cto=60&rto=60"

    def next(self) -> Any:
        return self.taken.get(timeout=300)[2]


@contextmanager
def hook(answer: int = 200) -> Iterator[Hook]:
    made = Hook(answer=answer)
    made.gate.set()

    class Taking(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            made.taken.put((self.path, dict(self.headers), body))
            made.gate.wait(60)
            self.send_response(made.answer)
            if made.answer == 302:
                self.send_header("Location", f"{made.url}/elsewhere")
            self.end_headers()

        do_GET = do_POST  # noqa: N815 - the library's name

        def log_message(self, *_: object) -> None:
            return

    with ThreadingHTTPServer(("127.0.0.1", 0), Taking) as server:
        made.url = f"http://127.0.0.1:{server.server_address[1]}"
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        try:
            yield made
        finally:
            made.gate.set()
            server.shutdown()
