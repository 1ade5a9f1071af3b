"""The report of a rank about its machine, and the needs of a job."""

import json
import os
import platform
import resource
import shutil
import socket
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from hashlib import blake2b
from pathlib import Path
from typing import Any

import torch

from ...runtime.checkpoint.host_copy import free_memory
from ...runtime.config.versions import nccl, version_of
from ...runtime.data.files import find_files
from ...runtime.errors import RunError, count_with_noun, reason


@dataclass(frozen=True, kw_only=True)
class Needs:
    """The needs of a job; without values, the needs of a job of one rank that nothing is known of.

    `memory` and `host` are the bytes that a rank takes on a GPU and on its host; `checkpoint` is
    the bytes of a whole checkpoint.  Links have a name, "node" or "network", and bytes a second,
    one way.
    """

    written_by: str = ""
    name: str = ""
    nodes: int = 1
    least: int = 1
    ranks: int = 1
    ranks_per_node: int = 1
    device: str = ""
    gpu: str = ""
    gpu_memory: int = 0
    memory: int = 0
    host: int = 0
    checkpoint: int = 0
    links: Sequence[Mapping[str, Any]] = ()
    files: Sequence[str] = ()

    @classmethod
    def read(cls, path: Path) -> "Needs":
        """Reads the file that the compiler wrote."""
        return cls(**json.loads(path.read_text(encoding="utf-8")))


@dataclass(frozen=True, kw_only=True)
class Report:
    """A rank and its machine.

    `seen` are the ranks whose file it found in the run's folder; `clock` is the number of seconds
    that its clock is ahead of rank 0's.  Rates are the bytes a second that it sent to its
    neighbours, within its node and on the next one.
    """

    rank: int
    near: int
    """The number of ranks of its node."""
    node: str
    versions: Mapping[str, str]
    gpu_count: int
    """The number of GPUs that it sees."""
    gpus: Sequence[tuple[int, str, int, int]]
    """Number, name, bytes and free bytes of the GPU that it takes; of all GPUs, where it is the
    only rank.
    """
    cpus: int
    threads: str
    open_files: int
    shared_memory: int
    free_memory: int
    free_disk: int
    folder: str = ""
    """Why the run's folder cannot be written; "" if it can."""
    data: str = ""
    port: int = 0
    seen: Sequence[int] = ()
    unreachable: str = ""
    clock: float = 0.0
    rates: Mapping[str, float] = field(default_factory=dict[str, float])
    links: str = ""
    """Why links could not be measured."""

    def text(self) -> str:
        """The report as JSON."""
        return json.dumps(asdict(self))

    @classmethod
    def read(cls, text: str) -> "Report":
        """Reads the JSON of `text`."""
        return cls(**json.loads(text))


def local_report(needs: Needs, rank: int, near: int, folder: Path, token: Path) -> Report:
    """The report of a rank by itself.

    It leaves a file with its number as the name in the folder `token` of the run's folder.
    """
    fault = _leave_file(token / str(rank))
    gpu_count, gpus = 0, list[tuple[int, str, int, int]]()
    if needs.device != "cpu":
        gpu_count, gpus = torch.cuda.device_count(), _gpus()
    return Report(
        rank=rank,
        near=near,
        node=socket.gethostname(),
        versions=_versions(),
        gpu_count=gpu_count,
        gpus=gpus,
        cpus=len(os.sched_getaffinity(0)),
        threads=os.environ.get("OMP_NUM_THREADS", ""),
        open_files=resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        shared_memory=_free("/dev/shm"),
        free_memory=free_memory(),
        free_disk=_free(folder),
        folder=fault,
        data=_describe_files(needs.files),
    )


def _versions() -> dict[str, str]:
    """Versions by name; "" for a package that is not there."""
    names = {name: version_of(name) for name in ("scalec", "torch", "triton")}
    return {
        "python": platform.python_version(),
        **names,
        "NCCL": nccl() if torch.cuda.is_available() else "",
    }


def _gpus() -> list[tuple[int, str, int, int]]:
    """Number, name, bytes and free bytes of the rank's GPU; of all GPUs, where no launcher has
    given it one.

    It does not look at other ranks' GPUs: to look at a GPU takes half a GiB of it.
    """
    count, local = torch.cuda.device_count(), int(os.environ.get("LOCAL_RANK", -1))
    numbers = [*range(count)]
    if count and local >= 0:
        numbers = [min(local, count - 1)]
    gpus = list[tuple[int, str, int, int]]()
    for number in numbers:
        free, total = torch.cuda.mem_get_info(number)
        gpus.append((number, torch.cuda.get_device_name(number), total, free))
    return gpus


def _free(folder: str | Path) -> int:
    """Bytes that are free on the disk of a folder, -1 if it is not there."""
    try:
        return shutil.disk_usage(folder).free
    except OSError:
        return -1


def _leave_file(path: Path) -> str:
    """Writes a file that others look for; why that fails, or ""."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("scalec doctor", encoding="utf-8")
    except OSError as error:
        return reason(error)
    return ""


def _describe_files(patterns: Sequence[str]) -> str:
    """Number, bytes and a hash of the names and sizes of the data's files; or why there are
    none; "" where the data has no files.
    """
    try:
        files = find_files((*patterns,))
    except RunError as error:
        return str(error)
    if not files:
        return ""
    sizes = [os.path.getsize(path) for path in files]
    names_and_sizes = [*zip(map(os.path.basename, files), sizes, strict=True)]
    digest = blake2b(repr(names_and_sizes).encode(), digest_size=6).hexdigest()
    return (
        f"{count_with_noun(len(files), 'file')} of {count_with_noun(sum(sizes), 'byte')}, {digest}"
    )
