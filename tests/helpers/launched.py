"""Starts `train(…)`, or a program's file, on forked ranks as a launcher would."""

import multiprocessing
import os
import socket
import sys
import traceback
from collections.abc import Callable
from functools import partial
from math import prod
from pathlib import Path
from runpy import run_path
from typing import Any

import torch

from helpers.forked_ranks import HANGS
from scalec.runtime import Plan, train


def text_files(folder: Path) -> None:
    """Two small files for `--data text/*.txt`, of which a plan may hold back one; all bytes are below 32."""
    (folder / "text").mkdir(parents=True, exist_ok=True)
    for name, step in (("a", 3), ("b", 7)):
        (folder / "text" / f"{name}.txt").write_bytes(bytes(i * step % 32 for i in range(4000)))


def run_recorded(
    folder: Path, plan: Plan, build: Any, train_step: Any, eval_step: Any, options: str = "", record: str = "1"
) -> list[tuple[int, str]]:
    """Runs the program in `folder` with `options`; exit status and standard error of each rank."""
    return _run(folder, prod(plan.mesh.values()), options, record, lambda: train(plan, build, train_step, eval_step))


def run_file(folder: Path, world: int, options: str = "", record: str = "") -> list[tuple[int, str]]:
    """Runs `train.py` of `folder`, as itself; exit status and standard error of each rank, whose output is `out<rank>`.

    A fork of what has imported torch begins at once, where Python takes seconds, and a launcher as long again.
    """
    return _run(folder, world, options, record, partial(run_path, "train.py", run_name="__main__"))


def _run(folder: Path, world: int, options: str, record: str, start: Callable[[], Any]) -> list[tuple[int, str]]:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(server.getsockname()[1]), "WORLD_SIZE": str(world)}
    common |= {"LOCAL_WORLD_SIZE": str(world), "SCALEC_RECORD": record}
    ranks = [
        multiprocessing.get_context("fork").Process(
            target=_program, args=(folder, {**common, "RANK": str(rank), "LOCAL_RANK": str(rank)}, options, start)
        )
        for rank in range(world)
    ]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join(HANGS)
        rank.kill()
        rank.join()
    return [(rank.exitcode or 0, (folder / f"err{i}").read_text()) for i, rank in enumerate(ranks)]


def _program(folder: Path, environment: dict[str, str], options: str, start: Callable[[], Any]) -> None:
    """In a forked process: the program, its output in files of `folder`."""
    for number, stream in enumerate(("out", "err"), start=1):
        os.dup2(os.open(folder / f"{stream}{environment['RANK']}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
    sys.stdout, sys.stderr = os.fdopen(1, "w"), os.fdopen(2, "w")
    torch.set_num_threads(1)
    os.chdir(folder)
    os.environ.update(environment)
    sys.argv = ["train.py", *options.split()]
    status = 0
    try:
        start()
    except SystemExit as ended:
        status = int(ended.code or 0)
    except BaseException:
        traceback.print_exc()
        status = 99
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
