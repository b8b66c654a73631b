"""Arguments of ``merge``.  Imports nothing heavy."""

from __future__ import annotations

import argparse
import os

DTYPES = ("auto", "keep", "bf16", "fp16", "fp32")


def add(command: argparse.ArgumentParser) -> None:
    """All of them but the bandwidth."""
    _where(command)
    _what(command)
    _how(command)


def _where(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "sources",
        metavar="SRC",
        nargs="+",
        help="a checkpoint, its inner shard directory, or a DeepSpeed save directory; a path or a URL",
    )
    command.add_argument(
        "destination",
        metavar="DST",
        help="a new directory, which appears whole or not at all; or a URL, where a merge that was killed is gone on with",
    )


def _what(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--dtype",
        choices=DTYPES,
        default="auto",
        help="auto: as the model has it; keep: the most precise copy stored (default: auto)",
    )
    command.add_argument(
        "--max-shard-size", metavar="SIZE", default="5GB", help="of one output file, such as 5GB or 512MiB (default: 5GB)"
    )
    command.add_argument(
        "--source",
        metavar="S",
        help="which weights, where a checkpoint holds several (inspect lists them); S@base is the model under a PEFT adapter in the same"
        " shards, S@adapter=NAME one adapter of several",
    )
    command.add_argument(
        "--config-from",
        metavar="DIR",
        help="where config and tokenizer files lie, if not in the checkpoint or its run; code (*.py, auto_map) is taken from here only",
    )
    command.add_argument(
        "--allow-code",
        action="store_true",
        help="take code that lies in the checkpoint, too: whoever loads the model with trust_remote_code runs it",
    )
    command.add_argument(
        "--base",
        metavar="DIR",
        help="the model that was trained: names and shapes must be its own, and auto gives each tensor its dtype (headers are read)",
    )


def _how(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--jobs",
        metavar="N",
        type=int,
        help="threads that read, cast and digest; 1: none but the program's own (default: a core each, at most 8; 4 from a URL)",
    )
    command.add_argument(
        "--engine",
        choices=("local", "ray"),
        default="local",
        help="ray: each file of weights is made by a task of a Ray cluster, which reads and writes by itself (needs ckptsync[ray])",
    )
    command.add_argument(
        "--ray-address",
        metavar="ADDRESS",
        default=os.environ.get("RAY_ADDRESS", "auto"),
        help="the cluster: HOST:PORT of its head; auto: the one that this machine is in; local: of this machine alone (default: $RAY_ADDRESS, or auto)",
    )
    command.add_argument(
        "--statistics", action="store_true", help="of each tensor written: extremes, norm, NaNs, infinities, zeros"
    )
    command.add_argument(
        "--ignore-times",
        action="store_true",
        help="do not ask the files' times whether they are of one save: they were lost in copying",
    )
