"""The key `events`: what is read, and what is refused, with what was probably meant."""

import json
from typing import Any

import pytest

from ckptsync.config.loading import read
from ckptsync.errors import ConfigError
from ckptsync.events.definitions import fill_places

EVAL = {"name": "eval", "on": ["verified"], "command": ["/bin/eval", "{model}"]}


def load(*events: object, store: str = "/s", roles: str = "head") -> Any:
    text = f"roles: [{roles}]\nstore: {{url: '{store}'}}\nevents: {json.dumps(events)}\n"
    return read(text, "c.yaml", {}).events


def test_what_is_read() -> None:
    more = {"runs": "sft-*", "timeout": "7d", "secrets": True, "environment": {"A": "b", "C": None}}
    first, second = load(EVAL | more, {"name": "hook", "on": "damaged", "url": "https://h/x?t=1"})
    assert (first.name, first.on, first.command) == (
        "eval",
        ("verified",),
        ("/bin/eval", "{model}"),
    )
    assert (first.runs, first.timeout, first.secrets) == ("sft-*", 7 * 86400.0, True)
    assert first.environment == {"A": "b", "C": None}
    assert (second.on, second.url, second.timeout) == (("damaged",), "https://h/x?t=1", 3600.0)
    assert "t=1" not in repr(second)


@pytest.mark.parametrize(
    ("event", "said"),
    [
        ("eval", "'eval' is not a mapping"),
        ({"on": ["verified"], "command": ["/x"]}, "None is not the name of an event"),
        (EVAL | {"name": "a/b"}, "'a/b' is not the name of an event"),
        (
            EVAL | {"on": ["verifed"]},
            "'verifed' is not one of complete, .*(did you mean verified?)",
        ),
        (EVAL | {"on": []}, "on: is empty"),
        (EVAL | {"on": ["complete", "verified"]}, "there is no {model} yet"),
        ({"name": "eval", "command": ["/x"]}, "`on` is missing"),
        (EVAL | {"on": None}, "`on` is missing"),
        (EVAL | {"comand": ["/x"]}, "'comand' is not a key of an event (did you mean command?)"),
        (EVAL | {"url": "https://x"}, "needs a command or a url, and not both"),
        ({"name": "eval", "on": ["verified"]}, "needs a command or a url, and not both"),
        (EVAL | {"command": ["eval"]}, "command: 'eval' is relative"),
        (EVAL | {"command": ["/x", "{modle}"]}, "{modle} is not one of {run}.*did you mean model?"),
        (EVAL | {"timeout": "8d"}, "timeout: '8d' is not above 0 and at most 7d"),
        (EVAL | {"timeout": "0s"}, "timeout: '0s' is not above 0 and at most 7d"),
        (EVAL | {"timeout": "soon"}, "timeout: 'soon' is not a duration"),
        (EVAL | {"secrets": "yes"}, "secrets: 'yes' is not one of true, false"),
        (EVAL | {"environment": {"A": 1}}, "environment: 'A' is not a variable with a text"),
        (EVAL | {"environment": {"A-B": "x"}}, "environment: 'A-B' is not a variable"),
        (EVAL | {"environment": {"A": "x\0"}}, "environment: A: a NUL character"),
        (EVAL | {"command": ["/x", "\0"]}, "command: a NUL character"),
        ({"name": "u", "on": ["damaged"], "url": "ftp://x"}, "url: not an address such as"),
        ({"name": "u", "on": ["damaged"], "url": "https://u:hidden@[x"}, "url: not an address"),
    ],
)
def test_what_is_refused(event: object, said: str) -> None:
    with pytest.raises(ConfigError) as e:
        load(event)
    text = str(e.value)
    assert text.startswith("c.yaml:3: events: ")
    assert all(part in text for part in said.split(".*"))
    assert "hidden" not in text


def test_two_of_one_name_no_head_and_no_path_are_refused() -> None:
    with pytest.raises(ConfigError, match="two events are named 'eval'"):
        load(EVAL, EVAL)
    with pytest.raises(ConfigError, match="only a head has events"):
        load(EVAL, roles="verifier")
    with pytest.raises(ConfigError, match=r"eval: \{path\} is of a store that is a path"):
        load(EVAL | {"command": ["/x", "--at={path}"]}, store="s3://bucket/x")


def test_braces_that_are_no_place_stay_as_they_are() -> None:
    words = ("{run}", '{"step": {step}, "x": {}}', "{RUN}", "a{run}b")
    assert fill_places(words, {"run": "{step}", "step": "5"}) == [
        "{step}",
        '{"step": 5, "x": {}}',
        "{RUN}",
        "a{step}b",
    ]
