"""`.venv/bin/python benchmarks/proof_time.py`: what the proof adds to compiling each plan in
plans/.

Whole processes, `scalec compile` beside `scalec compile --no-verify`, in turns.  Bars: half a
second, 500 MB.
"""

from functools import partial
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

from compile_time import PLANS, Cost, compiled
from measure import asked_quick, in_turns, table, where

WITHOUT = "--no-verify"


def main() -> None:
    quick = asked_quick(__doc__)
    plans = sorted(PLANS.glob("*.scale"))
    with TemporaryDirectory() as folder:
        out = Path(folder)
        pairs = {
            plan: [partial(compiled, plan, out / plan.stem, *o) for o in ((), (WITHOUT,))]
            for plan in plans
        }
        flat = {
            f"{plan.name} {i}": run for plan, runs in pairs.items() for i, run in enumerate(runs)
        }
        costs = in_turns(flat, rounds=3 if quick else 15)
    print(where())
    rows = [(plan.stem, *_row(costs[f"{plan.name} 0"], costs[f"{plan.name} 1"])) for plan in plans]
    table("What the proof adds", ("plan", "compile", WITHOUT, "the proof", "memory", WITHOUT), rows)


def _row(proved: list[Cost], plain: list[Cost]) -> tuple[str, ...]:
    """Medians of seconds, of their differences in each round, and the largest memory of both."""
    walls = [(a.wall, b.wall) for a, b in zip(proved, plain, strict=True)]
    times = [
        median(a for a, _ in walls),
        median(b for _, b in walls),
        median(a - b for a, b in walls),
    ]
    return (
        *(f"{t:.3f} s" for t in times),
        *(f"{max(c.memory for c in of) / 1e6:.0f} MB" for of in (proved, plain)),
    )


if __name__ == "__main__":
    main()
