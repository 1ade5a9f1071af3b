"""The findings of `scalec doctor`: it judges the reports of all ranks by the needs of a job.

Nothing here looks at a machine.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from ...runtime.errors import count_with_noun, quote_first_names
from .report import Needs, Report

OK, WARN, FAIL = "ok", "warn", "fail"

DRIFT, APART = 1.0, 10.0
"""Seconds by which clocks may differ before a warning, and before torchrun may take a node for
lost: it does where the last sign of a node is 15 s old by its own clock (torch,
elastic/rendezvous/dynamic_rendezvous.py)."""

SLOW, BROKEN = 0.7, 0.2
"""The fractions of the usual rate, the hardware table's or most other links', that decide about a
link: a slower one gets a warning, or is a fault.
"""

KEPT = 3
"""The number of checkpoints that a run's folder needs room for: the two that a run keeps, and the
one that it writes.
"""

OWN_FILES = 256
"""The number of a rank's descriptors besides its connections: data, checkpoints, libraries."""

SHARED = 1 << 30
"""Bytes of /dev/shm that NCCL needs, whose ranks of a node may communicate through it; containers
often have 64 MiB.
"""

OWN = 1 << 30
"""Bytes of a GPU that its rank itself may hold while it looks: CUDA's context, which is part of a
step's memory too.
"""

GIB = 2**30


@dataclass(frozen=True)
class Finding:
    """A line: its level, its topic, the words about it and, unless all is well, what to do."""

    level: str
    about: str
    said: str
    help: str = ""

    def __str__(self) -> str:
        line = f"{self.level:<4}  {self.about:<14}  {self.said}"
        if self.help:
            line += f"\n{'':22}{self.help}"
        return line


def findings(needs: Needs, reports: Sequence[Report], world: int) -> list[Finding]:
    """All findings, always in the same order."""
    all_findings = list[Finding]()
    for check in CHECKS:
        all_findings.extend(check(needs, reports, world))
    return all_findings


def _ranks(needs: Needs, reports: Sequence[Report], world: int) -> Iterator[Finding]:
    came = {report.rank for report in reports}
    missing = [rank for rank in range(world) if rank not in came]
    nodes = len({report.node for report in reports})
    text = f"{count_with_noun(len(came), 'rank')} on {count_with_noun(nodes, 'node')}"
    if missing:
        some = quote_first_names([*map(str, missing)])
        yield Finding(
            FAIL,
            "ranks",
            f"{text}; missing: {some}",
            "look at the logs of their nodes, and at the network",
        )
    elif needs.name and world not in (1, needs.ranks):
        yield Finding(
            WARN, "ranks", f"{text}; the plan has {needs.ranks}", "start one process for each rank"
        )
    else:
        yield Finding(OK, "ranks", text)


def _versions(needs: Needs, reports: Sequence[Report], world: int) -> Iterator[Finding]:
    first, are_alike = reports[0].versions, True
    for name in first:
        unlike = _unlike(reports, lambda report, name=name: report.versions[name] or "none")
        if unlike:
            are_alike = False
            level = WARN if name == "python" else FAIL
            yield Finding(
                level, "versions", f"{name} is {unlike}", f"install one {name} on all nodes"
            )
    if are_alike:
        text = ", ".join(f"{name} {version}" for name, version in first.items() if version)
        if len(reports) > 1:
            text += ", on all ranks"
        yield Finding(OK, "versions", text)
    this_version = f"scalec {first['scalec']}"
    if needs.written_by and needs.written_by != this_version:
        yield Finding(
            WARN,
            "versions",
            f"compiled by {needs.written_by}, here is {this_version}",
            "compile the plan again",
        )


def _clocks(needs: Needs, reports: Sequence[Report], world: int) -> Iterator[Finding]:
    clock_of_node = {report.node: report.clock for report in reports}
    if len(clock_of_node) == 1:
        return
    usual_clock = median(clock_of_node.values())
    worst = max(clock_of_node, key=lambda node: abs(clock_of_node[node] - usual_clock))
    apart = abs(clock_of_node[worst] - usual_clock)
    text = f"at most {apart:.2f} s apart"
    if apart < DRIFT:
        yield Finding(OK, "clocks", text)
        return
    level = WARN if apart < APART else FAIL
    help = "start chrony or ntpd on it: torchrun gives up a node by its clock"
    yield Finding(level, "clocks", f"{text}, on {worst}", help)


