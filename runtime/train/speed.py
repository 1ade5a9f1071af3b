"""Throughput of a run beside the compiler's prediction."""

import re

import torch

from ..config.plan import Expected

OFTEN = 50
"""The interval, in slow lines of a log, at which one says that steps are slow."""


class Speed:
    """Throughput of steps of `tokens` tokens on `ranks` ranks of a kind of device.

    They are compared with what is `expected` where the device is the one that it is expected of.
    """

    def __init__(
        self, tokens: int, ranks: int, device: torch.device, expected: Expected | None
    ) -> None:
        self.tokens, self._own, self._unit = (
            tokens,
            tokens / ranks,
            "GPU" if device.type == "cuda" else "process",
        )
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
        self._expected = expected if expected and is_of(expected.gpu, name) else None
        self._slow = 0

    def begin(self) -> str:
        """The prediction in a line, "" where there is none."""
        it = self._expected
        if it is None:
            return ""
        step = f"{_seconds(it.seconds)} a step, {self._own / it.seconds:,.0f} tokens/s/{self._unit}"
        return f"predicted on {it.gpu}: {step}, within {it.error:.0%}"

    def words(self, seconds: float) -> str:
        """Steps that take `seconds` each, for instance `12,300 tokens/s/GPU (MFU 41.0%,
        predicted 13,000)`.
        """
        it, rate = self._expected, f"{self._own / seconds:,.0f} tokens/s/{self._unit}"
        return (
            f"{rate} (MFU {self._mfu(it, seconds):.1%}, predicted {self._own / it.seconds:,.0f})"
            if it
            else rate
        )

    def values(self, seconds: float) -> dict[str, float]:
        """The same for log.jsonl."""
        expected, key = self._expected, f"tokens_per_s_{self._unit.lower()}"
        rates = {"tokens_per_s": self.tokens / seconds, key: self._own / seconds}
        if expected is None:
            return rates
        return rates | {
            "mfu": self._mfu(expected, seconds),
            f"predicted_{key}": self._own / expected.seconds,
        }

    def complaint(self, seconds: float) -> str:
        """That steps are slower than predicted by more than the error: at the first such line,
        then now and then.
        """
        it = self._expected
        if it is None or seconds <= it.seconds * (1 + it.error):
            return ""
        self._slow += 1
        if self._slow % OFTEN != 1:
            return ""
        more = (
            f"{seconds / it.seconds - 1:.0%} more than predicted, with an error of at most"
            f" {it.error:.0%}"
        )
        return f"slow: {_seconds(seconds)} a step, {more}"

    def _mfu(self, it: Expected, seconds: float) -> float:
        return it.flops_per_token * self._own / (it.peak_flops * seconds)


def is_of(gpu: str, device: str) -> bool:
    """Whether a device, by its own name, is a GPU as plans call it: `h100_sxm` is an `NVIDIA H100
    80GB HBM3`.

    They share the word of the model, the first with a digit; a name without one is that of a kind,
    as `cpu`.
    """
    model = next((word for word in gpu.split("_") if re.search(r"\d", word)), gpu)
    return model in re.split(r"[^a-z0-9]+", device.lower())


def _seconds(time: float) -> str:
    return f"{time:.2f} s" if time >= 1 else f"{time * 1e3:.1f} ms"
