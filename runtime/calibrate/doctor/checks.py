"""The findings of `scalec doctor`: what the reports of all ranks mean for a job.

Nothing here looks at a machine.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from ...errors import counted, named
from .report import Needs, Report

OK, WARN, FAIL = "ok", "warn", "fail"

DRIFT, APART = 1.0, 10.0
"""Seconds by which clocks may differ before it is told, and before torchrun may take a node for
lost: it does where the last sign of a node is 15 s old by its own clock (torch,
elastic/rendezvous/dynamic_rendezvous.py)."""

SLOW, BROKEN = 0.7, 0.2
"""The parts of a rate, of the hardware's table or of most other links, below which a link is
told, and is a fault.
"""

KEPT = 3
"""Checkpoints that a run's folder has room for: the two that are kept, and the one that is
being written.
"""

OWN_FILES = 256
"""Descriptors of a rank besides its connections to others: data, checkpoints, libraries."""

SHARED = 1 << 30
"""Bytes of /dev/shm, by which NCCL's ranks of a node may talk; containers often have 64 MiB."""

OWN = 1 << 30
"""Bytes of a GPU that its rank itself may have while it looks: CUDA's context, which is part of
a step's memory too.
"""

GIB = 2**30


@dataclass(frozen=True)
class Finding:
    """A line: its level, what it is about, what was found and, unless all is well, what to do."""

    level: str
    about: str
    said: str
    help: str = ""

    def __str__(self) -> str:
        return f"{self.level:<4}  {self.about:<14}  {self.said}" + (
            f"\n{'':22}{self.help}" if self.help else ""
        )


def findings(needs: Needs, reports: Sequence[Report], world: int) -> list[Finding]:
    """All findings, in one order."""
    return [found for check in CHECKS for found in check(needs, reports, world)]


def _ranks(needs: Needs, reports: Sequence[Report], world: int) -> Iterator[Finding]:
    came = {report.rank for report in reports}
    missing = [rank for rank in range(world) if rank not in came]
    nodes = len({report.node for report in reports})
    said = f"{counted(len(came), 'rank')} on {counted(nodes, 'node')}"
    if missing:
        some = named([*map(str, missing)])
        yield Finding(
            FAIL,
            "ranks",
            f"{said}; missing: {some}",
            "look at the logs of their nodes, and at the network",
        )
    elif needs.name and world not in (1, needs.ranks):
        yield Finding(
            WARN, "ranks", f"{said}; the plan has {needs.ranks}", "start one process for each rank"
        )
    else:
        yield Finding(OK, "ranks", said)


def _versions(needs: Needs, reports: Sequence[Report], world: int) -> Iterator[Finding]:
    first, apart = reports[0].versions, False
    for name in first:
        if unlike := _unlike(reports, lambda report, name=name: report.versions[name] or "none"):
            apart = True
            level = WARN if name == "python" else FAIL
            yield Finding(
                level, "versions", f"{name} is {unlike}", f"install one {name} on all nodes"
            )
    if not apart:
        said = ", ".join(f"{name} {it}" for name, it in first.items() if it)
        yield Finding(OK, "versions", said + (", on all ranks" if len(reports) > 1 else ""))
    if needs.written_by and needs.written_by != (here := f"scalec {first['scalec']}"):
        yield Finding(
            WARN,
            "versions",
            f"compiled by {needs.written_by}, here is {here}",
            "compile the plan again",
        )


def _clocks(needs: Needs, reports: Sequence[Report], world: int) -> Iterator[Finding]:
    by_node = {report.node: report.clock for report in reports}
    usual = median(by_node.values())
    worst = max(by_node, key=lambda node: abs(by_node[node] - usual))
    off = abs(by_node[worst] - usual)
    if len(by_node) > 1 or off > DRIFT:
        level = OK if off < DRIFT else WARN if off < APART else FAIL
        help = (
            ""
            if level == OK
            else "start chrony or ntpd on it: torchrun gives up a node by its clock"
        )
        yield Finding(
            level, "clocks", f"at most {off:.2f} s apart" + (f", on {worst}" if help else ""), help
        )


def _gpus(needs: Needs, reports: Sequence[Report], world: int) -> Iterator[Finding]:
    if needs.device == "cpu":
        return
    wrong = [
        each for node, its in _nodes(reports).items() for each in _wrong_gpus(needs, node, its)
    ]
    yield from wrong
    if not wrong:
        names = sorted({name for report in reports for _, name, _, _ in report.gpus})
        need = (
            f", with memory for the plan's {needs.memory / GIB:.1f} GiB"
            if needs.memory and names
            else ""
        )
        yield Finding(OK, "GPUs", (", ".join(names) or "none here") + need)


