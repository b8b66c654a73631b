"""Kill a command again and again, run it again, and see that nothing is lost, torn or left.

    python -m tests.campaigns.kill stores --stores posix s3 sftp --calls 50 --moments 50
    python -m tests.campaigns.kill gc --scenes remove shards --stores s3
    python -m tests.campaigns.kill heads | pull | merge | resume
    python -m tests.campaigns.kill services --rounds 4

Each command has a line in `COMMANDS`; `tests.campaigns.killing` is the driver.  ``services`` kills
the long-running processes of a small cluster.
"""

from __future__ import annotations

import argparse
import random
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.campaigns import kill_commands, kill_gc, kill_heads, kill_services, kill_stores
from tests.campaigns.campaign import arguments, end_by_signal, verdict, working
from tests.campaigns.killing import Driver, Victim, can_trap

Options = argparse.Namespace
EVERY = 1 << 30


@dataclass(frozen=True, slots=True)
class Command:
    """``kill`` yields violations in an empty directory; ``stores``: the kinds of store it may use,
    ``default``: those that it uses if no option says which.  ``moments``: deaths at random moments,
    if no option says how many.
    """

    kill: Callable[[Path, Options, random.Random], Iterable[str]]
    stores: tuple[str, ...] = ("posix",)
    moments: int = 0
    default: tuple[str, ...] = ("posix", "s3", "sftp")
    names: tuple[str, ...] = ()


def _drive(
    at_calls: Iterable[Victim], at_moments: Iterable[Victim], options: Options, dice: random.Random
) -> Iterator[str]:
    """Kill victims at calls, and victims at moments; print a line for each of them."""
    begun = time.monotonic()
    pairs = [*((victim, True) for victim in at_calls), *((victim, False) for victim in at_moments)]
    for victim, is_at_calls in pairs:
        driver = Driver(victim, dice)
        if is_at_calls and options.calls and can_trap():
            driver.kill_at_calls(options.calls)
        elif not is_at_calls and options.moments:
            driver.kill_at_moments(options.moments)
        if driver.tally:
            took, begun = time.monotonic() - begun, time.monotonic()
            print(f"{driver}, {took:.0f} s", flush=True)
        yield from driver.wrong


def _stores(home: Path, options: Options, dice: random.Random) -> Iterator[str]:
    for kind in options.stores:
        with kill_stores.location(kind, home / kind) as location:
            at_calls, at_moments = kill_stores.victims(
                location, home / f"{kind}-work", options.seed
            )
            yield from _drive(at_calls, at_moments, options, dice)


def _gc(home: Path, options: Options, dice: random.Random) -> Iterator[str]:
    for kind in options.stores:
        victims = list(kill_gc.victims(kind, options.scenes, home))
        yield from _drive(victims, victims, options, dice)


def _pull(home: Path, options: Options, dice: random.Random) -> Iterator[str]:
    for kind in options.stores:
        (home / kind).mkdir()
        victim = kill_commands.Pulling(kind, home / kind, dice)
        yield from _drive([victim], [victim], options, dice)


def _merge(home: Path, options: Options, dice: random.Random) -> Iterator[str]:
    for kind in options.stores:
        for number, again in enumerate(((), ("--dtype", "fp32"))):
            work = home / f"{kind}-{number}"
            work.mkdir()
            victim = kill_commands.Merging(kind, work, again)
            yield from _drive([victim], [victim], options, dice)


def _resume(home: Path, options: Options, dice: random.Random) -> Iterator[str]:
    victim = kill_commands.Resuming(home)
    return _drive([victim], [victim], options, dice)


def _heads(home: Path, options: Options, dice: random.Random) -> Iterator[str]:
    wrong: list[str] = []
    if options.calls and options.stores == ["posix"]:
        bench = kill_heads.Bench(home / "calls")
        victims = [kill_heads.Consolidation(bench, second) for second in "ab"]
        wrong += [*_drive(victims, (), options, dice)]
        wrong += wrong or kill_heads.in_pairs(bench)
    if not wrong and options.moments:
        for kind in options.stores:
            wrong += kill_heads.Moments(home / f"moments-{kind}", dice, kind).run(options.moments)
    yield from wrong


def _services(home: Path, options: Options, dice: random.Random) -> Iterator[str]:
    yield from kill_services.Campaign(home, dice).run(options.rounds, options.kills)


COMMANDS: Mapping[str, Command] = {
    "stores": Command(_stores, kill_stores.KINDS, moments=200),
    "gc": Command(_gc, ("posix", "s3"), moments=20, names=tuple(kill_gc.scenes())),
    "heads": Command(_heads, ("posix", "s3"), moments=200, default=("posix",)),
    "pull": Command(_pull, ("posix", "s3")),
    "merge": Command(_merge, ("posix", "s3")),
    "resume": Command(_resume),
    "services": Command(_services),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Return 0 if every promise was kept, 1 if not."""
    options = _options(argv)
    with working(f"kill-{options.command}", options.home) as home:
        dice = random.Random(options.seed)
        wrong = [*COMMANDS[options.command].kill(home, options, dice)]
        if wrong and not options.home:
            copy = shutil.copytree(home, f"{home}-violated", symlinks=True)
            print(f"everything is kept in {copy}")
    return verdict(wrong)


def _options(argv: Sequence[str] | None) -> Options:
    parser = arguments(__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    for name, command in COMMANDS.items():
        own = arguments(__doc__, "seed", "home", add_to=commands.add_parser(name))
        if name == "services":
            own.add_argument("--rounds", type=int, default=3)
            own.add_argument("--kills", type=int, default=12, help="in each round")
            continue
        told = "at most so many system calls of each victim (default: all); 0: none"
        own.add_argument("--calls", type=int, default=EVERY, help=told)
        told = "deaths of each victim at random moments"
        own.add_argument("--moments", type=int, default=command.moments, help=told)
        kinds = [kind for kind in command.stores if kind in command.default]
        own.add_argument("--stores", nargs="+", choices=command.stores, default=kinds)
        if command.names:
            own.add_argument("--scenes", nargs="+", choices=command.names, default=command.names)
    return parser.parse_args(argv)


if __name__ == "__main__":
    end_by_signal(main)
