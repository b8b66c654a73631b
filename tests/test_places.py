"""docs/places.md: the loop over ssh is a script of the shell, the task is SkyPilot's."""

from __future__ import annotations

import re
import shlex
import subprocess

import yaml

from ckptsync.cli.main import parser
from tests.support.run_documents import ROOT, blocks

PAGE = (ROOT / "docs" / "places.md").read_text()


def test_the_loop_over_ssh_is_a_script_whose_command_the_command_line_takes() -> None:
    (script,) = [block.text for block in blocks(PAGE) if block.about == "start.sh"]
    subprocess.run(["sh", "-n"], input=script, text=True, check=True)
    (words,) = re.findall(r"ckptsync resume (.*)\" &", script.replace("\\\n", " "))
    parser("resume").parse_args(shlex.split(words))


def test_the_task_for_skypilot_is_yaml_with_a_command_that_the_command_line_takes() -> None:
    (text,) = [block.text for block in blocks(PAGE) if block.about == "task.yaml"]
    task = yaml.safe_load(text)
    assert {"num_nodes", "resources", "setup", "run"} <= task.keys()
    words = shlex.split(task["run"].replace("\\\n", " ").splitlines()[1])
    args = parser(words[1]).parse_args(words[2:])
    assert (args.attempt, args.training[0]) == ("$attempt", "torchrun")
    known = ("TASK_ID", "NODE_IPS", "NUM_NODES", "NODE_RANK", "NUM_GPUS_PER_NODE")
    assert set(re.findall(r"\$SKYPILOT_(\w+)", task["run"])) == set(known)
