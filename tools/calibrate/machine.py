"""Measures figures of a machine as a whole: its rates of products and memory, the least time of a
kernel.
"""

import os
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from heapq import nlargest
from statistics import fmean
from typing import Any

import torch

from ...runtime.errors import RunError
from . import host
from .calls import Row, median_issue_seconds
from .clock import Clock

COPIED = {"cpu": 1 << 26, "cuda": 1 << 30}
"""Bytes that are copied to measure memory."""

BEST = 3
"""The number of products whose mean is the rate of large ones."""


def device(kind: str) -> torch.device:
    """The device that plans are for.  RunError where the machine has none."""
    if kind == "cuda" and not torch.cuda.is_available():
        raise RunError(
            "the plans are for a GPU, and this machine has none: calibrate on the machine that"
            " trains"
        )
    if kind == "cpu":
        return torch.device(kind)
    device_of_rank = torch.device(kind, int(os.environ.get("LOCAL_RANK", 0)))
    torch.cuda.set_device(device_of_rank)
    return device_of_rank


def figures(
    wanted: Mapping[str, Any], rows: Sequence[Row], memory: float, clock: Clock
) -> dict[str, Row]:
    """The tables `cluster`, `gpu` and `host`.

    scalec ships the figures of GPUs; for a GPU the tables have only the figures that differ.
    """
    one, rates = torch.ones(1, device=clock.device), _product_rates(rows)
    kernel = clock.median(lambda: lambda: one + one, 200)  # seconds of an op on one element
    if clock.device.type == "cuda":
        return {
            "cluster": {"gpu": wanted["gpu"]},
            "gpu": {"kernel": kernel},
            "host": host.figures(
                wanted["steps"], clock, lambda: median_issue_seconds(wanted["calls"], clock)
            ),
        }
    gpu = {
        "name": wanted["gpu"],
        "peak": rates,
        "held": dict.fromkeys(rates, 1.0) | {"bf16": 1.0},
        "memory": memory,
        "streamed": 1.0,
        "sms": 1,
        "attention": 0.5,
        "kernel": kernel,
    }
    return {"gpu": gpu, "host": {"op": 0.0, "collective": 0.0, "synchronous": True}}


def _product_rates(rows: Sequence[Row]) -> dict[str, float]:
    """Operations a second of large products, by element type."""
    rates_of_dtype = dict[str, list[float]]()
    for row in rows:
        if row["table"] == "product":
            operations = 2 * row["batch"] * row["m"] * row["n"] * row["k"]
            rates_of_dtype.setdefault(row["dtype"], []).append(operations / row["seconds"])
    return {dtype: fmean(nlargest(BEST, rates)) for dtype, rates in rates_of_dtype.items()}


def copy_rate(clock: Clock) -> float:
    """Bytes a second that a large copy reads and writes."""
    source = torch.ones(COPIED[clock.device.type], dtype=torch.uint8, device=clock.device)
    target = torch.empty_like(source)
    return 2 * source.nbytes / clock.median(lambda: lambda: target.copy_(source))


def notes(device: torch.device) -> Iterator[str]:
    """The name, the clocks and the power of the device, as nvidia-smi has them."""
    if device.type != "cuda":
        return
    fields = "name,clocks.sm,clocks.mem,power.draw,power.limit,temperature.gpu,driver_version"
    try:
        command = ["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader"]
        output = subprocess.run(
            command, capture_output=True, text=True, check=True, timeout=30
        ).stdout
    except (OSError, subprocess.SubprocessError):
        return
    for line in output.splitlines():
        yield f"{fields}: {line}"
