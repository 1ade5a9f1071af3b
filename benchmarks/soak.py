"""`.venv/bin/python benchmarks/soak.py [--steps N] [--faults N] [--seed N] [--json FILE]`: a run
under faults.

A tiny plan on 4 ranks is trained twice, undisturbed, and with a fault from the seed every so many
steps, restarted with `--resume auto` until it is done.  Bar: the last checkpoint and each logged
step are, bit for bit, those of the undisturbed run; every run ends by itself; descriptors of the
undisturbed run do not grow, nor does memory: by the slope of least squares over the last three
quarters, in a run long enough to tell a leak from what is allocated once.  Steps are of
milliseconds: 20,000 of them, twice, take 10 to 15 minutes on 2 idle cores.
"""

import argparse
import json
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import linear_regression
from tempfile import TemporaryDirectory
from typing import Any

from scalec.testing.faults import (
    Corrupt,
    Fault,
    Job,
    Outcome,
    Point,
    Program,
    Truncate,
    drawn,
    fork,
)

RANKS = 4
PLAN = """
model tiny(tokens[batch, seq], labels[batch, seq]) {
  dims { vocab = 32  hidden = 8  ffn = 16  layers = 2 }
  init ~ normal(0.1)
  x = embedding(tokens, wte[vocab, hidden])
  repeat layers {
    x = x + silu(rmsnorm(x, norm[hidden], 1e-5) @ w_in[hidden -> ffn]) @ w_out[ffn -> hidden]
  }
  loss = cross_entropy(x @ head[hidden -> vocab], labels)
}
mesh  { dp = 2  tp = 2 }
shard { batch over dp  ffn over tp }
state { zero 1 over dp }
train {
  seq = 8  global_batch = 4  microbatch = 2  steps = 100
  optimizer adamw { lr = 1e-3  clip = 1.0 }
  data text       { files = ["corpus.bin"]  tokenizer = bytes  as_is = on }
}
"""
LIMITS = "--first-step-limit=60 --step-limit=20 --save-limit=60"
CHECKPOINTS = Path("runs", "tiny", "checkpoints")
LOG = Path("runs", "tiny", "log.jsonl")
HANGS = 240.0
MOST, LONG = 64.0, 6_000
"""Bytes by which the memory of a rank may grow in a step, and the steps of a run that shows it."""


