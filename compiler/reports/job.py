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
from ..config.settings import FOLDER
from ..config.units import count_words
from ..ir import ITEM_BYTES, PRECISIONS, Program
from ..syntax.package_data import fill_template
from .summary import get_launch, mesh_words

CPU = "cpu"

PROCESS = {CPU: 2 << 30, "cuda": 8 << 30}
"""Bytes of the host that a rank takes besides a copy of its state: an estimate."""


def needs(program: Program, name: str) -> dict[str, Any]:
    """The needs of a job whose run is called `name`, as `tools/doctor` reads them.

    `memory` and `host` are bytes of a rank, `checkpoint` is the bytes of all ranks.  `links` are
    the links that predicted step times use, in bytes a second and in seconds; there are none where
    the GPU is not known.
    """
    how, data, most = get_launch(program), program.train.data, largest(program)
    gpu_name, links = "", list[dict[str, Any]]()
    if most.device != CPU:
        gpu_name = program.cluster.gpu
        links = _links(program)
    known_gpu = gpu(program.cluster)
    gpu_memory = 0
    if known_gpu:
        gpu_memory = known_gpu.memory * 2**30
    files: list[str] = []
    for data_set in data.sets or (data,):
        for pattern in data_set.files or ():
            files.append(f"{pattern}/*.bin" if data.kind == FOLDER else pattern)
    return {
        "written_by": f"scalec {__version__}",
        "name": name,
        "nodes": how.nodes,
        "least": how.least,
        "ranks": program.ranks,
        "ranks_per_node": how.ranks_per_node,
        "device": most.device,
        "gpu": gpu_name,
        "gpu_memory": gpu_memory,
        "memory": most.total,
        "host": most.host + PROCESS[most.device],
        "checkpoint": checkpoint_bytes(program),
        "links": links,
        "files": files,
    }


def _links(program: Program) -> list[dict[str, Any]]:
    """The links of the hardware; none where its speed is not known."""
    machine = hardware(program)
    if machine is None:
        return []
    node = {"name": "node", "bandwidth": machine.link, "latency": machine.link_latency}
    network = {
        "name": "network",
        "bandwidth": machine.network,
        "latency": machine.network_latency,
    }
    return [node, network]


def largest(program: Program) -> Account:
    """The account of the rank that needs most, with experts at the heaviest load."""
    candidates: list[Account] = []
    for _, accounts_at_load in at_loads(program):
        candidates.extend(accounts_at_load)
    return max(candidates or accounts(program), key=lambda account: account.total)


def checkpoint_bytes(program: Program) -> int:
    """The bytes of a checkpoint: each parameter in the type of its optimizer, and the
    optimizer's state of it.
    """
    train = program.train
    default = "fp64" if train.precision == "fp64" else "fp32"
    item = ITEM_BYTES[PRECISIONS[train.master or default]]
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
    job["files"] = _option_values(rest, "--data") or job["files"]
    file = FILES[scheduler]
    words: dict[str, Any] = {**how, **_machine_words(program, job), **_name_words(run)}
    out = (_option_values(rest, "--out") or [str(PurePath("runs", run))])[-1]
    resume = [] if _option_values(rest, "--resume") else ["--resume", "auto"]
    text = fill_template(
        f"{file}.j2",
        **words,
        version=__version__,
        plan=_comment_text(str(plan)),
        file=_comment_text(quote(str(folder / file))),
        needs=quote(str(folder / NEEDS)),
        tries=TRIES,
        restarts=RESTARTS,
        out=quote(out),
        command=join([str(folder / "train.py"), *resume, *rest]),
    )
    return {NEEDS: dumps(job, indent=2) + "\n", file: text}


def _name_words(run: str) -> dict[str, str]:
    """The name of a run as the schedulers take it: `name`, and `label` for Kubernetes."""
    name = re.sub(r"[^A-Za-z0-9_.-]+", "_", run)
    label = re.sub(r"[^a-z0-9]+", "-", name.casefold()).strip("-")[:30].strip("-")
    # names of services begin with a letter
    if not label[:1].isalpha():
        label = f"run-{label}".strip("-")
    return {"name": name, "label": label}


def _machine_words(program: Program, job: Mapping[str, Any]) -> dict[str, Any]:
    """The machines of a job as its script asks for them; memory of the host in GiB."""
    host = -(-job["host"] // 2**30)
    nodes = job["nodes"]
    if job["least"] < job["nodes"]:
        nodes = f"{job['least']}-{job['nodes']}"
    return {
        "size": _size(program, job),
        "nodes": nodes,
        "most": job["nodes"],
        "ranks_per_node": job["ranks_per_node"],
        "gpus": job["device"] == "cuda",
        "host": host,
        "memory": host * job["ranks_per_node"],
    }


def _size(program: Program, job: Mapping[str, Any]) -> str:
    """For instance `4 nodes of 8 GPUs make the 32 ranks of the mesh dp 4 x tp 8`."""
    ranks_of_node = count_words(job["ranks_per_node"], "GPU" if job["device"] == "cuda" else "rank")
    least, most = "", ""
    if job["least"] < job["nodes"]:
        least, most = f"{job['least']} to ", "up to "
    mesh = mesh_words(program)
    of_mesh = f" of the mesh {mesh}" if mesh else ""
    return (
        f"{least}{count_words(job['nodes'], 'node')} of {ranks_of_node} make"
        f" {most}{count_words(job['ranks'], 'rank')}{of_mesh}"
    )


def _comment_text(text: str) -> str:
    """Text that is fit for a comment."""
    return "".join(sign if sign.isprintable() else "_" for sign in text)


def _option_values(words: Sequence[str], name: str) -> list[str]:
    """The values of an option on a command line, of its last use; none where it is not used."""
    values: list[str] = []
    for position, word in enumerate(words):
        if word.startswith(f"{name}="):
            values = [word.partition("=")[2]]
        if word == name:
            following = words[position + 1 :]
            values = [*takewhile(lambda value: not value.startswith("--"), following)]
    return values
