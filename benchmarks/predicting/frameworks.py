"""Profiles of other frameworks: by what their steps differ from the work and the hardware, twelve
numbers each.

They serve to predict others' published steps (`benchmarks/predict.py`).  Steps of scalec's own
programs use none: their host time and overlap are in the IR.
"""

import tomllib
from functools import cache
from pathlib import Path

from attrs import fields, frozen

FOLDER = Path(__file__).with_suffix("")
"""A file for each profile."""

DEFAULT = "default"
"""The profile of a framework that has none."""


@frozen
class Framework:
    """The work that a framework adds to a step.

    host         seconds to issue a layer, forward and backward; embedding and head by their kernels
    host_tp      the same, with tensor parallelism
    collective   seconds to issue a collective
    step         seconds of a step besides, as of logs and data
    traffic      bytes that memory-bound ops move, as a part of those of fused ones
    rate         of products, as a part of what the GPU holds
    beside       the part of gradients' reduction that is done beside backward, where a row says
                 that any is
    exposed      the part of collectives of tensor parallelism that the GPU waits for
    messages     the part of messages between stages that the GPU waits for
    bucket       bytes of gradients that are reduced in one collective
    per_tensor   whether ZeRO 1 reduces and gathers each tensor by itself, beside nothing: 1 or 0
    balanced     whether stages are cut by parameters, the head's too, not into equal numbers of
                 layers: 1 or 0
    """

    host: float
    host_tp: float
    collective: float
    step: float
    traffic: float
    rate: float
    beside: float
    exposed: float
    messages: float
    bucket: float
    per_tensor: float
    balanced: float


NUMBERS = tuple(it.name for it in fields(Framework))


def profiles() -> list[str]:
    """The names of all profiles."""
    return sorted(path.stem for path in FOLDER.glob("*.toml"))


@cache
def profile(name: str) -> Framework:
    """The profile of this name."""
    return read_profile(FOLDER / f"{name}.toml")


def read_profile(path: Path) -> Framework:
    """The profile that a file holds."""
    return Framework(**tomllib.loads(path.read_text(encoding="utf-8")))


@cache
def profile_of(framework: str) -> str:
    """The name of a framework's profile: its own, that of the longest name which its name begins
    with, or the default.

    For instance of `megatron-2021` that of `megatron`.
    """
    said = framework.lower().replace("-", "_").replace(" ", "_")
    return max((name for name in profiles() if said.startswith(name)), key=len, default=DEFAULT)