def _gpus(needs: Needs, reports: Sequence[Report], world: int) -> Iterator[Finding]:
    if needs.device == "cpu":
        return
    faults = list[Finding]()
    for node, reports_of_node in _nodes(reports).items():
        faults.extend(_wrong_gpus(needs, node, reports_of_node))
    yield from faults
    if faults:
        return
    names = set[str]()
    for report in reports:
        names.update(name for _, name, _, _ in report.gpus)
    text = ", ".join(sorted(names)) or "none here"
    if needs.memory and names:
        text += f", with memory for the plan's {needs.memory / GIB:.1f} GiB"
    yield Finding(OK, "GPUs", text)


def _wrong_gpus(needs: Needs, node: str, reports_of_node: Sequence[Report]) -> Iterator[Finding]:
    count, wanted = reports_of_node[0].gpu_count, 0
    if needs.device:
        wanted = max(len(reports_of_node), needs.ranks_per_node)
    if count < wanted:
        help = "take another node, or set `nodes` and `gpus_per_node` in the plan's `cluster`"
        yield Finding(
            FAIL,
            "GPUs",
            f"{node} has {count_with_noun(count, 'GPU')}, the plan takes {wanted}",
            help,
        )
        return
    for report in reports_of_node:
        for number, name, total, free in report.gpus:
            if fault := _wrong_gpu(needs, name, total, free):
                text, help = fault
                yield Finding(FAIL, "GPUs", f"GPU {number} of {node}: {text}", help)


def _wrong_gpu(needs: Needs, name: str, total: int, free: int) -> tuple[str, str] | None:
    """Words and help where a GPU is not the plan's, or lacks the memory; sizes are in bytes."""
    name_without_spaces = "".join(name.casefold().split())
    if needs.gpu and needs.gpu_memory and _model(needs.gpu) not in name_without_spaces:
        help = "name its GPU in the plan's `cluster`, and compile it again"
        return f"{name}, the plan is for {needs.gpu}", help
    if total < needs.memory:
        text = f"{total / GIB:.1f} GiB of memory, a step takes {needs.memory / GIB:.1f}"
        return text, "`scalec explain memory PLAN` says what would make it fit"
    if free + OWN < needs.memory:
        text = f"{free / GIB:.1f} GiB of memory free, a step takes {needs.memory / GIB:.1f}"
        return text, "another process has the rest: nvidia-smi names it"
    return None


def _model(gpu: str) -> str:
    """The model in the name that plans have for a GPU, as `h100` of `h100_sxm`, or `rtx4090`."""
    model = ""
    for word in gpu.split("_"):
        model += word
        if any(sign.isdigit() for sign in word):
            break
    return model


def _links(needs: Needs, reports: Sequence[Report], world: int) -> Iterator[Finding]:
    failed = next((report for report in reports if report.links), None)
    if failed:
        yield Finding(
            FAIL,
            "links",
            f"ranks do not reach each other: rank {failed.rank} on {failed.node}: {failed.links}",
            "NCCL_DEBUG=INFO, or GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME, tell more",
        )
    for name, where in (("node", "within nodes"), ("network", "between nodes")):
        if any(name in report.rates for report in reports):
            yield _link(needs, reports, name, where)


def _link(needs: Needs, reports: Sequence[Report], name: str, where: str) -> Finding:
    """The finding about the links of one kind, which at least one report must have."""
    shared = reports[0].near if name == "network" else 1  # by the ranks of a node
    rates = dict[int, float]()
    for report in reports:
        if name in report.rates:
            rates[report.rank] = report.rates[name] * shared
    usual_rate, slowest = median(rates.values()), min(rates, key=lambda rank: rates[rank])
    node = next(report.node for report in reports if report.rank == slowest)
    table = {link["name"]: link["bandwidth"] for link in needs.links}
    expected, least = table.get(name, usual_rate), rates[slowest]
    beside = f" of the table's {expected / 1e9:.1f}" if name in table else ""
    text = (
        f"{where} {usual_rate / 1e9:.2f} GB/s{beside}, at least {least / 1e9:.2f}, of rank"
        f" {slowest} on {node}"
    )
    if least >= SLOW * expected or needs.device != "cuda":
        return Finding(OK, "links", text)
    level = WARN if least >= BROKEN * expected else FAIL
    help = "leave the node out, or measure the cluster with `scalec calibrate`"
    return Finding(level, "links", text, help)


