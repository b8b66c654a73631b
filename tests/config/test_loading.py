"""File and environment in, frozen values or every problem out."""

from pathlib import Path

import pytest

from ckptsync.config.loading import (
    from_environment,
    load,
    options_for,
    read,
    settings,
    share,
    token_problem,
)
from ckptsync.config.schema import Config
from ckptsync.config.value_parsers import RunConfig
from ckptsync.errors import CkptsyncError, ConfigError
from ckptsync.walk import SPOOL

GOOD = "store: {url: /mnt/x}\nworker:\n  runs: [/data/out]\n"


def problems(text: str, environment: dict[str, str] | None = None) -> str:
    with pytest.raises(ConfigError) as caught:
        read(text, "c.yaml", environment or {})
    assert caught.value.exit_code == 2
    return str(caught.value)


def test_a_short_file_gives_every_default() -> None:
    config = read(GOOD, "c.yaml", {})
    assert isinstance(config, Config)
    assert (config.store.url, config.roles, config.node) == ("/mnt/x", ("worker",), "")
    assert config.worker.runs == (RunConfig("/data/out"),)
    worker, head = config.worker, config.head
    assert (worker.quiet, worker.unmarked, worker.scan_every, worker.keep_pins) == (10, 60, 30, 2)
    assert (head.every, head.dtype, head.max_shard_size) == (30, "auto", 5_000_000_000)
    assert (config.verify.level, config.verify.period, config.verify.tick) == ("digest", 604800, 60)
    assert (config.log.level, config.log.format) == ("info", "auto")


def test_all_problems_are_told_at_once_each_with_its_line_and_path() -> None:
    said = problems(
        "store: {}\n"
        "worker:\n"
        "  runs: [/data]\n"
        "  quite: 5s\n"
        "  scan_every: 30\n"
        "hed: {}\n"
        "head:\n"
        "  dtype: int8\n"
    )
    assert said.startswith("c.yaml: 5 problems: ")
    assert "\n" not in said  # an error stands on one line, wherever it is printed
    for part in (
        "c.yaml:4: worker.quite: unknown key (did you mean worker.quiet?)",
        "c.yaml:5: worker.scan_every: '30' is not a duration",
        "c.yaml:6: hed: unknown key (did you mean head?)",
        "c.yaml:8: head.dtype: 'int8' is not one of auto, keep",
        "c.yaml: store.url: missing",
    ):
        assert part in said


def test_a_value_that_cannot_be_read_is_one_problem() -> None:
    said = problems("store: {url: rel/store}\nworker: {runs: [/data]}\n")
    assert said.startswith("c.yaml:1: store.url: 'rel/store' is relative")
    said = problems("store: {url: rel/store}\nworker: {runs: out}\n")
    assert said.startswith("c.yaml: 2 problems: ")
    assert "missing" not in said


def test_a_key_in_the_wrong_section_is_sent_to_the_right_one() -> None:
    said = problems(GOOD + "head: {keep_pins: 1}\n")
    assert "head.keep_pins: unknown key (did you mean worker.keep_pins?)" in said


def test_the_environment_overrides_the_file_and_its_problems_name_the_variable() -> None:
    given = {"CKPTSYNC_STORE": "/mnt/y", "CKPTSYNC_WORKER_QUIET": "2s", "CKPTSYNC_AUTOLOAD": "1"}
    config = read(GOOD, "c.yaml", given | {"HOME": "/"})
    assert (config.store.url, config.worker.quiet) == ("/mnt/y", 2)
    assert problems(GOOD, {"CKPTSYNC_WORKER_QUIET": "soon"}).startswith(
        "CKPTSYNC_WORKER_QUIET: 'soon' is not a duration"
    )
    assert "unknown variable (did you mean CKPTSYNC_WORKER_QUIET?)" in problems(
        GOOD, {"CKPTSYNC_WORKER_QUIETT": "1s"}
    )