def _wrong_gpus(needs: Needs, node: str, its: Sequence[Report]) -> Iterator[Finding]:
    found, wanted = its[0].gpu_count, max(len(its), needs.ranks_per_node) if needs.device else 0
    if found < wanted:
        help = "take another node, or set `nodes` and `gpus_per_node` in the plan's `cluster`"
        yield Finding(
            FAIL, "GPUs", f"{node} has {counted(found, 'GPU')}, the plan takes {wanted}", help
        )
        return
    for number, name, total, free in (gpu for report in its for gpu in report.gpus):
        if wrong := _wrong_gpu(needs, name, total, free):
            said, help = wrong
            yield Finding(FAIL, "GPUs", f"GPU {number} of {node}: {said}", help)


def _wrong_gpu(needs: Needs, name: str, total: int, free: int) -> tuple[str, str] | None:
    """Words and help where a GPU is not the plan's, or has not the memory."""
    if needs.gpu and needs.gpu_memory and _model(needs.gpu) not in "".join(name.casefold().split()):
        help = "name its GPU in the plan's `cluster`, and compile it again"
        return f"{name}, the plan is for {needs.gpu}", help
    if total < needs.memory:
        said = f"{total / GIB:.1f} GiB of memory, a step takes {needs.memory / GIB:.1f}"
        return said, "`scalec explain memory PLAN` says what would make it fit"
    if free + OWN < needs.memory:
        said = f"{free / GIB:.1f} GiB of memory free, a step takes {needs.memory / GIB:.1f}"
        return said, "another process has the rest: nvidia-smi names it"
    return None


def _model(gpu: str) -> str:
    """The model in the name that plans have for a GPU, as `h100` of `h100_sxm`, or `rtx4090`."""
    words = gpu.split("_")
    ends = next(
        (at for at, word in enumerate(words) if any(sign.isdigit() for sign in word)),
        len(words) - 1,
    )
    return "".join(words[: ends + 1])


def _links(needs: Needs, reports: Sequence[Report], world: int) -> Iterator[Finding]:
    if failed := [report for report in reports if report.links]:
        said = (
            f"ranks do not reach each other: rank {failed[0].rank} on {failed[0].node}:"
            f" {failed[0].links}"
        )
        yield Finding(
            FAIL,
            "links",
            said,
            "NCCL_DEBUG=INFO, or GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME, tell more",
        )
    table = {it["name"]: it["bandwidth"] for it in needs.links}
    for name, where in (("node", "within nodes"), ("network", "between nodes")):
        shared = reports[0].near if name == "network" else 1
        rates = {
            report.rank: report.rates[name] * shared for report in reports if name in report.rates
        }
        if not rates:
            continue
        usual, slowest = median(rates.values()), min(rates, key=lambda rank: rates[rank])
        due = table.get(name, usual)
        least = rates[slowest]
        on = next(report.node for report in reports if report.rank == slowest)
        beside = f" of the table's {due / 1e9:.1f}" if name in table else ""
        said = (
            f"{where} {usual / 1e9:.2f} GB/s{beside}, at least {least / 1e9:.2f}, of rank"
            f" {slowest} on {on}"
        )
        level = OK if least >= SLOW * due else WARN if least >= BROKEN * due else FAIL
        help = (
            ""
            if level == OK
            else "leave the node out, or measure the cluster with `scalec calibrate`"
        )
        yield Finding(
            level if needs.device == "cuda" else OK,
            "links",
            said,
            help if needs.device == "cuda" else "",
        )


def _folder(needs: Needs, reports: Sequence[Report], world: int) -> Iterator[Finding]:
    refused = [report for report in reports if report.folder]
    for node in sorted({report.node for report in refused}):
        why = next(report.folder for report in refused if report.node == node)
        yield Finding(
            FAIL, "run folder", f"{node} cannot write to it: {why}", "name another with --out"
        )
    blind = sorted(
        {report.node for report in reports if not report.folder and len(report.seen) < len(reports)}
    )
    if blind and not refused:
        said = f"it is not one folder for all nodes: not all files are seen on {named(blind)}"
        yield Finding(FAIL, "run folder", said, "name a folder on a shared file system with --out")
    elif not refused:
        yield Finding(OK, "run folder", "all ranks write to it and see each other's files")


