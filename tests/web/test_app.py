"""The page's URLs of a real store, with plain HTTP: documents, who may ask, hostile names."""

import http.client
import json
import shutil
import threading
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from itertools import product
from pathlib import Path
from typing import Any
from urllib.parse import quote

import jsonschema
import pytest

import ckptsync
from ckptsync.catalogue.cached import read_catalogue
from ckptsync.cli.main import main
from ckptsync.errors import Transient
from ckptsync.service.monitor import OverviewReader
from ckptsync.status.overview import Overview
from ckptsync.stores.contract import Store
from ckptsync.stores.opening import open_store
from ckptsync.web import overview_cache
from ckptsync.web.app import MANY, Guard, Page, make_app
from ckptsync.web.documents import Documents
from ckptsync.web.overview_cache import OverviewCache
from ckptsync.web.server import HttpServer
from tests.support.waiting import until

NODES = Path(ckptsync.__file__).parent / "demo_data" / "fsdp2"
HOSTILE = ("<img src=x onerror=alert(1)>", "训练 🚀", "x" * 255, "--store", "a%2Fb?c#d&e", "x..")
TOKEN = "a-token-of-this-test-0"
SCHEMA = json.loads((Path(ckptsync.__file__).parent / "docs/json-schema.json").read_text())
JSON = {"Accept": "application/json"}


def push(store: str, run: str = "fsdp2", *nodes: str) -> None:
    for node in nodes or ("node0", "node1"):
        words = ["push", str(NODES / node / "checkpoint-4"), f"--store={store}", f"--run={run}"]
        assert main([*words, "--node", node]) == 0


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A busy machine may need long for the first picture."""
    monkeypatch.setattr(overview_cache, "LONG", 120.0)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store with a verified checkpoint, and runs with hostile names."""
    store = tmp_path_factory.mktemp("web") / "store"
    push(str(store))
    for run in HOSTILE:
        push(str(store), run, "node0")
    assert main(["consolidate", "fsdp2/checkpoint-4", "--store", str(store)]) == 0
    assert main(["verify", "fsdp2/checkpoint-4", "--store", str(store)]) == 0
    return store


class Reader:
    """Reads overviews of a store, and counts them."""

    def __init__(self, store: Store) -> None:
        self.count = 0
        self.error: Transient | None = None
        self.go_on = threading.Event()
        self.go_on.set()
        self._reader = OverviewReader(store, lambda: read_catalogue(store))

    def read(self) -> Overview:
        self.count += 1
        assert self.go_on.wait(60)
        if self.error:
            raise self.error
        return self._reader.read()


@contextmanager
def serving(
    url: Path, listen: str = "127.0.0.1:0", token: str = ""
) -> Iterator[tuple[HttpServer, Reader]]:
    store = open_store(str(url))
    reader = Reader(store)
    page = Page(OverviewCache(reader.read), Documents(store), Guard(listen, token))
    with closing(HttpServer("127.0.0.1:0", make_app({}, page), "web.listen")) as server:
        yield server, reader


def ask(
    server: HttpServer, path: str, headers: Mapping[str, str] = JSON
) -> tuple[int, Mapping[str, str], bytes]:
    with closing(http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)) as asking:
        asking.request("GET", path, headers=dict(headers))
        response = asking.getresponse()
        return response.status, response.headers, response.read()  # type: ignore[return-value]


def document(server: HttpServer, path: str) -> dict[str, Any]:
    status, headers, body = ask(server, path)
    assert (status, headers["Content-Type"]) == (200, "application/json"), body
    found: dict[str, Any] = json.loads(body)
    assert (found["format"], found["exit_code"]) == (1, 0)
    segments = path.strip("/").split("/", 2)
    of = {"": "overview", "nodes": "nodes", "runs": "checkpoint" if segments[2:] else "run"}
    schema = {"$ref": f"#/$defs/web-{of[segments[0]]}", "$defs": SCHEMA["$defs"]}
    jsonschema.validate(found, schema)
    return found


