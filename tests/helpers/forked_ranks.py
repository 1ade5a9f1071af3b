"""Runs a function on forked gloo ranks.

Forking after torch is imported starts four of them in a tenth of a second.
"""

import gc
import io
import multiprocessing
import os
import socket
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

import pytest
import torch
import torch.distributed as dist

from scalec.testing.faults.ranks import listener

# else gloo accepts unequal sizes and dtypes in silence
os.environ.setdefault("TORCH_DISTRIBUTED_DEBUG", "DETAIL")


HANGS = 600
"""Seconds after which what is started is taken to hang: far more than anything takes, less than
a test may.
"""

debug: Any = dist  # the stubs leave its levels and stores out


def run_ranks(
    world: int,
    function: Callable[..., Any],
    *args: Any,
    timeout: float = HANGS,
    functional: bool = False,
) -> list[Any]:
    """`function(*args)` on each of `world` ranks with a gloo group; their results, by rank.

    A rank that raises fails the test with its traceback; then, and after `timeout` seconds, all are
    killed.  `functional` says that torch's functional collectives are used, as DTensor and graphs
    do: before 2.13 torch has them on gloo only where it does not compare what ranks do.
    """
    context = multiprocessing.get_context("fork")
    server, compared = listener(), not functional or torch.__version__ >= "2.13"
    pipes = [context.Pipe(duplex=False) for _ in range(world)]
    ranks = [
        context.Process(
            target=_main, args=(sender, rank, world, server, compared, function, args), daemon=True
        )
        for rank, (_, sender) in enumerate(pipes)
    ]
    for rank in ranks:
        rank.start()
    for _, sender in pipes:
        sender.close()
    server.close()
    try:
        return _collect([receiver for receiver, _ in pipes], timeout)
    finally:
        _end(ranks)


@contextmanager
def plain_groups() -> Iterator[None]:
    """Groups, of forked ranks too, without DETAIL's check before each call, which waits for all
    ranks.
    """
    level = debug.get_debug_level()
    debug.set_debug_level(debug.DebugLevel.OFF)
    try:
        yield
    finally:
        debug.set_debug_level(level)


def _main(
    sender: Connection,
    rank: int,
    world: int,
    server: socket.socket,
    compared: bool,
    function: Callable[..., Any],
    args: tuple[Any, ...],
) -> None:
    gc.freeze()  # a collector that looks at all that the forking process has copies it
    torch.set_num_threads(1)
    torch.set_deterministic_debug_mode("error")  # so that memory that nothing has written holds NaN
    if not compared:
        debug.set_debug_level(debug.DebugLevel.OFF)
    try:
        host, port = server.getsockname()
        if rank:
            server.close()
        store = debug.TCPStore(
            host, port, world, not rank, master_listen_fd=None if rank else server.detach()
        )
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
        sender.send_bytes(_packed(True, function(*args)))
        dist.barrier()  # so that no rank tears down a connection that another still reads
    except BaseException:
        sender.send_bytes(_packed(False, traceback.format_exc()))
    finally:
        os._exit(0)  # the parent's atexit handlers are not ours


def _packed(succeeded: bool, result: Any) -> bytes:
    """By value: tensors sent as they are would share memory with a process that is about to end."""
    buffer = io.BytesIO()
    torch.save((succeeded, result), buffer)
    return buffer.getvalue()


def _unpacked(data: bytes) -> tuple[bool, Any]:
    return torch.load(io.BytesIO(data), weights_only=False)


def _collect(receivers: list[Connection], timeout: float) -> list[Any]:
    results: dict[int, Any] = {}
    while len(results) < len(receivers):
        left = [receiver for rank, receiver in enumerate(receivers) if rank not in results]
        if not wait(left, timeout):
            pytest.fail(
                f"ranks {[r for r in range(len(receivers)) if r not in results]}: nothing"
                f" within {timeout} s"
            )
        for rank, receiver in enumerate(receivers):
            if rank in results or not receiver.poll():
                continue
            try:
                succeeded, result = _unpacked(receiver.recv_bytes())
            except EOFError:
                pytest.fail(f"rank {rank} died without a word")
            if not succeeded:
                pytest.fail(f"rank {rank}:\n{result}", pytrace=False)
            results[rank] = result
    return [results[rank] for rank in range(len(receivers))]


def _end(ranks: Sequence[BaseProcess]) -> None:
    for rank in ranks:
        rank.join(0.5)
        rank.kill()
        rank.join()
