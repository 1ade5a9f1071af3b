"""The identity of a run's samples and model, stored in checkpoints: a resumed run must have the
same.

Mesh, microbatch, precision and kernels may change: each sample is still seen once.  So may the
learning rate, its schedule and the number of steps, which are stored to be told.
"""

import json
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from hashlib import blake2b
from pathlib import Path
from typing import Any

from ..checkpoint.agreement import of_node
from ..checkpoint.index import PADDED_ROWS, Identity
from ..config.plan import Plan
from ..data.mixture import Mixture
from ..errors import counted

_ENDS = 1 << 16  # bytes at a file's beginning and at its end that it is known by
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
    """The identity of a run with this seed on this data, of which `content` has made the hashes."""
    data = plan.data
    return {
        "seed": seed,
        **_sets(training, hashes),
        "global_batch": plan.global_batch,
        "seq": plan.seq,
        "dtype": str(data.dtype).removeprefix("torch."),
        "separator": data.separator,
        "masked": data.masked,
        "mask_token": data.mask_token,
        **({"model": plan.model} if plan.model else {}),
        **({"unpadded": plan.unpadded} if plan.unpadded else {}),
        **({PADDED_ROWS: json.dumps({**plan.padded_rows})} if plan.padded_rows else {}),
    }


def _sets(training: Mixture, hashes: Sequence[str]) -> Identity:
    """The files of all sets and, if they have names, how often one of each is dealt out."""
    data = list[str]()
    for part, each in zip(training.parts, hashes, strict=True):
        files, size = part.stream.files, sum(map(os.path.getsize, part.stream.files))
        known = f"{counted(len(files), 'file')} of {counted(size, 'byte')}, {each}"
        if part.stream.is_split:
            known += f", the first {counted(part.stream.windows, 'sequence')}"
        data.append(f"{part.name}: {known}" if part.name else known)
    weights = " ".join(f"{part.name} {part.weight:g}" for part in training.parts if part.name)
    return {"data": "; ".join(data), **({"weights": weights} if weights else {})}


def optimizer(program: Path) -> Identity:
    """The optimizer's settings but for its learning rate, as plan.json beside the program has
    them; none without it.
    """
    with suppress(OSError, ValueError, LookupError, TypeError, AttributeError):
        said = json.loads(program.with_name("plan.json").read_bytes())["settings"]["train"][
            "optimizer"
        ]
        groups = "; ".join(_group(each) for each in said["groups"]) or "none"
        names = ("betas", "eps", "momentum", "weight_decay", "clip")
        return {
            "optimizer": said["kind"],
            **{name: f"{said[name]}" for name in names},
            "groups": groups,
        }
    return {}


def _group(said: Mapping[str, Any]) -> str:
    """For instance `norms (*norm*) with weight_decay 0.0, lr_scale 1.0`."""
    decay, scale = said["weight_decay"], said["lr_scale"]
    return (
        f"{said['name']} ({', '.join(said['params'])}) with weight_decay {decay}, lr_scale {scale}"
    )


def rate(plan: Plan, lr: float, steps: int) -> Identity:
    """The settings of the learning rate, which a run that goes on may change, and says so."""
    return dict(zip(_RATE, (lr, steps, f"{plan.schedule}"), strict=True))


def other_rate(then: Identity, now: Identity, step: int, lr: float) -> list[str]:
    """A line where settings of the learning rate differ from what they were; `lr` is that of
    the step after `step`.
    """
    changed = [
        f"{name} was {then[name]}, now {now[name]}"
        for name in _RATE
        if then.get(name, now[name]) != now[name]
    ]
    return (
        [f"learning rate: {', '.join(changed)}; step {step + 1} takes {lr:.2e}"] if changed else []
    )


def differences(then: Identity, now: Identity, step: int) -> list[str]:
    """A line for each setting that differs from what it was, of those that both have, for a run
    that goes on.
    """
    return [
        f"{name} was {then[name]}, now {now[name]}: {_meaning(name, then, now, step)}"
        for name in now
        if name in then
        and name not in _UNCOMPARED
        and then[name] != now[name]
        and not _is_padding(name, then, now)
    ]


def _is_padding(name: str, then: Identity, now: Identity) -> bool:
    """Whether models differ in their padding alone, which another mesh may need."""
    return name == "model" and then.get("unpadded", then["model"]) == now.get(
        "unpadded", now["model"]
    )


def _meaning(name: str, then: Identity, now: Identity, step: int) -> str:
    if name == "global_batch":
        first, was = (step * int(each[name] or 0) for each in (now, then))
        missed = (
            f"{first - was:,} are skipped" if first > was else f"{was - first:,} are seen twice"
        )
        return f"step {step + 1} begins with sample {first:,}, not {was:,}: {missed}"
    return _MEANING[name]


def content(training: Mixture) -> list[str]:
    """A hash of the files of each set: of both ends of each, wherever they lie.  One rank of a node
    reads them.

    Collective.  RunError.
    """
    return of_node(lambda: " ".join(_ends(part.stream.files) for part in training.parts)).split()


def _ends(files: Sequence[str]) -> str:
    digest = blake2b(digest_size=6)
    for path in files:
        size = os.path.getsize(path)
        with open(path, "rb") as file:
            digest.update(size.to_bytes(8, "big") + file.read(_ENDS))
            file.seek(max(0, size - _ENDS))
            digest.update(file.read(_ENDS))
    return digest.hexdigest()