def _folder(needs: Needs, reports: Sequence[Report], world: int) -> Iterator[Finding]:
    reason_of_node = dict[str, str]()
    blind = set[str]()
    for report in reports:
        if report.folder:
            reason_of_node.setdefault(report.node, report.folder)
        elif len(report.seen) < len(reports):
            blind.add(report.node)
    for node, reason in sorted(reason_of_node.items()):
        yield Finding(
            FAIL, "run folder", f"{node} cannot write to it: {reason}", "name another with --out"
        )
    if reason_of_node:
        return
    if blind:
        nodes = quote_first_names(sorted(blind))
        text = f"it is not one folder for all nodes: not all files are seen on {nodes}"
        yield Finding(FAIL, "run folder", text, "name a folder on a shared file system with --out")
    else:
        yield Finding(OK, "run folder", "all ranks write to it and see each other's files")


def _disk(needs: Needs, reports: Sequence[Report], world: int) -> Iterator[Finding]:
    free, wanted = min(report.free_disk for report in reports), KEPT * needs.checkpoint
    if free < 0 or not needs.checkpoint:
        return
    text = f"{free / GIB:.1f} GiB free, {KEPT} checkpoints take {wanted / GIB:.1f}"
    if free >= wanted:
        yield Finding(OK, "disk", text)
    else:
        help = "free some space, or name a folder on another disk with --out"
        yield Finding(FAIL, "disk", text, help)


def _data(needs: Needs, reports: Sequence[Report], world: int) -> Iterator[Finding]:
    if not needs.files:
        return
    for report in reports:
        if report.data.startswith("no data"):
            help = "start it from the plan's folder, or name other files in the plan"
            yield Finding(FAIL, "data", f"{report.node}: {report.data}", help)
            return
    unlike = _unlike(reports, lambda report: report.data)
    if unlike:
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
    text = f"{least.open_files:,} may be open, a rank takes up to {wanted:,}"
    if least.open_files < wanted:
        yield Finding(
            WARN,
            "open files",
            f"{text}, on {least.node}",
            "ulimit -n 65536, before the ranks start",
        )
    else:
        yield Finding(OK, "open files", text)


def _memory(needs: Needs, reports: Sequence[Report], world: int) -> Iterator[Finding]:
    """Memory of hosts: checkpoints are copied there before they are written."""
    if needs.device != "cuda":
        return
    for node, reports_of_node in _nodes(reports).items():
        first = reports_of_node[0]
        ranks = max(len(reports_of_node), needs.ranks_per_node)
        free, wanted = first.free_memory, ranks * needs.host
        if 0 <= free < wanted:
            text = (
                f"{node} has {free / GIB:.0f} GiB free, {ranks} ranks take up to {wanted / GIB:.0f}"
            )
            yield Finding(
                WARN,
                "host memory",
                text,
                "ask for more memory of the node: a job that exceeds it is killed",
            )
        if ranks > 1 and 0 <= first.shared_memory < SHARED:
            shared = f"{first.shared_memory / 2**20:.0f} MiB"
            text = f"/dev/shm of {node} has {shared}, through which NCCL's ranks communicate"
            yield Finding(
                WARN, "host memory", text, "give the container more, as docker's --shm-size=8g does"
            )


def _threads(needs: Needs, reports: Sequence[Report], world: int) -> Iterator[Finding]:
    for node, reports_of_node in _nodes(reports).items():
        ranks = len(reports_of_node)
        threads, cpus = reports_of_node[0].threads, reports_of_node[0].cpus
        if threads.isdecimal() and int(threads) * ranks > cpus:
            text = (
                f"OMP_NUM_THREADS={threads} for {count_with_noun(ranks, 'rank')}, but {node} has"
                f" {count_with_noun(cpus, 'CPU')}"
            )
            yield Finding(WARN, "threads", text, f"OMP_NUM_THREADS={max(1, cpus // ranks)}")


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
    """The reports of each node."""
    reports_of_node = dict[str, list[Report]]()
    for report in reports:
        reports_of_node.setdefault(report.node, []).append(report)
    return reports_of_node


def _unlike(reports: Sequence[Report], get_value: Callable[[Report], Any]) -> str:
    """The values that differ and the ranks that have each, as `2.13.0 on rank 0 and 2.12.1 on
    ranks 4, 5`; "" if all are alike.
    """
    ranks_of_value = dict[Any, list[str]]()
    for report in reports:
        ranks_of_value.setdefault(get_value(report), []).append(str(report.rank))
    if len(ranks_of_value) < 2:
        return ""
    words = list[str]()
    for value, ranks in ranks_of_value.items():
        words.append(f"{value} on rank{'s' * (len(ranks) > 1)} {quote_first_names(ranks)}")
    return " and ".join(words)
