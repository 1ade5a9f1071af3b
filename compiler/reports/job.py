"""A job of a plan: what it needs of its machines, and the script that starts it, for Slurm or
Kubernetes.
"""

import re
from collections.abc import Mapping, Sequence
from itertools import takewhile
from json import dumps
from pathlib import Path, PurePath
from shlex import join, quote
from typing import Any

from .. import __version__
from ..analysis.communication import parameter_count
from ..analysis.hardware import hardware
from ..analysis.memory import Account, accounts, at_loads
from ..config.gpus import gpu
from ..config.units import counted
from ..ir import ITEM_BYTES, PRECISIONS, Program
from ..syntax.package_data import filled
from .summary import launch, mesh_words

CPU = "cpu"

PROCESS = {CPU: 2 << 30, "cuda": 8 << 30}
"""Bytes of the host that a rank takes besides a copy of its state: an estimate."""


def needs(program: Program, name: str) -> dict[str, Any]:
    """The needs of a job whose run is called `name`, as `runtime/calibrate/doctor` reads them.

    Bytes of memory and of host are of a rank, those of the checkpoint of all; links are those that
    step times go by, in bytes and in seconds; without any where the GPU is not known.
    """
    how, data, most = launch(program), program.train.data, largest(program)
    found = hardware(program) if most.device != CPU else None
    links = (
        [
            ("node", found.link, found.link_latency),
            ("network", found.network, found.network_latency),
        ]
        if found
        else []
    )
    known = gpu(program.cluster)
    return {
        "written_by": f"scalec {__version__}",
        "name": name,
        "nodes": how.nodes,
        "least": how.least,
        "ranks": program.ranks,
        "ranks_per_node": how.ranks_per_node,
        "device": most.device,
        "gpu": program.cluster.gpu if most.device != CPU else "",
        "gpu_memory": known.memory * 2**30 if known else 0,
        "memory": most.total,
        "host": most.host + PROCESS[most.device],
        "checkpoint": checkpoint_bytes(program),
        "links": [
            {"name": name, "bandwidth": rate, "latency": latency} for name, rate, latency in links
        ],
        "files": [file for each in data.sets or (data,) for file in each.files or ()],
    }


def largest(program: Program) -> Account:
    """The account of the rank that needs most, with experts at the heaviest load."""
    found = [account for _, each in at_loads(program) for account in each] or [*accounts(program)]
    return max(found, key=lambda each: each.total)


def checkpoint_bytes(program: Program) -> int:
    """The bytes of a checkpoint: each parameter as its optimizer has it, and what that
    remembers of it.
    """
    train = program.train
    item = ITEM_BYTES[PRECISIONS[train.master or ("fp64" if train.precision == "fp64" else "fp32")]]
    return parameter_count(program) * item * (1 + len(train.optimizer.slots))


FILES = {"slurm": "job.sbatch", "k8s": "job.yaml"}
"""The script of each scheduler."""

NEEDS = "needs.json"
TRIES, RESTARTS = 3, 10
"""How often ranks are started in one job of Slurm; how often a JobSet starts anew after
failures.
"""


def files(
    scheduler: str,
    program: Program,
    plan: Path,
    run: str,
    folder: Path,
    rest: Sequence[str],
    how: Mapping[str, Any],
) -> dict[str, str]:
    """The script and, for `scalec doctor`, what the job needs: name → text, beside the program in
    `folder`.

    `run` is the name of its runs; `how` has time, grace, cpus, sbatch, image and claim; `rest` are
    options of train.py.
    """
    job = needs(program, run)
    job["files"] = _given(rest, "--data") or job["files"]
    name = re.sub(r"[^A-Za-z0-9_.-]+", "_", run)
    label = re.sub(r"[^a-z0-9]+", "-", name.casefold()).strip("-")[:30].strip("-")
    # names of services begin with a letter
    label = label if label[:1].isalpha() else f"run-{label}".strip("-")
    host = -(-job["host"] // 2**30)
    per_node = job["ranks_per_node"]
    file = FILES[scheduler]
    text = filled(
        f"{file}.j2",
        **how,
        version=__version__,
        plan=_shown(str(plan)),
        name=name,
        label=label,
        file=_shown(quote(str(folder / file))),
        needs=quote(str(folder / NEEDS)),
        size=_size(program, job),
        nodes=f"{job['least']}-{job['nodes']}" if job["least"] < job["nodes"] else job["nodes"],
        most=job["nodes"],
        ranks_per_node=per_node,
        gpus=job["device"] == "cuda",
        host=host,
        memory=host * per_node,
        tries=TRIES,
        restarts=RESTARTS,
        out=quote((_given(rest, "--out") or [str(PurePath("runs", run))])[-1]),
        command=join(
            [
                str(folder / "train.py"),
                *([] if _given(rest, "--resume") else ["--resume", "auto"]),
                *rest,
            ]
        ),
    )
    return {NEEDS: dumps(job, indent=2) + "\n", file: text}


def _size(program: Program, job: Mapping[str, Any]) -> str:
    """For instance `4 nodes of 8 GPUs make the 32 ranks of the mesh dp 4 x tp 8`."""
    each = counted(job["ranks_per_node"], "GPU" if job["device"] == "cuda" else "rank")
    least, most = (f"{job['least']} to ", "up to ") if job["least"] < job["nodes"] else ("", "")
    mesh = f" of the mesh {words}" if (words := mesh_words(program)) else ""
    return (
        f"{least}{counted(job['nodes'], 'node')} of {each} make"
        f" {most}{counted(job['ranks'], 'rank')}{mesh}"
    )


def _shown(text: str) -> str:
    """Text that is fit for a comment."""
    return "".join(sign if sign.isprintable() else "_" for sign in text)


def _given(words: Sequence[str], name: str) -> list[str]:
    """The values of an option among words, where it is given last."""
    found: list[str] = []
    for at, word in enumerate(words):
        if word.startswith(f"{name}="):
            found = [word.partition("=")[2]]
        if word == name:
            found = [*takewhile(lambda each: not each.startswith("--"), words[at + 1 :])]
    return found