def test_each_url_says_what_the_commands_say(
    whole: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    capsys.readouterr()
    assert main(["status", "--json", "--store", str(whole)]) == 0
    status = json.loads(capsys.readouterr().out)
    assert main(["ls", "fsdp2", "--json", "--store", str(whole)]) == 0
    listed = json.loads(capsys.readouterr().out)["locations"][0]
    with serving(whole) as (server, _):
        overview, nodes = document(server, "/"), document(server, "/nodes")
        run = document(server, "/runs/fsdp2")
        here = document(server, "/runs/fsdp2/checkpoint-4")
        document_of_nothing = document(server, f"/runs/{quote('--store')}/checkpoint-4")
    changing = {"at", "room", "locations"}
    assert overview.keys() == status.keys() - {"locations"} | {"strips"}
    assert {k: overview[k] for k in status if k not in changing} == {
        k: status[k] for k in status if k not in changing
    }
    strip = [{"location": "checkpoint-4", "step": 4, "status": "VERIFIED"}]
    assert overview["strips"]["fsdp2"] == strip
    assert nodes["nodes"] == overview["nodes"]
    assert listed.items() <= run["checkpoints"][0].items()
    times = [run["checkpoints"][0][k] for k in ("saved", "uploaded", "merged", "verified")]
    assert times == sorted(times)
    assert run["checkpoints"][0]["loss"] == run["curves"]["loss"][-1][1]
    assert {"loss", "learning_rate", "grad_norm"} <= run["curves"].keys()
    weights = run["checkpoints"][0]["weights"]
    assert weights == here["weights"]
    assert weights["nonfinite"] == {"tensors": 0, "first": []}
    assert weights["groups"]["attention"]["norm"] > 0
    assert document_of_nothing["weights"] is None
    assert here["files_total"] == len(here["files"]) == listed["files"]
    file = next(f for f in here["files"] if f["name"] == "pytorch_model_fsdp_0/__1_0.distcp")
    assert (file["node"], file["rank"], file["stored"]) == ("node1", 1, True)
    assert here["reports"][0]["verdict"] == "ok"
    assert here["commands"]["pull"] == f"ckptsync pull fsdp2/checkpoint-4 DIR --store {whole}"


def test_damage_is_shown_with_ranges_and_tensors(whole: Path, tmp_path: Path) -> None:
    store = tmp_path / "store"
    shutil.copytree(whole, store)
    name = "fsdp2/consolidated/checkpoint-4/model.safetensors"
    body = bytearray((store / name).read_bytes())
    body[-1] ^= 1
    (store / name).write_bytes(body)
    assert main(["verify", "fsdp2/checkpoint-4", "--store", str(store)]) == 10
    with serving(store) as (server, _):
        here = document(server, "/runs/fsdp2/checkpoint-4")
    damage = here["damage"][0]
    assert (here["status"], damage["file"]) == ("DAMAGED", name.removeprefix("fsdp2/"))
    assert damage["ranges"][0][1] == len(body)
    assert damage["tensors"]


def test_hostile_names_are_found_and_said_as_they_are(whole: Path) -> None:
    with serving(whole) as (server, _):
        for run in HOSTILE:
            url = f"/runs/{quote(run, safe='')}"
            assert document(server, url)["run"] == run
            here = document(server, f"{url}/checkpoint-4")
            assert (here["run"], here["location"]) == (run, "checkpoint-4")
            assert ask(server, url, {})[2].find(run.encode()) == -1 or run.isalnum()


def test_no_path_leads_out(whole: Path) -> None:
    paths = [
        "/runs/..",
        "/runs/%2e%2e",
        "/runs/../../etc/passwd",
        "/runs/..%2F..%2Fetc%2Fpasswd",
        "/runs/fsdp2/..%2F.ckptsync",
        "/runs/fsdp2/../../store",
        "/runs/.ckptsync/nodes",
        "/static/..%2Fapp.py",
        "/static/../app.py",
        "/static//etc/passwd",
        "/runs/%00",
        "/runs/fsdp2/%ff",
        "/.env",
    ]
    with serving(whole) as (server, _):
        assert {path: ask(server, path)[0] for path in paths} == dict.fromkeys(paths, 404)


def test_browsers_get_the_page_and_headers_that_bind_them(whole: Path) -> None:
    with serving(whole) as (server, _):
        for path in ("/", "/nodes", "/runs/fsdp2", "/runs/no/such"):
            status, headers, body = ask(server, path, {"Accept": "text/html,*/*"})
            assert (status, headers["Content-Type"]) == (200, "text/html; charset=utf-8")
            assert b"<!doctype html>" in body
            assert headers["Content-Security-Policy"].startswith("default-src 'self'")
            assert headers["X-Content-Type-Options"] == "nosniff"
            assert headers["Referrer-Policy"] == "no-referrer"
            assert (headers["Cache-Control"], headers["Vary"]) == ("no-store", "Accept")
        assert ask(server, "/")[1]["Cache-Control"] == "no-store"
        assert ask(server, "/static/index.html")[0] == 200
        with closing(http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)) as asking:
            asking.request("POST", "/", b"{}")
            assert asking.getresponse().status == 405