@dataclass
class Growth:
    """Memory in bytes and open descriptors of each rank, in samples over a run."""

    memory: list[list[int]] = field(default_factory=list[list[int]])
    descriptors: list[list[int]] = field(default_factory=list[list[int]])

    def sample(self, processes: Sequence[int]) -> None:
        """Adds a sample, unless a rank has just begun or ended."""
        try:
            memory = [_resident(process) for process in processes]
            descriptors = [len([*Path(f"/proc/{process}/fd").iterdir()]) for process in processes]
        except (FileNotFoundError, PermissionError, TypeError):
            return
        self.memory.append(memory)
        self.descriptors.append(descriptors)

    def grown(self, samples: list[list[int]]) -> int:
        """The most that a rank's last sample is above that at the first quarter."""
        return max(
            last - early
            for early, last in zip(samples[len(samples) // 4], samples[-1], strict=True)
        )

    def slope(self, steps: int) -> float:
        """The most bytes a step by which a rank's memory grows over the last three quarters of
        so many steps.
        """
        last = self.memory[len(self.memory) // 4 :]
        at = [number * steps / len(self.memory) for number in range(len(last))]
        return max(linear_regression(at, rank).slope for rank in zip(*last, strict=True))


@dataclass
class Tally:
    """The result of a run under faults."""

    steps: int
    starts: int = 0
    strikes: Counter[str] = field(default_factory=Counter[str])
    statuses: Counter[int] = field(default_factory=Counter[int])
    repeated: int = 0
    """Steps that were trained more than once, as they came after the newest checkpoint."""
    defects: list[str] = field(default_factory=list[str])


def main() -> int:
    """Runs both and prints the figures; status 1 where the bar is not met."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=20_000)
    parser.add_argument(
        "--faults", type=int, default=60, help="strikes that are planned, over all steps"
    )
    parser.add_argument("--save-every", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    with TemporaryDirectory() as folder:
        tally, growth = soak(Path(folder), asked.steps, asked.faults, asked.save_every, asked.seed)
    print("\n".join(lines(tally, growth)))
    if asked.json:
        asked.json.write_text(json.dumps(vars(tally) | vars(growth), indent=1) + "\n")
    return int(bool(tally.defects))


def soak(folder: Path, steps: int, faults: int, save_every: int, seed: int) -> tuple[Tally, Growth]:
    """Both runs, in a new folder; what was found."""
    options = (
        f"--device=cpu --steps={steps} --save-every={save_every} --log-every=10 --resume=auto"
        f" {LIMITS}"
    )
    whole, struck = (_program(folder / name, options) for name in ("whole", "struck"))
    growth, tally = Growth(), Tally(steps)
    with fork(whole) as job:
        _watch(job, growth)
        ended = job.wait(HANGS)
    assert ended.succeeded, ended.err
    _strike(struck, tally, faults, save_every, seed)
    tally.defects += _differences(whole.folder, struck.folder)
    if steps >= LONG and (slope := growth.slope(steps)) > MOST:
        tally.defects.append(f"memory grew by {slope:.0f} bytes a step")
    tally.defects += (
        [f"{more} more descriptors"] if (more := growth.grown(growth.descriptors)) > 0 else []
    )
    return tally, growth


def _program(folder: Path, options: str) -> Program:
    folder.mkdir()
    (folder / "tiny.scale").write_text(PLAN)
    (folder / "corpus.bin").write_bytes(bytes((i * i + i // 7) % 32 for i in range(50_000)))
    compiler = [sys.executable, "-m", "scalec", "compile", "tiny.scale", "-o", "."]
    subprocess.run(compiler, cwd=folder, check=True, capture_output=True)
    return Program(folder, RANKS, options)


def _watch(job: Job, growth: Growth) -> None:
    """Samples until the job ends."""
    while not job.has_ended(1.0):
        if len(processes := job.processes()) == RANKS:
            growth.sample([processes[rank] for rank in range(RANKS)])


def _strike(program: Program, tally: Tally, faults: int, save_every: int, seed: int) -> None:
    """Starts the program until it is done, each time with the faults of the steps that are left."""
    planned = _planned(tally.steps, faults, save_every, seed)
    ended: Outcome | None = None
    while ended is None or not ended.succeeded:
        begin = _saved(program.folder)
        left = [fault for fault in planned if (fault.at.step or 0) > begin]
        with fork(program, *left) as job:
            try:
                ended = job.wait(HANGS)
            except TimeoutError as error:
                tally.defects.append(f"hangs after {left[0]}: {error}")
                continue
        tally.starts += 1
        tally.statuses.update(ended.statuses)
        tally.strikes.update(_kind(strike) for strike in ended.strikes)
        if not ended.succeeded and not ended.strikes:
            tally.defects.append(
                f"ended by itself, from step {begin}: {ended.statuses} {ended.err}"
            )
            if len(tally.defects) > 3:
                return
        tally.repeated += max(0, _reached(ended.out[0]) - _saved(program.folder))


def _planned(steps: int, faults: int, save_every: int, seed: int) -> list[Fault]:
    """A fault in each equal part of the run; every sixth damages the newest checkpoint before
    its rank is killed.
    """
    span = steps // faults
    planned = list[Fault]()
    for number in range(faults):
        fault = drawn(
            seed + number, RANKS, range(number * span + 1, (number + 1) * span + 1), save_every
        )
        if number % 6 == 5:
            damage = (Corrupt, Truncate)[number // 6 % 2](
                f"{CHECKPOINTS}/step-??????/rank-0000{number % RANKS}*"
            )
            planned.append(Fault(Point("step", fault.at.step), damage))
        planned.append(fault)
    return planned


def _kind(strike: str) -> str:
    """For instance `Send(SIGKILL) at publish`."""
    event, action = (
        re.search(r"event='(\w+)'", strike),
        re.search(r"do=(\w+)\((?:signal=<Signals.(\w+))?", strike),
    )
    assert event, strike
    assert action, strike
    return f"{action[2] or action[1]} at {event[1]}"


def _saved(folder: Path) -> int:
    """The step of the newest checkpoint."""
    return max(
        (int(path.name[5:]) for path in (folder / CHECKPOINTS).glob("step-??????")), default=0
    )


def _reached(out: str) -> int:
    """The last step that a run has told of."""
    return max((int(step) for step in re.findall(r"(?m)^step +(\d+)/", out)), default=0)


def _differences(whole: Path, struck: Path) -> list[str]:
    """How the results of both runs differ."""
    found = list[str]()
    if _index(whole) != _index(struck):
        found.append("the last checkpoints differ")
    theirs = _log(whole / LOG)
    # a run that a signal stops logs its last
    ours = [line for line in _log(struck / LOG) if line["step"] % 10 == 0]
    if ours != theirs:
        first = next((pair for pair in zip(ours, theirs, strict=False) if pair[0] != pair[1]), None)
        found.append(
            f"logs have {len(ours)} and {len(theirs)} steps; the first that differ: {first}"
        )
    return found


def _index(folder: Path) -> Any:
    """The index of the last checkpoint, which has the hash of every file."""
    return json.loads(
        (folder / CHECKPOINTS / f"step-{_saved(folder):06d}" / "index.json").read_text()
    )


def _log(path: Path) -> list[dict[str, Any]]:
    """The lines of steps, without times."""
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    return [
        {key: line[key] for key in ("step", "loss", "norm", "lr", "tokens")}
        for line in lines
        if "loss" in line
    ]


def _resident(process: int) -> int:
    found = re.search(r"VmRSS:\s+(\d+) kB", Path(f"/proc/{process}/status").read_text())
    return int(found[1]) * 1024 if found else 0


def lines(tally: Tally, growth: Growth) -> list[str]:
    """The figures."""
    slope = (
        f"{growth.slope(tally.steps):.1f} bytes a step"
        if tally.steps >= LONG
        else "too few steps to tell a leak"
    )
    strikes = [f"  {count:4} {kind}" for kind, count in sorted(tally.strikes.items())]
    return [
        f"{tally.steps:,} steps on {RANKS} ranks, started {tally.starts} times;"
        f" {tally.strikes.total()} faults struck:",
        *strikes,
        f"exit statuses of ranks: {dict(sorted(tally.statuses.items()))}",
        f"steps trained more than once: {tally.repeated:,} ({tally.repeated / tally.steps:.1%})",
        f"undisturbed, from the first quarter on, by {len(growth.memory)} samples: memory of a"
        " rank grew by"
        f" {growth.grown(growth.memory) / 1024:,.0f} KiB, {slope}, descriptors by"
        f" {growth.grown(growth.descriptors)}",
        *(f"DEFECT: {defect}" for defect in tally.defects or []),
        "the same, bit for bit" if not tally.defects else f"{len(tally.defects)} defects",
    ]


if __name__ == "__main__":
    sys.exit(main())
