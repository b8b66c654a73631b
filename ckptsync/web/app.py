"""The URLs of the page: JSON for programs, HTML for browsers, and the token.

One URL is both: the Accept header decides. All of it is read only. Names in a URL are looked up in
the overview, so they reach neither the store nor a path. Every answer forbids a browser to load
anything from elsewhere.
"""

from __future__ import annotations

import asyncio
import hmac
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, urlencode

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, RedirectResponse, Response, StreamingResponse
from starlette.routing import Route

from ckptsync.config.value_parsers import UNIX, is_local
from ckptsync.digest import digest
from ckptsync.errors import CkptsyncError, NotFound
from ckptsync.status.overview import Overview
from ckptsync.web.documents import Documents
from ckptsync.web.overview_cache import EVERY, CachedOverview, OverviewCache
from ckptsync.web.server import App, in_thread

FORMAT = 1
PLAIN = "text/plain; charset=utf-8"
MANY = 16  # pages that are made at once
STREAMS = 200  # event streams at once; more viewers ask now and then
HEADERS = {
    "Content-Security-Policy": "default-src 'self'; base-uri 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
}
_FRESH = {"Cache-Control": "no-store", "Vary": "Accept"}
_TYPES = {
    "css": "text/css; charset=utf-8",
    "html": "text/html; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "json": "application/json",
    "svg": "image/svg+xml",
}
_LOCAL = ("localhost", "127.0.0.1", "[::1]")
Endpoint = Callable[[Request], Awaitable[Response]]
Made = Callable[[Overview], dict[str, Any]]
Text = tuple[int, bytes, str]
"""A status, a body, its content type."""


class Guard:
    """Decides who may see the page of a listener.

    ``token``: "" if everybody may who reaches it. ``hosts``: the names in a Host header that are
    accepted on a local address, against DNS rebinding; empty for any.
    """

    def __init__(self, listen: str, token: str) -> None:
        """Derive the cookie's name and value from the token; a server that restarts accepts it."""
        name = listen.rpartition(":")[0].lower()
        has_names = is_local(listen) and not listen.startswith(UNIX)
        self.hosts = frozenset({*_LOCAL, name} if has_names else ())
        self._token = token.encode()
        self._value = digest(b"ckptsync web\0" + self._token)
        self._cookie = f"ckptsync-{self._value[:8]}"

    def refusal(self, request: Request) -> Response | None:
        """Return the answer to a request that is not allowed; None if it is.

        It is 421 for a wrong Host, 401 for a wrong token or none. A request with the right token in
        its query is redirected (303) to the same URL without it, with a cookie.
        """
        host = request.headers.get("host", "").lower()
        name = host.rpartition(":")[0] if not host.endswith("]") and ":" in host else host
        if self.hosts and name not in self.hosts:
            return PlainTextResponse("the Host header names another machine\n", 421)
        if not self._token:
            return None
        scheme, _, token = request.headers.get("authorization", "").partition(" ")
        if scheme.lower() == "bearer" and self._is_token(token.strip()):
            return None
        cookie = request.cookies.get(self._cookie, "").encode("utf-8", "replace")
        if hmac.compare_digest(cookie, self._value.encode()):
            return None
        query = parse_qsl(request.url.query, keep_blank_values=True)
        if self._is_token(dict(query).get("token", "")):
            other_values = urlencode([(name, value) for name, value in query if name != "token"])
            path = "/" + request.scope["raw_path"].decode("ascii").lstrip("/")
            answer = RedirectResponse(f"{path}?{other_values}" if other_values else path, 303)
            answer.set_cookie(self._cookie, self._value, httponly=True, samesite="strict")
            return answer
        text = "a token is needed: Authorization: Bearer TOKEN, or ?token=TOKEN once (web.token)\n"
        return PlainTextResponse(text, 401, {"WWW-Authenticate": "Bearer"})

    def _is_token(self, text: str) -> bool:
        """Return whether a text is the token, in constant time."""
        return hmac.compare_digest(text.encode("utf-8", "replace"), self._token)


def make_app(texts: Mapping[str, Callable[[], Text]], page: Page | None = None) -> App:
    """Return the ASGI application of a listener.

    Other paths are answered with 404 and the list of these, other methods than GET with 405.

    Args:
        texts: for each path, the function that makes its plain answer. At most `MANY` answers of a
            path are made at once, others get 503; ``/healthz`` is always answered.
        page: the page of a store, if this listener has it.

    """
    routes = [Route(path, _text(path, make)) for path, make in texts.items()]
    if page:
        routes += page.routes()
    paths = " and ".join([*texts, *(["/"] if page else [])])
    app = Starlette(
        routes=routes,
        exception_handlers={
            404: _plain(404, f"there are {paths}\n"),
            405: _plain(405, "only GET\n"),
        },
    )
    app.router.redirect_slashes = False
    return app


def _plain(status: int, text: str) -> Any:
    """Return an exception handler that answers with a status and a text."""

    async def answer(_: Request, error: Any) -> Response:
        """Answer with the text, and the headers of the error."""
        headers = {**HEADERS, **(getattr(error, "headers", None) or {})}
        return PlainTextResponse(text, status, headers)

    return answer


def _text(path: str, make: Callable[[], Text]) -> Endpoint:
    """Return the endpoint of a plain answer: 503 if it fails, or `MANY` are being made."""
    running_count = [0]

    async def answer(_: Request) -> Response:
        """Make the answer in a thread; that of /healthz at once."""
        if path == "/healthz":
            status, body, content = make()
        elif running_count[0] >= MANY:
            status, body, content = 503, b"too many pages are being made\n", PLAIN
        else:
            running_count[0] += 1
            try:
                status, body, content = await in_thread(make, "web-page")
            except CkptsyncError as e:
                status, body, content = 503, f"{e}\n".encode(), PLAIN
            finally:
                running_count[0] -= 1
        headers = {"Content-Type": content, "Cache-Control": "no-store", **HEADERS}
        return Response(body, status, headers)

    return answer


