"""`.venv/bin/python benchmarks/fit_profiles.py ROWS.csv [--left-out COLUMN…] [--write]`:
frameworks' profiles, fitted.

Fits the profiles of `predicting/frameworks` and the shared constants of `predicting` to published
steps: least squares of the logarithm of predicted over measured, robust, each source weighted by
the root of its rows, with priors that hold where rows say nothing.  Deterministic.  Prints the
errors of what is fitted, and those of rows that were left out of the fit: one value of `source`,
`model`, `framework` or `gpu` at a time.  `--write` writes files.

Non-goals: GPUs and clusters, whose figures have sources of their own.
"""

import sys
from argparse import ArgumentParser
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from attrs import frozen
from measure import table
from predicting.batch import Array, Batch
from predicting.errors import by_group
from predicting.frameworks import DEFAULT, FOLDER, NUMBERS, profile, profile_of, profiles
from predicting.rows import read
from predicting.steps import steps
from predicting.training import read_work


class Factor(NamedTuple):
    """A number that is fitted: its prior, one standard deviation of its logarithm, and what it
    stands for.
    """

    prior: float
    spread: float
    stands_for: str


SPREAD = {
    "host": 0.25, "host_tp": 0.25, "collective": 0.7, "step": 1.0, "traffic": 0.4, "rate": 0.04,
    "beside": 0.4, "exposed": 0.3, "messages": 0.7, "bucket": 1.0,
}  # fmt: skip
"""How far a profile's number may be from the default's, one standard deviation of its logarithm;
others are given.

`predicting.frameworks` says what each stands for.
"""

CONSTANTS = {
    "accumulated": Factor(
        6.0, 0.3, "bytes that adding up the gradient of a parameter moves, in a microbatch"
    ),
    "async": Factor(
        0.5,
        0.5,
        "the part of exposed collectives that is left where they are cut into pieces of products",
    ),
    "beside_tensors": Factor(
        0.2, 0.7, "the part of a reduction beside backward where tensors are reduced one by one"
    ),
    "cast": Factor(3.0, 0.5, "bytes moved for each element that is cast to 8 bits or fewer"),
    "compiled": Factor(
        0.71, 0.1, "the part of memory-bound traffic that is left where layers are compiled"
    ),
    "flash_cudnn": Factor(1.0, 0.2, "the rate of cuDNN's attention, by FlashAttention-3's"),
    "flash_triton": Factor(0.8, 0.2, "the rate of the first FlashAttention, by FlashAttention-2's"),
    "gathered": Factor(0.5, 0.5, "the part of ZeRO 1's gather that the GPU waits for"),
    "jitter": Factor(
        0.002,
        0.5,
        "the part by which a step is longer for each doubling of nodes: the slowest rank decides",
    ),
    "loss": Factor(14.0, 0.3, "bytes that the loss moves for each logit"),
    "newer": Factor(
        0.8,
        0.2,
        "the rate of attention on GPUs of which nobody has published it, by that of an H100's peak",
    ),
    "scores": Factor(
        8.0, 0.3, "bytes that forward moves for each score of attention that is not fused"
    ),
    "scores_back": Factor(12.0, 0.3, "the same in backward"),
    "sharded": Factor(
        0.1, 0.3, "the part by which layers are slower whose parameters or gradients are sharded"
    ),
    "update": Factor(31.0, 0.2, "bytes that the optimizer moves for each parameter of its own"),
}
"""The shared constants: a round value from what is known of operations, and the same."""

NOISE, ROBUST = 0.033, 0.05
"""One standard deviation of the logarithm of a step's seconds, and the error from which on more
counts less.
"""

PARTS = ("beside", "beside_tensors", "gathered")
"""Numbers that are parts of a whole: 1 at most."""

Name = tuple[str, str]


@frozen
class Fit:
    """Numbers by profile, "" for shared constants, and name; the logarithms of their priors and
    how far they may be.
    """

    rows: Batch
    seconds: Array
    names: tuple[Name, ...]
    prior: Array
    spread: Array

    def values(self, at: Array) -> dict[Name, float]:
        """The numbers by their logarithms."""
        return {name: _value(name[1], it) for name, it in zip(self.names, at, strict=True)}

    def predicted(self, at: Array) -> Array:
        """Seconds of all rows."""
        found = self.values(at)
        of = [profile_of(row["framework"]) for row in self.rows.rows]
        each = {
            name: {it: found.get((it, name), getattr(profile(it), name)) for it in {*of}}
            for name in NUMBERS
        }
        framework = {name: np.array([values[it] for it in of]) for name, values in each.items()}
        return steps(self.rows, framework, {name: found["", name] for name in CONSTANTS}).seconds

    def slopes(self, at: Array) -> Array:
        """Derivatives of the logarithm of seconds, by number and row.

        A profile's numbers change the rows of its framework alone, so those of one name are moved
        together.
        """
        of, off = np.array([profile_of(row["framework"]) for row in self.rows.rows]), self._off(at)
        moved = {
            name: np.array([1e-4 * (it == name) for _, it in self.names]) for _, name in self.names
        }
        together = {name: (self._off(at + step) - off) / 1e-4 for name, step in moved.items()}
        return np.array([together[name] * ((of == it) | (it == "")) for it, name in self.names])

    def best(self, weights: Array, rounds: int = 12, start: Array | None = None) -> Array:
        """Levenberg and Marquardt's least squares, from the priors or `start`; rows of weight 0
        are left out.
        """
        at, damping, used = self.prior if start is None else start, 1e-2, weights > 0
        off = self._off(at)
        for _ in range(rounds):
            slopes = self.slopes(at)[:, used]
            scaled = slopes * (weights[used] / np.sqrt(1 + (off[used] / ROBUST) ** 2))
            normal = scaled @ slopes.T + np.diag(self.spread**-2)
            slope = scaled @ off[used] + (at - self.prior) * self.spread**-2
            before = self._loss(at, off, weights)
            there = at
            while damping < 1e4:
                moved = np.linalg.solve(normal + damping * np.diag(np.diag(normal)), slope)
                there = at - np.clip(moved, -1, 1)
                if self._loss(there, self._off(there), weights) < before:
                    break
                damping *= 4
            at, off, damping = there, self._off(there), max(damping / 8, 1e-6)
            if before - self._loss(at, off, weights) < 3e-4 * before:
                break
        return at

    def _off(self, at: Array) -> Array:
        return np.log(self.predicted(at) / self.seconds)

    def _loss(self, at: Array, off: Array, weights: Array) -> float:
        robust = 2 * ROBUST**2 * (np.sqrt(1 + (off / ROBUST) ** 2) - 1)
        return float(
            (weights * robust)[weights > 0].sum() + (((at - self.prior) / self.spread) ** 2).sum()
        )


