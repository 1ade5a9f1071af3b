"""The identity of a run's samples and model, stored in checkpoints: a resumed run must have the
same.

Mesh, microbatch, precision and kernels may change: each sample is still seen once.  The learning
rate, its schedule and the number of steps may change too; they are stored so that a run can say
how they changed.
"""

import json
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from hashlib import blake2b
from pathlib import Path
from typing import Any

from ..checkpoint.agreement import word_of_node
from ..checkpoint.index import PADDED_ROWS, Identity
from ..config.plan import Plan
from ..data.mixture import Mixture
from ..errors import count_with_noun

_ENDS = 1 << 16  # bytes at a file's beginning, and at its end, that are hashed
_SKIPPED = "so some are skipped and others seen twice"
_RATE = ("lr", "steps", "schedule")
_UNCOMPARED = (*_RATE, "unpadded", PADDED_ROWS)
_MEANING = {
    "seed": f"samples come in another order, {_SKIPPED}",
    "data": f"the same numbers are other samples, {_SKIPPED}",
    "weights": f"samples are of other sets, {_SKIPPED}",
    "seq": f"the data is cut into other samples, {_SKIPPED}",
    "dtype": f"the data is cut into other samples, {_SKIPPED}",
    "separator": "documents end elsewhere",
    "masked": "other tokens are hidden",
    "mask_token": "hidden tokens are another",
    "model": "the weights were trained to compute something else",
    "optimizer": "the state that was saved is another optimizer's",
    "betas": "the averages that were saved decay otherwise",
    "eps": "updates are scaled otherwise",
    "momentum": "the velocity that was saved decays otherwise",
    "weight_decay": "weights decay otherwise",
    "clip": "gradients are clipped otherwise",
    "groups": "parameters have another decay or learning rate",
}


def identity(plan: Plan, seed: int, training: Mixture, hashes: Sequence[str]) -> Identity:
    """The identity of a run with this seed on this data; `content` has made the hashes."""
    data = plan.data
    settings: dict[str, str | int | float | None] = {
        "seed": seed,
        **_sets(training, hashes),
        "global_batch": plan.global_batch,
        "seq": plan.seq,
        "dtype": str(training.parts[0].stream.dtype).removeprefix("torch."),
        "separator": data.separator,
        "masked": data.masked,
        "mask_token": data.mask_token,
    }
    if plan.model:
        settings["model"] = plan.model
    if plan.unpadded:
        settings["unpadded"] = plan.unpadded
    if plan.padded_rows:
        settings[PADDED_ROWS] = json.dumps({**plan.padded_rows})
    return settings


def _sets(training: Mixture, hashes: Sequence[str]) -> Identity:
    """The files of all sets and, for sets that have names, how often each is dealt out."""
    data, weights = list[str](), list[str]()
    for part, digest in zip(training.parts, hashes, strict=True):
        files, size = part.stream.files, sum(map(os.path.getsize, part.stream.files))
        words = (
            f"{count_with_noun(len(files), 'file')} of {count_with_noun(size, 'byte')}, {digest}"
        )
        if part.stream.is_split:
            words += f", the first {count_with_noun(part.stream.windows, 'sequence')}"
        if part.name:
            words = f"{part.name}: {words}"
            weights.append(f"{part.name} {part.weight:g}")
        data.append(words)
    sets = {"data": "; ".join(data)}
    if weights:
        sets["weights"] = " ".join(weights)
    return sets


def optimizer(program: Path) -> Identity:
    """The optimizer's settings but for its learning rate, from plan.json beside the program; none
    where that file is missing.
    """
    with suppress(OSError, ValueError, LookupError, TypeError, AttributeError):
        plan = json.loads(program.with_name("plan.json").read_bytes())
        settings = plan["settings"]["train"]["optimizer"]
        groups = "; ".join(_group(group) for group in settings["groups"]) or "none"
        names = ("betas", "eps", "momentum", "weight_decay", "clip")
        return {
            "optimizer": settings["kind"],
            **{name: f"{settings[name]}" for name in names},
            "groups": groups,
        }
    return {}


def _group(group: Mapping[str, Any]) -> str:
    """For instance `norms (*norm*) with weight_decay 0.0, lr_scale 1.0`."""
    decay, scale = group["weight_decay"], group["lr_scale"]
    params = ", ".join(group["params"])
    return f"{group['name']} ({params}) with weight_decay {decay}, lr_scale {scale}"


def rate(plan: Plan, lr: float, steps: int) -> Identity:
    """The settings of the learning rate, which a run that goes on may change, and says so."""
    return dict(zip(_RATE, (lr, steps, f"{plan.schedule}"), strict=True))


def other_rate(then: Identity, now: Identity, step: int, lr: float) -> list[str]:
    """A line where settings of the learning rate differ from what they were; `lr` is the rate of
    the step after `step`.
    """
    changes = list[str]()
    for name in _RATE:
        if then.get(name, now[name]) != now[name]:
            changes.append(f"{name} was {then[name]}, now {now[name]}")
    if not changes:
        return []
    return [f"learning rate: {', '.join(changes)}; step {step + 1} takes {lr:.2e}"]


def differences(then: Identity, now: Identity, step: int) -> list[str]:
    """For a run that goes on, a line for each setting that differs from what it was.

    A setting that only one of the two has is not compared.
    """
    lines = list[str]()
    for name in now:
        if name not in then or name in _UNCOMPARED or then[name] == now[name]:
            continue
        if not _is_padding(name, then, now):
            meaning = _meaning(name, then, now, step)
            lines.append(f"{name} was {then[name]}, now {now[name]}: {meaning}")
    return lines


def _is_padding(name: str, then: Identity, now: Identity) -> bool:
    """Whether models differ in their padding alone, which another mesh may need."""
    if name != "model":
        return False
    unpadded_then = then.get("unpadded", then["model"])
    return unpadded_then == now.get("unpadded", now["model"])


def _meaning(name: str, then: Identity, now: Identity, step: int) -> str:
    if name != "global_batch":
        return _MEANING[name]
    first = step * int(now[name] or 0)
    first_then = step * int(then[name] or 0)
    if first > first_then:
        missed = f"{first - first_then:,} are skipped"
    else:
        missed = f"{first_then - first:,} are seen twice"
    return f"step {step + 1} begins with sample {first:,}, not {first_then:,}: {missed}"


def content(training: Mixture) -> list[str]:
    """For each set, a hash of both ends of each of its files; the files' paths do not count.

    One rank of each node reads them.  Collective.  RunError.
    """
    return word_of_node(
        lambda: " ".join(_ends(part.stream.read_files) for part in training.parts)
    ).split()


def _ends(files: Sequence[str]) -> str:
    digest = blake2b(digest_size=6)
    for path in files:
        size = os.path.getsize(path)
        with open(path, "rb") as file:
            digest.update(size.to_bytes(8, "big") + file.read(_ENDS))
            file.seek(max(0, size - _ENDS))
            digest.update(file.read(_ENDS))
    return digest.hexdigest()
