"""A job of a plan: what it needs of its machines, for the script that starts it and for `scalec doctor`."""

from typing import Any

from .. import __version__
from ..analysis.communication import parameter_count
from ..analysis.hardware import hardware
from ..analysis.memory import Account, accounts, at_loads
from ..config.gpus import gpu
from ..ir import ITEM_BYTES, PRECISIONS, Program
from .summary import launch

CPU = "cpu"

PROCESS = {CPU: 2 << 30, "cuda": 8 << 30}
"""Bytes of the host that a rank takes besides a copy of its state: an estimate."""


def needs(program: Program, name: str) -> dict[str, Any]:
    """The needs of a job whose run is called `name`, as `runtime/calibrate/doctor` reads them.

    Bytes of memory and of host are of a rank, those of the checkpoint of all; links are those that step times go by, in
    bytes and in seconds; without any where the GPU is not known.
    """
    how, data, most = launch(program), program.train.data, largest(program)
    found = hardware(program) if most.device != CPU else None
    links = (
        [("node", found.link, found.link_latency), ("network", found.network, found.network_latency)] if found else []
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
        "links": [{"name": name, "bandwidth": rate, "latency": latency} for name, rate, latency in links],
        "files": [file for each in data.sets or (data,) for file in each.files or ()],
    }


def largest(program: Program) -> Account:
    """The account of the rank that needs most, with experts at the heaviest load."""
    found = [account for _, each in at_loads(program) for account in each] or [*accounts(program)]
    return max(found, key=lambda each: each.total)


def checkpoint_bytes(program: Program) -> int:
    """The bytes of a checkpoint: each parameter as its optimizer has it, and what that remembers of it."""
    train = program.train
    item = ITEM_BYTES[PRECISIONS[train.master or ("fp64" if train.precision == "fp64" else "fp32")]]
    return parameter_count(program) * item * (1 + len(train.optimizer.slots))
