"""A log of three steps of a few tokens on one CPU."""

from collections.abc import Sequence
from pathlib import Path

import torch

from scalec.runtime.config.plan import Expected
from scalec.runtime.train.log import Log
from scalec.runtime.train.progress import Progress
from scalec.runtime.train.sinks import Sinks
from scalec.runtime.train.speed import Speed


def small_log(
    folder: Path | None,
    tokens: int = 4,
    choices: Sequence[int] = (),
    expected: Expected | None = None,
    steps: int = 3,
    warm_up: int = 1,
    progress: Progress | None = None,
    sinks: Sinks | None = None,
) -> Log:
    return Log(
        folder,
        0,
        steps,
        Speed(tokens, 1, torch.device("cpu"), expected),
        choices,
        warm_up,
        progress,
        sinks,
    )