def test_what_a_variable_overrides_in_a_file_is_told_without_secrets() -> None:
    text = (
        "store: {url: /a, options: {key: geheim}}\n"
        "node: n0\n"
        "roles: [head]\n"
        "alerts: {urls: [jsons://h/geheim]}\n"
        "log: {level: info}\n"
    )
    environment = {
        "CKPTSYNC_STORE": "/b",
        "CKPTSYNC_STORAGE_OPTIONS": '{"key": "geheim2"}',
        "CKPTSYNC_ALERTS_URLS": "jsons://h/geheim2",
        "CKPTSYNC_LOG_LEVEL": "info",  # the same value
        "CKPTSYNC_HEAD_JOBS": "3",  # a key that the file does not give
    }
    assert read(text, "x.yaml", environment).overridden == (
        "x.yaml:1: store.url: /a is overridden by CKPTSYNC_STORE=/b",
        "x.yaml:1: store.options: *** is overridden by CKPTSYNC_STORAGE_OPTIONS=***",
        "x.yaml:4: alerts.urls: *** is overridden by CKPTSYNC_ALERTS_URLS=***",
    )
    key = {"CKPTSYNC_STORE": "s3://key:geheim@bucket"}
    (told,) = read("store: {url: /a}\nroles: [head]\n", "x.yaml", key).overridden
    assert told == "x.yaml:1: store.url: /a is overridden by CKPTSYNC_STORE=***"
    assert read(text, "x.yaml", {}).overridden == ()


def test_a_secret_is_hidden_wherever_it_was_set(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(GOOD + "head: {every: , jobs: 3}\nalerts: {urls: [jsons://h/geheim]}\n")
    environment = {"CKPTSYNC_WEB_TOKEN": "geheim-" * 4, "CKPTSYNC_STORE": "s3://key:geheim@bucket"}
    shown = {s.key: (s.value, s.source) for s in settings(path, environment)}
    assert (
        shown.items()
        >= {
            "alerts.urls": ("***", f"{path}:5"),
            "web.token": ("***", "CKPTSYNC_WEB_TOKEN"),
            "store.url": ("***", "CKPTSYNC_STORE"),
            "head.jobs": (3, f"{path}:4"),
            "head.every": ("30s", "default"),
        }.items()
    )


@pytest.mark.parametrize("is_variable", [False, True])
def test_the_former_webhook_is_refused_with_the_form_of_apprise(*, is_variable: bool) -> None:
    text = "store: {url: /a}\nroles: [head]\n"
    environment = {"CKPTSYNC_ALERTS_WEBHOOK": "https://h/geheim"} if is_variable else {}
    text += "" if is_variable else "alerts: {webhook: https://h/geheim}\n"
    with pytest.raises(ConfigError) as caught:
        read(text, "x.yaml", environment)
    name = "CKPTSYNC_ALERTS_WEBHOOK" if is_variable else "x.yaml:3: alerts.webhook"
    assert str(caught.value) == (
        f"{name} is now a URL in alerts.urls: Apprise writes http://host/path as"
        " json://host/path, https:// as jsons://"
    )


TWO = "{path: /1, name: a}, {path: /2, name: a}"


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (GOOD + "worker: {runs: [/b]}\n", "c.yaml:4: worker: given twice"),
        ("[1, 2]", "c.yaml: not a mapping"),
        ("just words", "c.yaml: not a mapping"),
        ("3", "c.yaml: not a mapping"),
        ("store:\n  url: [\n", "c.yaml:3: not YAML"),
        ("store: &a\n  url: *a\n", "c.yaml:2: not plain YAML: an alias (*name) is not read here"),
        ("store: {url: /mnt/x}\n", "c.yaml: worker.runs: missing"),
        (f"store: {{url: /s}}\nworker: {{runs: [{TWO}]}}\n", "two runs are named 'a'"),
        (
            GOOD + "web: {listen: '[::1]:80'}\n",
            "web.listen: a worker does not know the whole store",
        ),
        (GOOD + "head: 5\n", "c.yaml:4: head: 5 is not a mapping (its keys are every, dtype"),
    ],
)
def test_a_problem_of_the_whole_file_has_its_line(text: str, problem: str) -> None:
    assert problem in problems(text)


def test_a_head_needs_no_runs_and_an_empty_section_is_its_defaults() -> None:
    assert read("store: {url: /mnt/x}\nroles: [head]\n", "c.yaml", {}).worker.runs == ()
    assert read(GOOD + "head:\nlog:\n", "c.yaml", {}).head.dtype == "auto"


def test_a_file_that_is_not_there_or_not_text_is_a_configuration_error(tmp_path: Path) -> None:
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    for name in ("absent", "binary", "."):
        with pytest.raises(ConfigError, match="cannot be read"):
            load(tmp_path / name, {})


