"""The ranks of a job together, by its store: reports, the shared folder, ports, clocks, links."""

import os
import shutil
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from statistics import median
from typing import Any, cast

import torch
import torch.distributed as dist

from ...runtime.errors import RunError
from ..calibrate.clock import Clock
from ..calibrate.machine import device
from .report import Needs, Report, local_report

PATIENCE = timedelta(seconds=120)
"""How long ranks wait for each other."""

PARTING = timedelta(seconds=5)
"""How long ranks wait where some have not come: the ranks that have come time out at about the same
moment.
"""

ROUNDS = 5
"""How often clocks and links are measured, besides a first time."""

SENT = {"cpu": 1 << 20, "cuda": 1 << 26}
"""Bytes of a message that measures a link."""

_CONNECTING = 10.0  # seconds


class Job:
    """This rank's part of the look at a job; all ranks call its methods in the same order."""

    def __init__(self, needs: Needs, folder: Path) -> None:
        self.needs, self.folder = needs, folder
        self.rank, self.world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
        self.near = int(os.environ.get("LOCAL_WORLD_SIZE", self.world))
        self._whole, self._store = True, self._join_store()

    def reports(self) -> list[Report]:
        """On rank 0, the reports of all ranks that have come; empty on others."""
        token = self._word_of_first_rank("token", lambda: f".doctor-{os.getpid()}-{time.time_ns()}")
        report = local_report(self.needs, self.rank, self.near, self.folder, self.folder / token)
        both_protocols: Any = {}
        if socket.has_dualstack_ipv6():
            both_protocols = {"family": socket.AF_INET6, "dualstack_ipv6": True}
        # this rank answers at any port that is free
        with socket.create_server(("", 0), **both_protocols) as server:
            port = server.getsockname()[1]
            self._store.set(f"at/{self.rank}", f"{_own_address()}:{port}")
            if self._all_come("began"):
                report = replace(
                    report,
                    port=port,
                    unreachable=self._unreachable(),
                    seen=_names(self.folder / token),
                )
                report = replace(report, clock=self._clock(), **self._links())
            self._store.set(f"report/{self.rank}", report.text())
            self._all_come("ended")
        shutil.rmtree(self.folder / token, ignore_errors=True)
        with suppress(OSError):
            self.folder.rmdir()  # if it was not there before, it is empty
        if self.rank:
            return []
        reports = list[Report]()
        for rank in range(self.world):
            if self._store.check([f"report/{rank}"]):
                reports.append(Report.read(self._store.get(f"report/{rank}")))
        return reports

    def status(self, status: int) -> int:
        """Rank 0's status, on all ranks."""
        return int(self._word_of_first_rank("status", lambda: str(status)))

    def leave(self) -> None:
        """Waits for all ranks, so that the store outlives them."""
        self._all_come("left")
        if dist.is_initialized():
            dist.destroy_process_group()

    def _join_store(self) -> Any:
        if self.world == 1:
            return cast(Any, dist).HashStore()
        # rank 0 keeps the store, unless torchrun does
        keeps_store = self.rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
        host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        store = cast(Any, dist).TCPStore(
            host, port, self.world, keeps_store, PATIENCE, wait_for_workers=False
        )
        return cast(Any, dist).PrefixStore("doctor", store)

    def _word_of_first_rank(self, key: str, word: Callable[[], str]) -> str:
        """Rank 0's word, on all ranks."""
        if not self.rank:
            self._store.set(key, word())
        return self._store.get(key).decode()

    def _all_come(self, name: str) -> bool:
        """Waits for all ranks, only a little if some have not come before; whether all came."""
        if self._store.add(f"{name}/count", 1) == self.world:
            self._store.set(name, "all")
        try:
            self._store.wait([name], PATIENCE if self._whole else PARTING)
        except dist.DistStoreError:
            self._whole = False
        return self._whole

    def _unreachable(self) -> str:
        """The address where the same rank of the next node does not answer; "" if it answers."""
        address = self._store.get(f"at/{(self.rank + self.near) % self.world}").decode()
        host, _, port = address.rpartition(":")
        try:
            socket.create_connection((host, int(port)), _CONNECTING).close()
        except OSError as error:
            return f"{address}: {error.strerror or error}"
        return ""

    def _clock(self) -> float:
        """Seconds that this rank's clock is ahead of rank 0's: the median of some meetings."""
        differences = list[float]()
        for number in range(ROUNDS):
            self._all_come(f"clock/{number}")
            now = time.time()
            time_of_first = float(
                self._word_of_first_rank(f"time/{number}", lambda now=now: repr(now))
            )
            differences.append(now - time_of_first)
        return median(differences)

    def _links(self) -> dict[str, Any]:
        """Rates to the next rank of the node and to the same rank of the next node, or why
        there are none.
        """
        lacks_gpus = self.needs.device == "cuda" and torch.cuda.device_count() < self.near
        if self.world == 1 or lacks_gpus:
            return {}
        rank, near, world = self.rank, self.near, self.world
        first, place = rank - rank % near, rank % near
        rates = dict[str, float]()
        try:
            if near > 1:
                following, previous = (place + 1) % near, (place - 1) % near
                rates["node"] = self._rate(first + following, first + previous)
            if world // near > 1:
                rates["network"] = self._rate((rank + near) % world, (rank - near) % world)
        except (RunError, RuntimeError) as error:
            return {"links": " ".join(str(error).split())[:300]}
        return {"rates": rates}

    def _rate(self, target: int, source: int) -> float:
        """Bytes a second that this rank sends in a ring where all ranks send at once."""
        if not dist.is_initialized():
            self._link_clock = Clock(device(self.needs.device or "cpu"))
            backend = "nccl" if self._link_clock.device.type == "cuda" else "gloo"
            store = cast(Any, dist).PrefixStore("links", self._store)
            dist.init_process_group(
                backend, store=store, rank=self.rank, world_size=self.world, timeout=PATIENCE
            )
        clock, seconds = self._link_clock, list[float]()
        message = torch.zeros(SENT[clock.device.type], dtype=torch.uint8, device=clock.device)
        received = torch.empty_like(message)
        for _ in range(1 + ROUNDS):
            clock.wait()
            cast(Any, dist).barrier()
            start = time.perf_counter()
            send = dist.P2POp(dist.isend, message, target)
            receive = dist.P2POp(dist.irecv, received, source)
            for work in dist.batch_isend_irecv([send, receive]):
                work.wait()
            clock.wait()
            seconds.append(time.perf_counter() - start)
        return message.numel() / median(seconds[1:])


def _own_address() -> str:
    """This machine's address in the network of the first node: its name alone may mean nothing
    to others.
    """
    first = os.environ.get("MASTER_ADDR", "127.0.0.1")
    family, kind, *_, address = socket.getaddrinfo(first, 1, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(address)  # sends nothing
        return probe.getsockname()[0]


def _names(folder: Path) -> list[int]:
    """The ranks whose files are in a folder."""
    try:
        return sorted(int(path.name) for path in folder.iterdir() if path.name.isdecimal())
    except OSError:
        return []
