"""`.venv/bin/python benchmarks/compile_time.py`: what compiling the 405B plan costs, and how it
grows.

The whole process `scalec compile`, proof included, for Llama 3 405B on 16,384 ranks, beside the
same plan on 16 and with 2 layers, in pipelines of 16 ranks, and beside a process that imports the
compiler's libraries and ends.  Bars: 1 s, 200 MB, and 1.3 times the smaller plan; 4 times the
imports, and 11 times for the pipeline.
"""

import os
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from time import perf_counter

from measure import asked_quick, in_turns, ratio, table, where

PLANS = Path(__file__).parent.parent / "plans"
SCALEC = Path(sys.executable).with_name("scalec")
FULL = "126 layers, 16,384 ranks"
FEW_RANKS = "126 layers, 16 ranks"
FEW_LAYERS = "2 layers, 16,384 ranks"
COLD = "the first, without a grammar table"
STAGES = "16 stages × 4 chunks, 512 microbatches"
IMPORTS = "import lark, attrs, numpy, jinja2"


@dataclass(frozen=True)
class Cost:
    """Seconds of wall clock and of all CPU time of one process, and its peak memory in bytes."""

    wall: float
    cpu: float
    memory: int


def main() -> None:
    quick = asked_quick(__doc__)
    # what is installed has its bytecode, as the libraries have theirs
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    with TemporaryDirectory() as folder:
        costs = in_turns(_candidates(Path(folder)), rounds=3 if quick else 25)
    print(where())
    table(
        "`scalec compile` of Llama 3 405B, whole process: medians, and the largest memory",
        ("plan", "wall", "CPU", "memory"),
        [(name, *_summary(of)) for name, of in costs.items()],
    )
    pairs = [(FULL, FEW_RANKS), (FULL, FEW_LAYERS), (FULL, IMPORTS), (STAGES, IMPORTS)]
    table("Ratios", ("", "wall", "CPU"), [_ratio(costs, *pair) for pair in pairs])


def _candidates(folder: Path) -> dict[str, Callable[[], Cost]]:
    text = (PLANS / "llama3_405b.scale").read_text()
    (folder / "models").symlink_to(PLANS.resolve() / "models")
    texts = {
        FULL: text,
        FEW_RANKS: _with(text, dp=2, nodes=2, global_batch=2),
        FEW_LAYERS: _with(text, layers=2),
        COLD: text,
        STAGES: _staged(text),
    }
    return {
        name: partial(_compile, text, folder / str(number), cold=name == COLD)
        for number, (name, text) in enumerate(texts.items())
    } | {IMPORTS: partial(_cost, [sys.executable, "-c", IMPORTS])}


def _staged(text: str) -> str:
    """The plan on as many GPUs, in a pipeline."""
    mesh = "mesh    { dp = 2048  tp = 8 }"
    assert mesh in text, f"the plan has no line `{mesh}`"
    pipeline = (
        "mesh { pp = 16  dp = 128  tp = 8 }\npipeline { schedule = interleaved_1f1b(chunks=4) }"
    )
    text = text.replace(mesh, pipeline).replace("over dp\n", "over dp\n  layers over pp\n", 1)
    return _with(text, global_batch=128 * 512)


def _with(text: str, **values: int) -> str:
    """The plan with other numbers in place of its own."""
    for key, value in values.items():
        text, count = re.subn(rf"\b{key} = \d+", f"{key} = {value}", text)
        assert count == 1, f"the plan sets `{key}` {count} times"
    return text


def _compile(text: str, out: Path, cold: bool) -> Cost:
    plan = out.with_suffix(".scale")
    plan.write_text(text)
    with TemporaryDirectory() as nothing:
        return compiled(
            plan, out, environment={**os.environ, "XDG_CACHE_HOME": nothing} if cold else None
        )


def compiled(
    plan: Path, out: Path, *options: str, environment: dict[str, str] | None = None
) -> Cost:
    """The cost of one process of `scalec compile`."""
    return _cost([SCALEC, "compile", plan, "-o", out, *options], environment)


def _cost(command: Sequence[str | Path], environment: dict[str, str] | None = None) -> Cost:
    """The cost of a process, which must end well."""
    start = perf_counter()
    process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL)
    _, status, used = os.wait4(process.pid, 0)
    wall = perf_counter() - start
    process.returncode = os.waitstatus_to_exitcode(status)  # wait4 took it from under its nose
    if process.returncode:
        raise SystemExit(f"{' '.join(map(str, command))} failed")
    return Cost(wall, used.ru_utime + used.ru_stime, used.ru_maxrss * 1024)


def _summary(costs: list[Cost]) -> tuple[str, str, str]:
    wall, cpu = median(cost.wall for cost in costs), median(cost.cpu for cost in costs)
    return f"{wall:.3f} s", f"{cpu:.3f} s", f"{max(cost.memory for cost in costs) / 1e6:.0f} MB"


def _ratio(costs: dict[str, list[Cost]], one: str, other: str) -> tuple[str, str, str]:
    wall = ratio([cost.wall for cost in costs[one]], [cost.wall for cost in costs[other]])
    cpu = ratio([cost.cpu for cost in costs[one]], [cost.cpu for cost in costs[other]])
    return f"{one}, beside {other}", wall, cpu


if __name__ == "__main__":
    main()