def test_a_path_is_absolute_and_no_link(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spool = tmp_path / SPOOL
    spool.mkdir(mode=0o700)
    (spool / "c.yaml").write_text(GOOD)
    monkeypatch.chdir(tmp_path)
    assert load(Path(SPOOL, "c.yaml"), {}).file == str(spool / "c.yaml")
    (spool / "link.yaml").symlink_to("c.yaml")  # anyone's, who could write there
    with pytest.raises(CkptsyncError):
        load(spool / "link.yaml", {})


@pytest.mark.parametrize(
    ("listen", "is_safe"),
    [
        ("", True),
        ("127.0.0.1:80", True),
        ("LOCALHOST:80", True),
        ("[::1]:80", True),
        ("unix:/run/web", True),
        ("0.0.0.0:80", False),
        ("[::]:80", False),
        ("127.0.0.1.example:80", False),
    ],
)
def test_an_address_that_other_machines_reach_needs_a_token(listen: str, *, is_safe: bool) -> None:
    assert (token_problem(listen, "") == "") == is_safe
    assert token_problem(listen, "x" * 16) == ""


@pytest.mark.parametrize(
    ("memory", "jobs", "share_of_memory"),
    [
        ("160MiB", 4, 20 << 20),
        ("160MiB", 6, 16 << 20),
        ("160MiB", 9, 16 << 20),
        ("1MiB", 9, 1 << 20),
    ],
)
def test_children_of_a_head_share_its_limits(memory: str, jobs: int, share_of_memory: int) -> None:
    limits = f"limits: {{memory: {memory}, bandwidth: '08:00,36M 19:00,off'}}\n"
    config = read(f"{GOOD}{limits}head: {{jobs: {jobs}}}\n", "c.yaml", {})
    own, all_jobs = share(config), config.limits.bandwidth
    assert own.bandwidth
    assert all_jobs
    assert own.memory == share_of_memory
    assert own.bandwidth.rates == tuple(rate and rate / jobs for rate in all_jobs.rates)
    assert own.bandwidth.starts == all_jobs.starts
    assert share(read(GOOD, "c.yaml", {})).bandwidth is None


def test_without_a_file_the_environment_tells_options_and_limits() -> None:
    given = {"CKPTSYNC_LIMITS_THREADS": "9", "CKPTSYNC_WORKER_QUIET": "?"}
    options, limits = from_environment(given | {"CKPTSYNC_STORAGE_OPTIONS": '{"profile": "lab"}'})
    assert options == {"profile": "lab"}
    assert (limits.threads, limits.patience, limits.bandwidth) == (9, 120.0, None)
    assert from_environment({})[0] == {}


@pytest.mark.parametrize(
    "text",
    ["{", "[" * 100_000, '{"a":"\\ud800"}', '{"a":"\udcff"}', "[1]", '{"a":' + "9" * 5000 + "}"],
)
def test_options_that_are_no_object_of_json_are_a_problem(text: str) -> None:
    with pytest.raises(ConfigError, match="CKPTSYNC_STORAGE_OPTIONS: not "):
        from_environment({"CKPTSYNC_STORAGE_OPTIONS": text})


def test_what_the_environment_tells_wrongly_is_told_at_once_without_its_values() -> None:
    given = {
        "CKPTSYNC_STORAGE_OPTIONS": '{"secret": "hunter2"',
        "CKPTSYNC_LIMITS_STALL": "soon",
        "CKPTSYNC_LIMITS_BANDWITH": "1M",
    }
    with pytest.raises(ConfigError) as caught:
        from_environment(given)
    assert caught.value.exit_code == 2
    for part in (
        "CKPTSYNC_STORAGE_OPTIONS: not JSON",
        "CKPTSYNC_LIMITS_STALL: 'soon'",
        "did you mean CKPTSYNC_LIMITS_BANDWIDTH?",
    ):
        assert part in str(caught.value)
    assert "hunter2" not in str(caught.value)


def test_options_of_several_kinds_are_given_to_their_own() -> None:
    several = {"s3": {"profile": "lab"}, "sftp": {"config": "/etc/ssh/store"}}
    assert options_for("s3://bucket/x", several) == {"profile": "lab"}
    assert options_for("sftp://host/x", several) == {"config": "/etc/ssh/store"}
    assert options_for("s3://bucket/x", {"profile": "lab"}) == {"profile": "lab"}
    assert options_for("/mnt/x", several) == several, "which says so: a path has no options"
