"""Kill a command again and again, run it again, and see that nothing is lost, torn or left.

    python -m tests.campaigns.kill --only push --stores posix s3 sftp --calls 50 --moments 50

A command is killed at each system call that changes something (strace), or at ``--calls`` of them,
and at random moments.  `tests.campaigns.victims` has the table of commands,
`tests.campaigns.killing` is the driver.
"""

from __future__ import annotations

import random
import time
from collections.abc import Sequence

from tests.campaigns.campaign import arguments, end_by_signal, verdict, working
from tests.campaigns.killing import Driver, can_trap
from tests.campaigns.victims import VICTIMS

EVERY = 1 << 30
STORES = ("posix", "s3", "sftp")


def main(argv: Sequence[str] | None = None) -> int:
    """Return 0 if every promise was kept, 1 if not."""
    parser = arguments(__doc__, "seed", "home")
    parser.add_argument("--only", nargs="+", choices=VICTIMS, default=[*VICTIMS])
    parser.add_argument("--stores", nargs="+", choices=STORES, default=STORES)
    told = "at most so many system calls of each command (default: all); 0: none"
    parser.add_argument("--calls", type=int, default=EVERY, help=told)
    told = "deaths of each command at random moments"
    parser.add_argument("--moments", type=int, default=20, help=told)
    options = parser.parse_args(argv)
    calls = options.calls if can_trap() else 0
    wrong: list[str] = []
    with working("kill", options.home) as home:
        dice = random.Random(options.seed)
        for name in options.only:
            make, kinds = VICTIMS[name]
            for kind in (kind for kind in kinds if kind in options.stores):
                begun = time.monotonic()
                driver = Driver(make(kind, home / f"{name}-{kind}", dice), dice)
                if calls:
                    driver.kill_at_calls(calls)
                driver.kill_at_moments(options.moments)
                print(f"{driver}, {time.monotonic() - begun:.0f} s", flush=True)
                wrong += driver.wrong
    return verdict(wrong)


if __name__ == "__main__":
    end_by_signal(main)
