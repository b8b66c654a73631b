"""The page in Chromium: what it shows of real stores, and how it changes while it is open."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path
from urllib.parse import quote

import pytest

from ckptsync.cli.demo import DATA, NODES, configurations, running
from ckptsync.records.weights_record import GroupValues, ModelValues, nonfinite_finding
from ckptsync.stores.opening import create_store
from tests.support import small_store
from tests.support.ports import free_port
from tests.support.status_examples import heart, location, shown
from tests.support.waiting import until
from tests.support.worker_in_process import push_now
from tests.web.browser.conftest import Open
from tests.web.browser.serving import page_of, web_command

RUN_PAGE = "/runs/fsdp2"
IS_WITHIN = "[...document.querySelectorAll('.fact')].every(f => f.scrollWidth <= f.clientWidth)"
HOSTILE = ("<img src=x onerror=alert(1)>", "训练-一", "r" * 255)


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_store.make(tmp_path_factory.mktemp("small") / "store")


def test_each_page_loads(small: Path, open_page: Open) -> None:
    with web_command(small) as url:
        for path, text in (
            ("/", "fsdp2"),
            (RUN_PAGE, "checkpoint-4"),
            (f"{RUN_PAGE}/checkpoint-4", "ckptsync pull"),
            ("/runs/zero3/checkpoint-4", "INCOMPLETE"),
            ("/nodes", "No node has reported"),
        ):
            page = open_page(url + path)
            page.get_by_text(text).first.wait_for()
            assert page.evaluate(IS_WITHIN)


def test_norms_by_group_are_curves_and_nan_is_counted_in_both_languages(open_page: Open) -> None:
    def values(step: int) -> ModelValues:
        nans = 7 if step == 40 else 0
        groups = (
            GroupValues("attention", 4, 10, 1.0 + step, -1.0, 1.0, 1234, nans, 0),
            GroupValues("mlp", 4, 10, 2.0, -1.0, 1.0, 0, 0, 0),
        )
        findings = (nonfinite_finding(["q_proj.weight"]),) if nans else ()
        return ModelValues(groups, len(findings), findings=findings)

    saves = [location(f"a/checkpoint-{n}", ago=900 - n, weights=values(n)) for n in (10, 20, 40)]
    saves.append(location("b/checkpoint-1"))
    with page_of(lambda: shown(heart(), locations=saves)) as url:
        page = open_page(f"{url}/runs/a")
        section = page.get_by_role("region", name="Weights", exact=True).first
        section.wait_for()
        assert section.locator("figure").count() == 2
        label = section.locator("figure svg").first.get_attribute("aria-label") or ""
        assert "Norm: attention: 3 points, from 11 to 11, last 41 at step 40" in label
        row = section.locator("tbody tr").first
        assert re.split(r"\s+", row.inner_text()) == [
            *("checkpoint-40", "7", "0", "1,234"),
            *("1", "tensor", "holds", "NaN", "or", "infinity", "(q_proj.weight)"),
        ]
        assert section.locator("strong.bad").count() == 1
        page.get_by_text("中文").click()
        page.locator("figcaption").get_by_text("注意力层").wait_for()
        page.get_by_role("heading", name="权重", exact=True).wait_for()
        page = open_page(f"{url}/runs/b")
        page.get_by_text("checkpoint-1").first.wait_for()
        assert page.get_by_role("heading", name="Weights").count() == 0


def test_a_damaged_model_is_not_said_to_open(open_page: Open) -> None:
    hurt = location("a/checkpoint-2", "DAMAGED", consolidated=True, suspects=("model.safetensors",))
    with page_of(lambda: shown(heart(), locations=[location("a/checkpoint-1"), hurt])) as url:
        cells = open_page(f"{url}/runs/a").locator("tbody tr")
        assert "damaged" in cells.filter(has_text="checkpoint-2").inner_text().split()
        assert "opens" in cells.filter(has_text="checkpoint-1").inner_text().split()


def test_an_empty_store_says_how_to_begin(tmp_path: Path, open_page: Open) -> None:
    create_store(str(tmp_path / "store"))
    with web_command(tmp_path / "store") as url:
        page = open_page(url)
        page.get_by_text("No runs yet").wait_for()
        assert "ckptsync push" in page.inner_text("main")


def test_an_error_of_the_server_is_shown(small: Path, open_page: Open) -> None:
    with web_command(small) as url:
        page = open_page(f"{url}/runs/absent", strict=False)
        page.get_by_role("alert").get_by_text("'absent' not found").wait_for()


def test_a_flipped_bit_turns_the_page(tmp_path: Path, open_page: Open) -> None:
    store = small_store.make(tmp_path / "store")
    with web_command(store) as url:
        page = open_page(url + RUN_PAGE)
        page.locator("tbody .badge").get_by_text("VERIFIED", exact=True).wait_for()
        page.locator("tbody a").first.focus()
        small_store.flip(store / "fsdp2" / small_store.SHARD)
        command = [sys.executable, "-m", "ckptsync", "verify", "fsdp2", "--store", str(store)]
        assert subprocess.run(command, check=False, capture_output=True).returncode == 10
        page.locator("tbody .badge").get_by_text("DAMAGED", exact=True).wait_for()
        assert page.evaluate("document.activeElement.textContent") == "checkpoint-4"
        page.click("tbody a")
        page.get_by_role("heading", name="Damage", exact=True).wait_for()
        assert "self_attn.k_proj.weight" in page.inner_text("main")
        page.click("nav a >> nth=0")
        page.locator("#alerts .alarm").first.wait_for()


def test_a_bar_moves_while_a_node_uploads(tmp_path: Path, open_page: Open) -> None:
    create_store(str(tmp_path / "store"))
    configs = configurations(tmp_path)
    node = NODES[0]
    configs[node]["limits"] = {"bandwidth": "300KB/s"}
    made = tmp_path / "made"
    shutil.copytree(DATA / "fsdp2" / node / "checkpoint-4", made)
    (made / "extra_state.bin").write_bytes(bytes(range(256)) * (1 << 18))
    out = tmp_path / node / "out" / "fsdp2"
    out.mkdir(parents=True)
    made.rename(out / "checkpoint-4")
    with running(tmp_path / "etc", {node: configs[node]}), web_command(tmp_path / "store") as url:
        page = open_page(url)
        bar = page.locator("progress[value]")
        bar.wait_for()

        def value() -> float:
            return float(bar.get_attribute("value") or 0) if bar.count() else 0

        first = value()
        assert until(lambda: value() > first, pause=0.2)
        shown = re.compile(r"\d+ %.*MB / 67\.\d MB.*/s")
        page.locator(".job").get_by_text(shown).first.wait_for()


def test_names_are_text_whatever_they_are(tmp_path: Path, open_page: Open) -> None:
    store = create_store(str(tmp_path / "store"))
    for run in HOSTILE:
        push_now(DATA / "fsdp2" / NODES[0], store, NODES[0], run)
    with web_command(tmp_path / "store") as url:
        for run in HOSTILE:
            page = open_page(url)
            page.get_by_role("link", name=run, exact=True).click()
            page.get_by_role("heading", name=run, exact=True).wait_for()
            page.click("tbody a")
            page.get_by_role("heading", name="Commands").wait_for()
            assert page.url == f"{url}/runs/{quote(run, safe='()')}/checkpoint-4"
            assert page.locator("img").count() == 0
            assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")


def test_many_runs_and_checkpoints_are_shown(open_page: Open) -> None:
    sizes = {f"run-{r:03}": 10 for r in range(300)} | {"run-000": 1000}
    names = [f"{run}/checkpoint-{n}" for run, size in sizes.items() for n in range(1, size + 1)]
    overview = shown(heart(), locations=map(location, names))
    with page_of(lambda: overview) as url:
        page = open_page(url)
        page.locator("tbody tr >> nth=299").wait_for()
        page.goto(f"{url}/runs/run-000")
        page.locator("tbody tr >> nth=999").wait_for()


def test_the_page_as_one_file(small: Path, tmp_path: Path, open_page: Open) -> None:
    written = tmp_path / "status.html"
    words = ["status", "--store", str(small), "--html", str(written)]
    subprocess.run([sys.executable, "-m", "ckptsync", *words], check=False, capture_output=True)
    page = open_page(written.as_uri())
    page.get_by_role("link", name="fsdp2", exact=True).click()
    page.get_by_role("heading", name="fsdp2").wait_for()
    page.locator("figure .line").first.wait_for()
    page.get_by_role("link", name="Nodes").click()
    page.get_by_role("heading", name="Nodes").wait_for()
    page.go_back()
    page.go_back()
    page.get_by_role("link", name="zero3", exact=True).wait_for()


def test_both_languages_and_the_switch(small: Path, open_page: Open) -> None:
    with web_command(small) as url:
        page = open_page(url, locale="zh-CN")
        page.get_by_role("link", name="概览").wait_for()
        assert page.get_attribute("html", "lang") == "zh-CN"
        page.get_by_role("button", name="Show in English").click()
        page.get_by_role("link", name="Overview").wait_for()
        page.reload()
        page.get_by_role("link", name="Overview").wait_for()
        assert page.get_attribute("html", "lang") == "en"


def test_the_keyboard_is_enough(small: Path, open_page: Open) -> None:
    def text() -> str:
        return str(page.evaluate("document.activeElement.textContent"))

    def tab_to(wanted: str) -> None:
        for _ in range(60):
            if text() == wanted:
                return
            page.keyboard.press("Tab")
        raise AssertionError(f"{wanted}: no Tab reaches it")

    with web_command(small) as url:
        page = open_page(url)
        page.locator("tbody tr").first.wait_for()
        page.keyboard.press("Tab")
        assert text() == "Skip to the content"
        page.keyboard.press("Enter")
        assert page.evaluate("document.activeElement.id") == "main"
        tab_to("V")
        page.keyboard.press("Enter")
        page.get_by_role("heading", name="Commands").wait_for()
        tab_to("Copy")
        page.keyboard.press("Enter")
        page.get_by_role("button").get_by_text(re.compile(r"Copied|Ctrl\+C")).wait_for()
        page.goto(url + RUN_PAGE)
        page.locator("figure svg").first.focus()
        page.keyboard.press("ArrowLeft")
        page.locator("figure .hover text").first.get_by_text(re.compile("^step")).wait_for()


def test_a_lost_connection_is_said_and_ends(small: Path, open_page: Open) -> None:
    with web_command(small, f"127.0.0.1:{free_port()}") as url:
        page = open_page(url, strict=False)
        page.locator("#connection.live").wait_for()
    page.locator("#connection.away").get_by_text(re.compile(r"last seen \d+ s ago")).wait_for()
    assert page.locator("tbody tr").count()
    with web_command(small, url.removeprefix("http://")):
        page.locator("#connection.live").wait_for()


def test_a_hidden_page_asks_for_nothing(open_page: Open) -> None:
    step = iter(range(1, 10**6))
    with page_of(
        lambda: shown(heart(ago=1), locations=[location(f"run/checkpoint-{next(step)}")])
    ) as url:
        page = open_page(url)
        asked = list[str]()
        page.on("request", lambda request: asked.append(request.url))
        assert until(lambda: page.evaluate("1") and asked)
        hide = "Object.defineProperty(document, 'hidden', {value: %s, configurable: true});"
        event = "document.dispatchEvent(new Event('visibilitychange'))"
        page.evaluate(hide % "true" + event)

        def is_quiet() -> bool:
            asked.clear()
            page.wait_for_timeout(2000)
            return not asked

        assert until(is_quiet), "what it has asked already is not over"
        page.wait_for_timeout(11_000)
        assert not asked
        page.evaluate(hide % "false" + event)
        assert until(lambda: page.evaluate("1") and asked)
