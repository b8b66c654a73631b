"""``ckptsync web``: show a store in a browser, until it is interrupted.

A head can serve the same page (``web.listen``); this command serves it for anybody who can read the
store.  The package `web` makes the page; this module chooses address and token.
"""

from __future__ import annotations

import argparse
import os
import threading

from ckptsync.cli import output
from ckptsync.cli.arguments import add_store_option, configuration, named_store, option_value
from ckptsync.errors import ConfigError

LISTEN = "127.0.0.1:8265"
TOKEN = "CKPTSYNC_WEB_TOKEN"  # noqa: S105 - the name of a variable
DETAILS = (
    "Read only: nothing in the store can be changed there. On a machine without a browser listen"
    " on 127.0.0.1 and forward the port: `ssh -L 8265:127.0.0.1:8265 HOST`. The same URLs give JSON"
    " to whoever accepts it (`ckptsync help web`)."
)


def add_arguments(command: argparse.ArgumentParser) -> None:
    """Define the command's arguments."""
    add_store_option(command)
    command.add_argument(
        "--listen",
        metavar="ADDRESS",
        help="host:port, or unix:/path for a socket that only this user may open (default:"
        f" web.listen of -c, or {LISTEN}); other machines may reach it only with web.token, or"
        f" ${TOKEN}",
    )


def run(args: argparse.Namespace) -> int:
    """Print the URL, and serve the page of a store until an interrupt, without returning.

    The server is closed then.  Raises ConfigError for a wrong address or token, or one that other
    machines reach without a token; StoreError.
    """
    from ckptsync.cli.ls import catalogue_reader
    from ckptsync.config import value_parsers
    from ckptsync.config.loading import token_problem
    from ckptsync.service.monitor import OverviewReader, patience
    from ckptsync.status.alarms import Patience
    from ckptsync.web.app import Guard, Page, make_app
    from ckptsync.web.documents import Documents
    from ckptsync.web.overview_cache import OverviewCache
    from ckptsync.web.server import HttpServer

    config = configuration(args)
    listen = args.listen or (config.web.listen if config else "") or LISTEN
    listen = option_value("--listen", value_parsers.listen_or_path, listen)
    token = config.web.token if config else ""
    token = token or option_value(f"${TOKEN}", value_parsers.token, os.environ.get(TOKEN, ""))
    if problem := token_problem(listen, token):
        raise ConfigError(f"--listen: {problem}", hint=f"${TOKEN} or web.token of -c FILE")
    store = named_store(args)
    waits = patience(config) if config else Patience()
    latest = OverviewCache(OverviewReader(store, catalogue_reader(store, ""), waits).read)
    page = Page(latest, Documents(store), Guard(listen, token))
    server = HttpServer(listen, make_app({}, page), "--listen")
    try:
        url = listen
        if not listen.startswith(value_parsers.UNIX):
            url = f"http://{listen.rpartition(':')[0]}:{server.port}/"
        if args.json:
            output.print_json({"store": store.url, "url": url})
        else:
            more = f"?token=${TOKEN}" if token else ""
            output.say(f"{store.url}: {url}{more} (Ctrl-C ends it)")
        threading.Event().wait()
    finally:
        server.close()
    return 0
