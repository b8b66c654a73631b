"""A training as `resume` sees one: it saves as Hugging Face's Trainer does, and ends as it is told.

    trainer.py OUT [--resume_from_checkpoint PATH] STEPS END

STEPS steps, a save of each, and then END: ``exit:N``, ``kill`` (itself), ``torn`` (the same in the
middle of one more save), ``signals:N`` (N signals are noted, then it exits with 7), or a list of
these, separated by commas, of which each start takes the next.  What each start was given lies in
``OUT.starts``, a line of JSON each.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path

FILES = Path(__file__).parents[1] / "vectors" / "hf-ddp"


def source() -> Path:
    """The real save whose files it writes."""
    (made,) = (path.parent for path in FILES.rglob("trainer_state.json"))
    return made


def save(out: Path, step: int, most: int, *, is_torn: bool = False) -> None:
    folder = out / f"checkpoint-{step}"
    folder.mkdir(parents=True, exist_ok=True)
    for file in sorted(source().iterdir()):
        if file.name == "model.safetensors" and is_torn:
            data = file.read_bytes()
            (folder / file.name).write_bytes(data[: len(data) // 2])
            os.kill(os.getpid(), signal.SIGKILL)
        if file.name != "trainer_state.json":
            (folder / file.name).write_bytes(file.read_bytes())
    state = json.loads((source() / "trainer_state.json").read_text())
    state |= {"global_step": step, "max_steps": most}
    (folder / "trainer_state.json").write_text(json.dumps(state))


def main() -> None:
    out, *options, steps, ends = sys.argv[1:]
    log, noted = Path(f"{out}.starts"), list[str]()
    resumed = options[options.index("--resume_from_checkpoint") + 1] if options else ""
    starts = log.read_text().splitlines() if log.exists() else []
    end, _, number = ends.split(",")[len(starts)].partition(":")

    def on_signal(n: int, _frame: object) -> None:
        noted.append(signal.Signals(n).name)
        with log.open("a") as lines:
            lines.write(f"{json.dumps(noted[-1])}\n")

    if end == "signals":
        for name in ("TERM", "INT", "HUP", "USR1", "USR2"):
            signal.signal(signal.Signals[f"SIG{name}"], on_signal)
    given = {
        "argv": sys.argv[1:],
        "from": os.environ.get("CKPTSYNC_RESUME_FROM"),
        "stdin": sys.stdin.readline() if os.environ.get("READS_STDIN") else "",
        "pid": os.getpid(),
    }
    with log.open("a") as lines:
        lines.write(f"{json.dumps(given)}\n")
    first = int(resumed.rpartition("-")[2]) if resumed else 0
    last = first + int(steps)
    for step in range(first + 1, last + 1):
        save(Path(out), step, last + 9)
    print(f"trained to step {last}", flush=True)
    if end == "torn":
        save(Path(out), last + 1, last + 9, is_torn=True)
    if end == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if end == "signals":
        while len(noted) < int(number):
            time.sleep(0.01)
        sys.exit(7)
    sys.exit(int(number))


if __name__ == "__main__":
    main()