def _disk(needs: Needs, reports: Sequence[Report], world: int) -> Iterator[Finding]:
    free, wanted = min(report.free_disk for report in reports), KEPT * needs.checkpoint
    if free < 0 or not needs.checkpoint:
        return
    said = f"{free / GIB:.1f} GiB free, {KEPT} checkpoints take {wanted / GIB:.1f}"
    level = OK if free >= wanted else FAIL
    help = "" if level == OK else "free some space, or name a folder on another disk with --out"
    yield Finding(level, "disk", said, help)


def _data(needs: Needs, reports: Sequence[Report], world: int) -> Iterator[Finding]:
    if not needs.files:
        return
    for report in reports:
        if report.data.startswith("no data"):
            help = "start it from the plan's folder, or name other files in the plan"
            yield Finding(FAIL, "data", f"{report.node}: {report.data}", help)
            return
    if unlike := _unlike(reports, lambda report: report.data):
        yield Finding(FAIL, "data", f"it is {unlike}", "all nodes need the same files")
    else:
        yield Finding(OK, "data", reports[0].data.rpartition(",")[0])


def _ports(needs: Needs, reports: Sequence[Report], world: int) -> Iterator[Finding]:
    for report in reports:
        if report.unreachable:
            help = (
                "open ports between the nodes, or name the interface that they share in"
                " NCCL_SOCKET_IFNAME"
            )
            yield Finding(FAIL, "ports", f"{report.node} does not reach {report.unreachable}", help)
            return
    if len(reports) > 1:
        yield Finding(OK, "ports", "each rank reaches its neighbour on the next node")


def _open_files(needs: Needs, reports: Sequence[Report], world: int) -> Iterator[Finding]:
    least = min(reports, key=lambda report: report.open_files)
    wanted = OWN_FILES + 4 * max(world, needs.ranks)
    said = f"{least.open_files:,} may be open, a rank takes up to {wanted:,}"
    if least.open_files < wanted:
        yield Finding(
            WARN,
            "open files",
            f"{said}, on {least.node}",
            "ulimit -n 65536, before the ranks start",
        )
    else:
        yield Finding(OK, "open files", said)


def _memory(needs: Needs, reports: Sequence[Report], world: int) -> Iterator[Finding]:
    """Memory of hosts, on which checkpoints are copied before they are written."""
    for node, its in _nodes(reports).items():
        ranks = max(len(its), needs.ranks_per_node)
        free, wanted = its[0].free_memory, ranks * needs.host
        if needs.device == "cuda" and 0 <= free < wanted:
            said = (
                f"{node} has {free / GIB:.0f} GiB free, {ranks} ranks take up to {wanted / GIB:.0f}"
            )
            yield Finding(
                WARN,
                "host memory",
                said,
                "ask for more memory of the node: a job that exceeds it is killed",
            )
        if needs.device == "cuda" and ranks > 1 and 0 <= its[0].shared_memory < SHARED:
            shared = f"{its[0].shared_memory / 2**20:.0f} MiB"
            said = f"/dev/shm of {node} has {shared}, through which NCCL's ranks communicate"
            yield Finding(
                WARN, "host memory", said, "give the container more, as docker's --shm-size=8g does"
            )


def _threads(needs: Needs, reports: Sequence[Report], world: int) -> Iterator[Finding]:
    for node, its in _nodes(reports).items():
        each, cpus = its[0].threads, its[0].cpus
        if each.isdecimal() and int(each) * len(its) > cpus:
            said = (
                f"OMP_NUM_THREADS={each} for {counted(len(its), 'rank')}, but {node} has"
                f" {counted(cpus, 'CPU')}"
            )
            yield Finding(WARN, "threads", said, f"OMP_NUM_THREADS={max(1, cpus // len(its))}")


CHECKS: Sequence[Callable[[Needs, Sequence[Report], int], Iterator[Finding]]] = (
    _ranks,
    _versions,
    _clocks,
    _gpus,
    _links,
    _ports,
    _folder,
    _disk,
    _data,
    _open_files,
    _memory,
    _threads,
)


def _nodes(reports: Sequence[Report]) -> Mapping[str, list[Report]]:
    found = dict[str, list[Report]]()
    for report in reports:
        found.setdefault(report.node, []).append(report)
    return found


def _unlike(reports: Sequence[Report], of: Callable[[Report], Any]) -> str:
    """The values that differ and who has each, as `2.13.0 on rank 0 and 2.12.1 on ranks 4, 5`;
    "" if all are alike.
    """
    found = dict[Any, list[str]]()
    for report in reports:
        found.setdefault(of(report), []).append(str(report.rank))
    if len(found) < 2:
        return ""
    return " and ".join(
        f"{value} on rank{'s' * (len(ranks) > 1)} {named(ranks)}" for value, ranks in found.items()
    )