def main() -> None:
    parser = ArgumentParser(description=__doc__, prog="fit_profiles.py")
    parser.add_argument("rows", type=Path)
    parser.add_argument(
        "--clusters", type=Path, help="their networks; unset, clusters.csv beside the rows"
    )
    parser.add_argument(
        "--left-out", nargs="*", default=[], metavar="COLUMN", help="source, model, framework, gpu"
    )
    parser.add_argument("--write", action="store_true", help="write the profiles and the constants")
    given = parser.parse_args()
    clusters = {
        row["cluster"]: row for row in read(given.clusters or given.rows.with_name("clusters.csv"))
    }
    rows = [row for row in read(given.rows) if row["status"] == "ok" and row["step_s"]]
    work = read_work(rows, clusters)
    fit = fit_of(work.batch)
    sources = np.array([row["source"] for row in work.rows])
    found = fit.best(weights(sources, np.ones(len(sources), bool)))
    by_group(work.rows, fit.predicted(found), "source", ", fitted")
    for column in given.left_out:
        by_group(
            work.rows, left_out(fit, work.rows, column, found), column, f", each {column} left out"
        )
    moved = [(*name, f"{value:.4g}") for name, value in fit.values(found).items()]
    table("Numbers", ("profile", "number", "value"), moved)
    if given.write:
        write(fit.values(found))


def fit_of(rows: Batch) -> Fit:
    """The fit of rows: of the profiles that they have, and of the constants."""
    of = sorted({profile_of(row["framework"]) for row in rows.rows} - {DEFAULT})
    default = profile(DEFAULT)
    names = [(it, name) for it in of for name in SPREAD] + [("", name) for name in CONSTANTS]
    spread = SPREAD | {name: it.spread for name, it in CONSTANTS.items()}
    prior = [getattr(default, name) if it else CONSTANTS[name].prior for it, name in names]
    logs = np.array([_log(name, value) for (_, name), value in zip(names, prior, strict=True)])
    seconds = np.array([float(row["step_s"]) for row in rows.rows])
    return Fit(rows, seconds, tuple(names), logs, np.array([spread[name] for _, name in names]))


def weights(sources: Array, used: Array) -> Array:
    """Each source by the root of its rows."""
    counts = {source: int((used & (sources == source)).sum()) for source in sources}
    each = np.array([max(counts[source], 1) ** -0.5 for source in sources])
    return np.where(used, each / NOISE**2, 0.0)


def left_out(fit: Fit, rows: Sequence[Mapping[str, str]], column: str, start: Array) -> Array:
    """The seconds of rows by fits that have not seen those of the same value of a column;
    `start` is that of all.
    """
    sources, values = (np.array([row[it] for row in rows]) for it in ("source", column))
    found = np.zeros(len(rows))
    for value in sorted({*values}):
        seen = values != value
        found = np.where(seen, found, fit.predicted(fit.best(weights(sources, seen), 4, start)))
    return found


def write(values: Mapping[Name, float]) -> None:
    """Writes profiles and constants."""
    here = Path(__file__).parent / "predicting" / "constants.toml"
    shared = {name: values["", name] for name in CONSTANTS}
    here.write_text(
        _toml(
            "Shared constants of others' steps, by benchmarks/fit_profiles.py; `steps.py` uses"
            " them.",
            shared,
        )
    )
    for it in profiles():
        numbers = {name: values.get((it, name), getattr(profile(it), name)) for name in NUMBERS}
        if it != DEFAULT:
            text = "Fitted to published steps by benchmarks/fit_profiles.py."
            (FOLDER / f"{it}.toml").write_text(_toml(text, numbers))


def _toml(comment: str, numbers: Mapping[str, float]) -> str:
    lines = (f"{name} = {float(f'{value:.3g}')!r}" for name, value in numbers.items())
    return "\n".join((f"# {comment}", "", *lines, ""))


def _log(name: str, value: float) -> float:
    return float(np.log(value / (1 - value) if name in PARTS else value))


def _value(name: str, at: Any) -> float:
    return float(1 / (1 + np.exp(-at)) if name in PARTS else np.exp(np.clip(at, -30, 30)))


if __name__ == "__main__":
    sys.exit(main())
