"""``ckptsync alert test``: send a test message to each channel that the configuration names."""

from __future__ import annotations

import argparse
import time

from ckptsync.cli import output
from ckptsync.cli.arguments import add_command, configuration
from ckptsync.errors import ConfigError, StoreError


def add_arguments(command: argparse.ArgumentParser) -> None:
    """Define the command's arguments."""
    actions = command.add_subparsers(title="actions", metavar="ACTION", required=True)
    test = add_command(
        actions,
        "test",
        "send a test message to each channel of `alerts`, and say whether it arrived",
    )
    test.add_argument(
        "-c",
        "--config",
        metavar="FILE",
        required=True,
        help="the configuration of the head, with alerts.urls or alerts.command",
    )


def run(args: argparse.Namespace) -> int:
    """Send a test message to each channel, one after the other, and print each result.

    Return 4 if one did not arrive, else 0.  Raises ConfigError if no channel is configured.
    """
    from ckptsync.service.alert_channels import send_test
    from ckptsync.worker.node_identity import node_id

    config = configuration(args)
    assert config is not None
    rows = []
    for channel, error in send_test(config, config.node or node_id(), time.time()):
        rows.append({"channel": channel, "error": str(error) if error else None})
        if not args.json:
            output.say(f"{channel}: {'delivered' if error is None else f'failed: {error}'}")
            if error and error.hint:
                output.say(f"  hint: {error.hint}")
    if not rows:
        hint = "set alerts.urls or alerts.command: `ckptsync help configuration`"
        raise ConfigError(f"{args.config}: no channel is configured", hint=hint)
    code = StoreError.exit_code if any(row["error"] for row in rows) else 0
    if args.json:
        output.print_json({"store": config.store.url, "channels": rows}, code)
    return code
