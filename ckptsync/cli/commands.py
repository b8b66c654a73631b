"""The table of commands: by purpose, what each does, and two examples.

``ckptsync --help``, ``help``, completion, man pages and ``docs/cli.md`` are made from it, without
an import of the commands' modules.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple


class Entry(NamedTuple):
    """What a command does, as a phrase; two examples, without the program's name."""

    summary: str
    examples: tuple[str, str]


GROUPS: Mapping[str, Mapping[str, Entry]] = {
    "checkpoints on this machine": {
        "inspect": Entry(
            "show which layouts a checkpoint has, whether it is complete, and its tensors",
            ("inspect out/checkpoint-500", "inspect node0/checkpoint-500 node1/checkpoint-500"),
        ),
        "merge": Entry(
            "merge a sharded checkpoint into safetensors; needs no service",
            (
                "merge out/checkpoint-500 merged/",
                "merge node0/ckpt node1/ckpt merged/ --dtype bf16",
            ),
        ),
        "convert": Entry(
            "rewrite DeepSpeed's ZeRO shards so that any number of ranks can resume from them",
            (
                "convert out/checkpoint-500 universal/ --to universal",
                "convert node0/ckpt node1/ckpt universal/ --to universal",
            ),
        ),
        "diff": Entry(
            "compare two checkpoints or models, tensor by tensor: what is the same, what changed",
            (
                "diff llama-sft/checkpoint-500 llama-sft/checkpoint-1000 --store /mnt/checkpoints",
                "diff node0/ckpt node1/ckpt merged/ --top 5",
            ),
        ),
        "push": Entry(
            "upload one checkpoint, or every checkpoint of a directory, now",
            (
                "push out/checkpoint-500 --store s3://bucket/checkpoints",
                "push out -c worker.yaml --send weights",
            ),
        ),
    },
    "a training": {
        "resume": Entry(
            "run a training from the newest checkpoint that all its nodes can resume from",
            (
                "resume out --store s3://bucket/ckpts -- torchrun train.py --resume {checkpoint}",
                "resume out -c worker.yaml --for hf -- torchrun train.py --output_dir out",
            ),
        ),
        "drain": Entry(
            "wait until the store has what a training saved on this machine",
            (
                "drain out --store s3://bucket/checkpoints",
                "drain out -c worker.yaml --wait 2m",
            ),
        ),
    },
    "checkpoints in a store": {
        "ls": Entry(
            "list the runs and checkpoints of a store with their status",
            ("ls --store s3://bucket/checkpoints", "ls llama-sft --sort loss"),
        ),
        "pull": Entry(
            "download a checkpoint, so that a training can resume from it",
            (
                "pull llama-sft /data/out --store s3://bucket/checkpoints",
                "pull llama-sft/checkpoint-500 /models/llama --consolidated",
            ),
        ),
        "consolidate": Entry(
            "merge what is complete in a store and has no model yet, as a head does",
            (
                "consolidate --store /mnt/checkpoints --dry-run",
                "consolidate llama-sft/checkpoint-500 -c head.yaml",
            ),
        ),
        "verify": Entry(
            "read a store, or a checkpoint in a directory, and check every byte",
            (
                "verify llama-sft --store /mnt/checkpoints",
                "verify out/checkpoint-500 --level parse",
            ),
        ),
        "repair": Entry(
            "repair damaged checkpoints, or say why that is not possible",
            ("repair --store /mnt/checkpoints --dry-run", "repair llama-sft/checkpoint-500 --wait"),
        ),
        "join": Entry(
            "declare that two locations are one save, and bring their files together",
            (
                "join sft/checkpoint-4 'sft/checkpoint-4~bb4be197' --store /mnt/checkpoints",
                "join sft/final sft/final~0c3e -c head.yaml",
            ),
        ),
    },
    "what a store keeps": {
        "keep": Entry(
            "keep a checkpoint, whatever the retention rules say",
            ('keep llama-sft/checkpoint-500 --reason "the paper"', "keep --list -c head.yaml"),
        ),
        "rm": Entry(
            "delete a checkpoint from a store",
            ("rm llama-sft/checkpoint-500 --dry-run", "rm llama-sft/checkpoint-500 --yes"),
        ),
        "gc": Entry(
            "delete checkpoints that no retention rule keeps",
            ("gc -c head.yaml --dry-run", "gc --store /mnt/checkpoints --keep-last 3 --dry-run"),
        ),
    },
    "the service": {
        "init": Entry(
            "write a short configuration of the service, and check it",
            ("init", "init head.yaml --role head --store s3://bucket/checkpoints"),
        ),
        "run": Entry(
            "run the service with the roles of its configuration (worker, head, verifier)",
            ("run -c worker.yaml", "run -c worker.yaml --until-gone 4711"),
        ),
        "status": Entry(
            "show what the nodes and heads of a store do, and what is wrong",
            ("status -c head.yaml --watch", "status llama-sft --store /mnt/checkpoints --check"),
        ),
        "web": Entry(
            "show a store in a browser: what runs, checkpoints, curves, damage; read only",
            ("web --store s3://bucket/checkpoints", "web -c head.yaml --listen 127.0.0.1:8000"),
        ),
        "events": Entry(
            "print what happened to the checkpoints of a run, or run one event by hand",
            (
                "events llama-sft --follow --store /mnt/checkpoints",
                "events run llama-sft/checkpoint-500 eval -c head.yaml",
            ),
        ),
        "doctor": Entry(
            "find what would make a training hang or lose files, before it starts",
            ("doctor -c worker.yaml", "doctor -c worker.yaml --publish --wait 2m"),
        ),
        "alert": Entry(
            "send a test message to each channel of alerts",
            ("alert test -c head.yaml", "alert test -c head.yaml --json"),
        ),
        "service": Entry(
            "install or uninstall systemd's unit for this machine's configuration",
            ("service install -c worker.yaml --dry-run", "service uninstall --head"),
        ),
        "hook": Entry(
            "install or uninstall the hook that CKPTSYNC_AUTOLOAD=1 gives each Trainer",
            ("hook install --python /opt/train/bin/python", "hook uninstall"),
        ),
        "uninstall": Entry(
            "remove what ckptsync has written on this machine outside its package and its stores",
            ("uninstall --dry-run", "uninstall --purge"),
        ),
    },
    "help": {
        "demo": Entry(
            "run a demo on this machine: two nodes, a head, a flipped bit, and its repair",
            ("demo", "demo --dir /tmp/ckptsync-demo"),
        ),
        "config": Entry(
            "check a configuration, show the value of each key, or print an example",
            ("config check worker.yaml", "config example worker"),
        ),
        "help": Entry(
            "print the help of a command, or a page of the documents",
            ("help pull", "help exit-codes"),
        ),
        "completion": Entry(
            "print the completion of a shell: bash, zsh, fish, tcsh",
            (
                "completion bash > /etc/bash_completion.d/ckptsync",
                "completion fish > ~/.config/fish/completions/ckptsync.fish",
            ),
        ),
        "version": Entry("print the version", ("version", "version --json")),
    },
}
COMMANDS: Mapping[str, Entry] = {
    name: entry for group in GROUPS.values() for name, entry in group.items()
}
"""Each command by name.  The module of that name in this package is imported when it is called."""
EXIT_CODES = """\
exit codes:
  0    success
  1    failure
  2    usage or configuration error
  3    incomplete: something is missing
  4    store, disk or network error
  5    unsupported layout or version
  10   corrupt: a checksum or a format does not match
  130  interrupted (141: the reader of the output has ended; 143: terminated)
"""
