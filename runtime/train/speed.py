"""Throughput of a run beside the compiler's prediction."""

import re

import torch

from ..config.plan import Expected

OFTEN = 50
"""One in so many slow lines of a log says that steps are slow."""


class Speed:
    """Throughput of steps of `tokens` tokens on `ranks` ranks of a kind of device.

    It is compared with the `expected` throughput where that is for this kind of device.
    """

    def __init__(
        self, tokens: int, ranks: int, device: torch.device, expected: Expected | None
    ) -> None:
        self.tokens, self._own = tokens, tokens / ranks
        if device.type == "cuda":
            self._unit, name = "GPU", torch.cuda.get_device_name(device)
        else:
            self._unit, name = "process", device.type
        self._expected = expected if expected and is_of(expected.gpu, name) else None
        self._slow = 0

    def begin(self) -> str:
        """The prediction in a line, "" where there is none."""
        expected = self._expected
        if expected is None:
            return ""
        rate = f"{self._own / expected.seconds:,.0f} tokens/s/{self._unit}"
        step = f"{_seconds(expected.seconds)} a step, {rate}"
        return f"predicted on {expected.gpu}: {step}, within {expected.error:.0%}"

    def words(self, seconds: float) -> str:
        """Steps that take `seconds` each, for instance `12,300 tokens/s/GPU (MFU 41.0%,
        predicted 13,000)`.
        """
        expected, rate = self._expected, f"{self._own / seconds:,.0f} tokens/s/{self._unit}"
        if not expected:
            return rate
        predicted = f"{self._own / expected.seconds:,.0f}"
        return f"{rate} (MFU {self._mfu(expected, seconds):.1%}, predicted {predicted})"

    def values(self, seconds: float) -> dict[str, float]:
        """The same as fields of log.jsonl."""
        expected, key = self._expected, f"tokens_per_s_{self._unit.lower()}"
        rates = {"tokens_per_s": self.tokens / seconds, key: self._own / seconds}
        if expected is None:
            return rates
        return rates | {
            "mfu": self._mfu(expected, seconds),
            f"predicted_{key}": self._own / expected.seconds,
        }

    def complaint(self, seconds: float) -> str:
        """Says that steps are slower than predicted by more than the error; "" where they are not.

        Says it at the first such line, and then at each OFTEN-th.
        """
        expected = self._expected
        if expected is None or seconds <= expected.seconds * (1 + expected.error):
            return ""
        self._slow += 1
        if self._slow % OFTEN != 1:
            return ""
        more = (
            f"{seconds / expected.seconds - 1:.0%} more than predicted, with an error of at most"
            f" {expected.error:.0%}"
        )
        return f"slow: {_seconds(seconds)} a step, {more}"

    def _mfu(self, expected: Expected, seconds: float) -> float:
        return expected.flops_per_token * self._own / (expected.peak_flops * seconds)


def is_of(gpu: str, device: str) -> bool:
    """Whether a device, by its own name, is a GPU as plans call it: `h100_sxm` is an `NVIDIA H100
    80GB HBM3`.

    The two names share the word of the model, the first word with a digit.  A name without a digit
    names a kind of device, as `cpu`.
    """
    model = next((word for word in gpu.split("_") if re.search(r"\d", word)), gpu)
    return model in re.split(r"[^a-z0-9]+", device.lower())


def _seconds(time: float) -> str:
    if time >= 1:
        return f"{time:.2f} s"
    return f"{time * 1e3:.1f} ms"
