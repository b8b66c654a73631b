"""ZeRO's shards of two ranks resume on three and on one, with the losses that DeepSpeed's own
conversion gives.

    python -m tests.campaigns.universal --only zero3

Real trainings with DeepSpeed on a CPU.  Two ranks train and save; `ckptsync convert` and
``ds_to_universal`` convert the same shards.  Every tensor of every file must be the same, and each
resumed training must have the same losses, bit for bit, from both.
"""

from __future__ import annotations

import subprocess
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from tests.campaigns.campaign import CKPTSYNC, CLEAN, arguments, flags, verdict, working
from tests.campaigns.two_nodes import PROJECT, QUIET, START, default_python, events, torchrun
from tests.support.vector import ROOT

STEPS, TAG, OUT = 3, "global_step3", "out"
WORLDS = (3, 1)
CASES: dict[str, tuple[str, dict[str, object]]] = {
    "zero1": ("base", {}),
    "zero1-bf16": ("base", {"precision": "bf16"}),
    "zero2-bf16-tied": ("base-tied", {"precision": "bf16"}),
    "zero2-frozen": ("base", {"frozen": True}),
    "zero2-fp16": ("base", {"precision": "fp16"}),
    "zero3": ("base", {}),
    "zero3-bf16-frozen-tied": ("base-tied", {"precision": "bf16", "frozen": True}),
    "zero3-fp16": ("base", {"precision": "fp16"}),
}


def main(argv: Sequence[str] | None = None) -> int:
    """0 if every resumed training went as from DeepSpeed's own conversion, 1 if not."""
    parser = arguments(__doc__, "home")
    parser.add_argument("--only", nargs="+", choices=CASES, default=[*CASES])
    parser.add_argument("--python", default=default_python(), help="that has DeepSpeed")
    args = parser.parse_args(argv)
    wrong = 0
    for case in args.only:
        with working("universal", args.home) as home:
            found = [*compared(home / case, case, args.python)]
        print(f"{case}: {len(found)} wrong", flush=True)
        wrong += verdict(found)
    return 1 if wrong else 0


def compared(home: Path, case: str, python: str) -> Iterator[str]:
    """Train, convert with both, compare, and resume from both on each number of ranks."""
    home.mkdir(parents=True)
    train(home, case, python, 2, OUT)
    theirs, ours = home / "theirs", home / "ours"
    convert = ["--input_folder", f"{home}/out/{TAG}", "--output_folder", f"{theirs}/{TAG}"]
    ran([python, "-m", "deepspeed.checkpoint.ds_to_universal", *convert, "--inject_missing_state"])
    ran([*CKPTSYNC, "convert", str(home / "out"), str(ours), "--to", "universal"])
    their_tensors, our_tensors = tensors(theirs), tensors(ours)
    names = their_tensors.keys() ^ our_tensors.keys()
    yield from (f"{case}: {name} is in one conversion only" for name in sorted(names))
    for name in sorted(their_tensors.keys() & our_tensors.keys()):
        if their_tensors[name] != our_tensors[name]:
            yield f"{case}: {name} differs"
    for world in WORLDS:
        losses = [train(home, case, python, world, kind) for kind in ("theirs", "ours")]
        if len(losses[0]) != world * STEPS or losses[0] != losses[1]:
            yield f"{case} on {world} ranks: {losses[1]}, DeepSpeed's own gives {losses[0]}"


def tensors(universal: Path) -> dict[str, bytes]:
    """Return the bytes of each parameter's states, and the model files, by their names."""
    found: dict[str, bytes] = {}
    for path in universal.rglob("*.pt"):
        name = path.relative_to(universal).as_posix()
        if path.parent.parent.name != "zero":
            found |= {} if path.parent.name == "zero" else {name: path.read_bytes()}
            continue
        with zipfile.ZipFile(path) as archive:
            for record in archive.namelist():
                if "/data/" in record:
                    found[f"{name} {record.rpartition('/')[2]}"] = archive.read(record)
    return found


def train(home: Path, case: str, python: str, world: int, kind: str) -> list[tuple[str, int, str]]:
    """Train, unless ``kind`` is out from that conversion; return each rank's losses in order."""
    base, options = CASES[case]
    is_first = kind == OUT
    out, truth = home / (OUT if is_first else f"{kind}-{world}"), home / f"truth-{kind}-{world}"
    resume = {} if is_first else {"resume": home / kind / TAG, "universal": True}
    steps = STEPS if is_first else 2 * STEPS
    launch = torchrun(python, world, standalone=True)
    script = ["-m", "tests.campaigns.raw_training", case.partition("-")[0]]
    own = flags(out=out, truth=truth, base=ROOT / base, steps=steps)
    ran([*launch, *script, *own, *flags(**options), *flags(**resume)])
    return [
        (rank, event["step"], event["loss"])
        for rank, its in events(truth).items()
        for event in its
        if event["event"] == "loss"
    ]


def ran(command: Sequence[str]) -> None:
    """Run a program; raises with the end of what it printed if it fails."""
    environment = {**CLEAN, **QUIET, "DS_ACCELERATOR": "cpu", "PYTHONPATH": str(PROJECT)}
    done = subprocess.run(
        command,
        cwd=PROJECT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=START,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(f"{' '.join(map(str, command))}: {(done.stdout + done.stderr)[-4000:]}")


if __name__ == "__main__":
    raise SystemExit(main())
