"""`ckptsync status --html`: the page and its documents in one file that loads nothing."""

import json
import re
import shutil
from base64 import b64decode
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import quote

import pytest

from ckptsync.cli.main import main
from ckptsync.web import html_file
from ckptsync.web.app import static_files
from tests.support.small_store import DATA
from tests.web.test_app import push

HOSTILE = "<script>alert(1)<!--"


class Parts(HTMLParser):
    """The scripts of a page by type, and the addresses that it loads."""

    def __init__(self) -> None:
        super().__init__()
        self.scripts: dict[str, str] = {}
        self.addresses: list[str] = []
        self._kind = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        self.addresses += [values[k] or "" for k in ("src", "href") if k in values and tag != "a"]
        self._kind = values.get("type") or "" if tag == "script" else ""

    def handle_data(self, data: str) -> None:
        if self._kind:
            self.scripts[self._kind] = self.scripts.get(self._kind, "") + data

    def handle_endtag(self, tag: str) -> None:
        self._kind = ""


def test_a_file_has_the_page_the_modules_and_the_documents(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store, path = str(tmp_path / "store"), tmp_path / "page.html"
    push(store)
    push(store, HOSTILE, "node0")
    assert main(["consolidate", "fsdp2/checkpoint-4", "--store", store]) == 0
    capsys.readouterr()
    assert main(["status", "--store", store, "--html", str(path)]) == 0
    assert str(path) in capsys.readouterr().out
    page = Parts()
    page.feed(path.read_text("utf-8"))
    documents = json.loads(page.scripts["application/json"])
    run = f"/runs/{quote(HOSTILE, safe='!()')}"
    assert documents.keys() == {"/", "/nodes", "/runs/fsdp2", run}
    assert documents["/"]["store"] == store
    assert documents[run]["run"] == HOSTILE
    assert documents["/runs/fsdp2"]["curves"]["loss"]
    assert documents["/runs/fsdp2"]["checkpoints"][0]["weights"]["groups"]
    assert all(address.startswith(("data:", "#")) for address in page.addresses)
    modules = json.loads(page.scripts["importmap"])["imports"]
    names = {f"ckptsync/{name}" for name in static_files() if name.endswith(".js")}
    assert modules.keys() == names
    for url in modules.values():
        text = b64decode(url.partition(",")[2]).decode()
        assert {*re.findall(r'(?:from|import) "(.*?)"', text)} <= names
    assert re.search(r'import "(.*?)"', page.scripts["module"])[1] in names  # type: ignore[index]


def test_of_many_checkpoints_a_file_has_the_newest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, path = str(tmp_path / "store"), tmp_path / "page.html"
    push(store)
    newer = shutil.copytree(DATA / "fsdp2/node0/checkpoint-4", tmp_path / "checkpoint-8")
    assert main(["push", str(newer), "--run", "fsdp2", "--node", "node0", "--store", store]) == 0
    monkeypatch.setattr(html_file, "MOST", 1)
    monkeypatch.setattr(html_file, "LEAST", 1)
    assert main(["status", "--store", store, "--html", str(path)]) == 0
    page = Parts()
    page.feed(path.read_text("utf-8"))
    run = json.loads(page.scripts["application/json"])["/runs/fsdp2"]
    assert [c["location"] for c in run["checkpoints"]] == ["checkpoint-8"]


def test_a_file_that_cannot_be_written_is_an_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    push(str(tmp_path / "store"), "fsdp2", "node0")
    words = ["status", "--store", str(tmp_path / "store"), "--html", str(tmp_path / "no/x")]
    assert main(words) == 1
    assert "no/x: No such file" in capsys.readouterr().err
    for folder in ("/", ".", "", str(tmp_path)):
        assert main([*words[:-1], folder]) == 2
        assert "is a directory" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["store"]