class Page:
    """The page of a store, for one listener."""

    def __init__(self, cache: OverviewCache, documents: Documents, guard: Guard) -> None:
        self._cache, self._documents, self._guard = cache, documents, guard
        self._making = self._streams = 0

    def routes(self) -> list[Route]:
        """Return the routes of the page."""
        documents = self._documents
        return [
            Route("/", self._document(lambda _: documents.overview)),
            Route("/nodes", self._document(lambda _: documents.nodes)),
            Route("/runs/{run}", self._document(_of_run(documents))),
            Route("/runs/{run}/{location:path}", self._document(_of_location(documents))),
            Route("/events", self._guarded(self._events)),
            Route("/static/{name:path}", self._guarded(_static)),
        ]

    def _guarded(self, endpoint: Endpoint) -> Endpoint:
        """Return an endpoint that answers requests that are allowed, with `HEADERS`."""

        async def answer(request: Request) -> Response:
            """Answer with the refusal, or else with the endpoint's answer."""
            response = self._guard.refusal(request) or await endpoint(request)
            for name, value in HEADERS.items():
                response.headers.setdefault(name, value)
            return response

        return answer

    def _document(self, of: Callable[[Request], Made]) -> Endpoint:
        """Return the endpoint of a document: JSON if the request accepts it, else the page's HTML.

        ``of``: returns the function that makes the document of a request.
        """

        async def answer(request: Request) -> Response:
            """Answer with HTML, or with JSON that a thread makes; 404 or 503 for an error."""
            if "application/json" not in request.headers.get("accept", ""):
                return _shell()
            if self._making >= MANY:
                return _json_response(503, CkptsyncError("too many pages are being made"))
            self._making += 1
            try:
                cached = await self._cache.get()
                make = partial(_encode_once, cached, request.url.path, of(request))
                return Response(await in_thread(make, "web-page"), headers=_JSON)
            except CkptsyncError as e:
                return _json_response(404 if isinstance(e, NotFound) else 503, e)
            finally:
                self._making -= 1

        return self._guarded(answer)

    async def _events(self, _: Request) -> Response:
        """Answer with an endless stream of events; 503 if there are `STREAMS` already."""
        if self._streams >= STREAMS:
            return PlainTextResponse("too many streams\n", 503)
        headers = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
        return StreamingResponse(self._changes(), 200, headers, "text/event-stream")

    async def _changes(self) -> AsyncIterator[bytes]:
        """Yield an event at first and after each change of the overview, else a comment.

        One comes every `EVERY` seconds, and refreshes the overview, until the client is gone.
        """
        self._streams += 1
        number = -1
        try:
            yield b"retry: 5000\n\n"
            while True:
                try:
                    cached = await self._cache.get()
                except CkptsyncError:
                    yield b": the store does not answer\n\n"
                else:
                    news = json.dumps({"at": cached.overview.at})
                    is_new = cached.number != number
                    yield f"event: change\ndata: {news}\n\n".encode() if is_new else b":\n\n"
                    number = cached.number
                await asyncio.sleep(EVERY)
        finally:
            self._streams -= 1


_JSON = {"Content-Type": "application/json", **_FRESH}


def _encode_once(cached: CachedOverview, url: str, make: Made) -> bytes:
    """Return the document of a URL as JSON, which is made once for each overview."""
    if url not in cached.documents:
        cached.documents[url] = _encoded(make(cached.overview))
    body: bytes = cached.documents[url]
    return body


def _encoded(document: Mapping[str, Any], exit_code: int = 0) -> bytes:
    """Return a document as JSON, with its format and exit code."""
    return json.dumps({"format": FORMAT, "exit_code": exit_code, **document}).encode()


def _json_response(status: int, error: CkptsyncError) -> Response:
    """Return an error as JSON."""
    document = {"error": str(error), "hint": error.hint}
    return Response(_encoded(document, error.exit_code), status, _JSON)


def _of_run(documents: Documents) -> Callable[[Request], Made]:
    """Return a function from a request to the maker of its run's document."""
    return lambda request: partial(documents.run, run=request.path_params["run"])


def _of_location(documents: Documents) -> Callable[[Request], Made]:
    """Return a function from a request to the maker of its location's document."""
    return lambda request: partial(documents.location, **request.path_params)


def _shell() -> Response:
    """Return the page's HTML, whose modules then fetch the document."""
    return Response(
        static_files()["index.html"], headers={"Content-Type": _TYPES["html"], **_FRESH}
    )


async def _static(request: Request) -> Response:
    """Answer with a file of the page, or 404."""
    name = request.path_params["name"]
    body = static_files().get(name)
    if body is None:
        return PlainTextResponse("no such file\n", 404)
    content = _TYPES.get(name.rpartition(".")[2], "application/octet-stream")
    return Response(body, headers={"Content-Type": content, "Cache-Control": "no-cache"})


def static_files() -> Mapping[str, bytes]:
    """Return the files of the page, by their names below ``static``; they are read once.

    Without files there is an empty index.html.
    """
    if not _STATIC:
        folder = Path(__file__).parent / "static"
        for path in sorted(folder.rglob("*")):
            if path.suffix[1:] in _TYPES and path.is_file():
                _STATIC[path.relative_to(folder).as_posix()] = path.read_bytes()
        _STATIC.setdefault("index.html", b"<!doctype html><title>ckptsync</title>")
    return _STATIC


_STATIC: dict[str, bytes] = {}
