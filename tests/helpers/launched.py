"""Starts `train(…)`, or a program's file, on forked ranks as a launcher would."""

from collections.abc import Callable
from math import prod
from pathlib import Path
from typing import Any

from helpers.forked_ranks import HANGS
from scalec.runtime import Plan, train
from scalec.testing.faults import Program, fork


def text_files(folder: Path) -> None:
    """Two small files for `--data text/*.txt`, of which a plan may hold back one; all bytes are
    below 32.
    """
    (folder / "text").mkdir(parents=True, exist_ok=True)
    for name, step in (("a", 3), ("b", 7)):
        (folder / "text" / f"{name}.txt").write_bytes(bytes(i * step % 32 for i in range(4000)))


def run_recorded(
    folder: Path,
    plan: Plan,
    build: Any,
    train_step: Any,
    eval_step: Any,
    options: str = "",
    record: str = "1",
) -> list[tuple[int, str]]:
    """Runs the program in `folder` with `options`; exit status and standard error of each rank."""
    return _run(
        folder,
        prod(plan.mesh.values()),
        options,
        record,
        lambda: train(plan, build, train_step, eval_step),
    )


def run_file(
    folder: Path, world: int, options: str = "", record: str = ""
) -> list[tuple[int, str]]:
    """Runs `train.py` of `folder`, as itself; exit status and standard error of each rank, whose
    output is `out<rank>`.

    A fork of what has imported torch begins at once, where Python takes seconds, and a launcher as
    long again.
    """
    return _run(folder, world, options, record, None)


def _run(
    folder: Path, world: int, options: str, record: str, main: Callable[[], Any] | None
) -> list[tuple[int, str]]:
    program = Program(folder, world, options, environment={"SCALEC_RECORD": record})
    ended = fork(program, folder=folder, main=main).wait(HANGS)
    return [*zip(ended.statuses, ended.err, strict=True)]