def test_another_site_s_name_for_this_machine_is_refused(whole: Path) -> None:
    hosts = ("evil.example", "evil.example:80", "127.0.0.1.evil.example", "")
    with serving(whole) as (server, _):
        for host, path in product(hosts, ("/", "/events", "/static/index.html", "/runs/fsdp2")):
            assert ask(server, path, {**JSON, "Host": host})[0] == 421
        for name in ("localhost", f"localhost:{server.port}", "[::1]:1", "LOCALHOST"):
            assert ask(server, "/", {**JSON, "Host": name})[0] == 200
    with serving(whole, "0.0.0.0:0", TOKEN) as (server, _):
        for host in hosts:
            headers = {**JSON, "Host": host, "Authorization": f"Bearer {TOKEN}"}
            assert ask(server, "/", headers)[0] == 200


def test_a_token_is_needed_and_a_cookie_replaces_it(whole: Path) -> None:
    with serving(whole, "0.0.0.0:0", TOKEN) as (server, reader):
        for path in ("/", "/nodes", "/runs/fsdp2", "/events", "/static/index.html", "/?token=x"):
            for more in ({}, {"Authorization": "Bearer x"}, {"Cookie": "ckptsync-0=x; =;,"}):
                status, _, body = ask(server, path, {**JSON, **more})
                assert (status, b"fsdp2" in body) == (401, False)
        assert reader.count == 0
        assert ask(server, "/", {**JSON, "Authorization": f"bearer {TOKEN}"})[0] == 200
        status, headers, _ = ask(server, f"//runs/a%20b?x=1&token={TOKEN}", {})
        assert (status, "Location" in headers) == (404, False)
        status, headers, _ = ask(server, f"/runs/a%20b?x=1&token={TOKEN}", {})
        assert (status, headers["Location"]) == (303, "/runs/a%20b?x=1")
        cookie, *attributes = headers["Set-Cookie"].split("; ")
        assert {"HttpOnly", "SameSite=strict"} <= set(attributes)
        assert TOKEN not in cookie
        assert ask(server, "/", {**JSON, "Cookie": f"other=1; {cookie}"})[0] == 200


@pytest.mark.parametrize(("every", "share"), [(3600.0, 0.0), (0.0, 1e9)])
def test_viewers_share_a_refresh_and_without_any_there_is_none(
    whole: Path, monkeypatch: pytest.MonkeyPatch, every: float, share: float
) -> None:
    monkeypatch.setattr(overview_cache, "EVERY", every)
    monkeypatch.setattr(overview_cache, "SHARE", share)
    with serving(whole) as (server, reader):
        assert reader.count == 0
        reader.go_on.clear()
        asking = [threading.Thread(target=document, args=(server, "/")) for _ in range(8)]
        for thread in asking:
            thread.start()
        reader.go_on.set()
        for thread in asking:
            thread.join(60)
        assert {ask(server, "/nodes")[0] for _ in range(MANY + 1)} == {200}
        assert reader.count == 1


def test_a_store_that_does_not_answer_is_said_and_the_last_picture_stays(
    whole: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("EVERY", "SHARE", "OLD"):
        monkeypatch.setattr(overview_cache, name, 0.0)
    with serving(whole) as (server, reader):
        reader.error = Transient("no route", hint="plug it in")
        status, _, body = ask(server, "/")
        assert (status, json.loads(body)["exit_code"]) == (503, 4)
        assert json.loads(body)["hint"] == "plug it in"
        reader.error = None
        before = document(server, "/")
        reader.error = Transient("no route")
        after = document(server, "/")
        assert after["alarms"][0]["code"] == "store-away"
        assert (after["runs"], after["at"]) == (before["runs"], before["at"])
        reader.error = None
        assert document(server, "/")["alarms"] == before["alarms"]


def test_a_slow_store_delays_no_viewer_who_can_have_the_last_picture(
    whole: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(overview_cache, "EVERY", 0.0)
    monkeypatch.setattr(overview_cache, "SHARE", 0.0)
    with serving(whole) as (server, reader):
        before = document(server, "/")
        reader.go_on.clear()
        assert document(server, "/") == before
        reader.go_on.set()


def test_a_viewer_after_a_long_pause_waits_for_a_new_picture(
    whole: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("EVERY", "SHARE", "OLD", "SHORT"):
        monkeypatch.setattr(overview_cache, name, 0.0)
    with serving(whole) as (server, _):
        before = document(server, "/")
        assert document(server, "/")["at"] > before["at"]


def test_a_store_that_is_read_for_long_is_said_at_first(
    whole: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(overview_cache, "LONG", 0.05)
    with serving(whole) as (server, reader):
        reader.go_on.clear()
        status, _, body = ask(server, "/")
        assert status == 503
        assert json.loads(body)["error"].startswith("the store is being read")
        reader.go_on.set()
        assert until(lambda: ask(server, "/")[0] == 200)
        assert reader.count == 1


def events(stream: http.client.HTTPResponse) -> Iterator[float]:
    """Yield ``at`` of each event of a stream."""
    name = ""
    for line in stream:
        field, _, value = line.decode().rstrip().partition(": ")
        if field == "event":
            name = value
        elif field == "data":
            assert name == "change"
            yield json.loads(value)["at"]


@contextmanager
def streaming(server: HttpServer) -> Iterator[int]:
    """Request the stream of events, and yield the answer's status with its first line read."""
    asking = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
    with closing(asking):
        asking.request("GET", "/events")
        with closing(asking.getresponse()) as stream:
            assert stream.readline()
            yield stream.status


def test_a_stream_that_a_client_leaves_makes_room_for_another(
    whole: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ckptsync.web.app.STREAMS", 1)
    monkeypatch.setattr("ckptsync.web.app.EVERY", 0.05)

    def status() -> int:
        with streaming(server) as answer:
            return answer

    with serving(whole) as (server, _):
        with streaming(server) as first:
            assert (first, status()) == (200, 503)
        assert until(lambda: status() == 200)


def test_a_change_is_an_event_and_what_stays_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(overview_cache, "EVERY", 0.05)
    monkeypatch.setattr("ckptsync.web.app.EVERY", 0.05)
    store = tmp_path / "store"
    push(str(store), "fsdp2", "node0")
    with serving(store) as (server, reader):
        asking = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
        with closing(asking):
            asking.request("GET", "/events")
            with closing(asking.getresponse()) as stream:
                assert stream.headers["Content-Type"].startswith("text/event-stream")
                changes = events(stream)
                first = next(changes)
                path = "/runs/fsdp2/checkpoint-4"
                files = document(server, path)["files_total"]
                assert document(server, "/")["strips"]["fsdp2"][0]["status"] == "INCOMPLETE"
                count = reader.count
                while reader.count < count + 3:  # refreshes that find nothing new
                    assert stream.readline()
                push(str(store), "fsdp2", "node1")
                for at in changes:  # the announcement of an upload is a change, too
                    assert at > first
                    [row] = document(server, "/runs/fsdp2")["checkpoints"]
                    [cell] = document(server, "/")["strips"]["fsdp2"]
                    if row["nodes"] == ["node0", "node1"]:
                        break
                assert cell["status"] == "COMPLETE"
                assert document(server, path)["files_total"] > files
