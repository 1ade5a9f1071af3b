"""The identity of a run's samples and model, stored in checkpoints: a resumed run must have the same.

Mesh, microbatch, precision and kernels may change: each sample is still seen once.  So may the learning rate, its
schedule and the number of steps, which are stored to be told.
"""

import os
from collections.abc import Sequence
from hashlib import blake2b

from ..checkpoint.index import Identity
from ..config.plan import Plan
from ..data.mixture import Mixture
from ..errors import counted

_ENDS = 1 << 16  # bytes at a file's beginning and at its end that it is known by
_SKIPPED = "so some are skipped and others seen twice"
_RATE = ("lr", "steps", "schedule")
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
}


def identity(plan: Plan, seed: int, training: Mixture) -> Identity:
    """The identity of a run with this seed on this data."""
    data = plan.data
    return {
        "seed": seed,
        **_sets(training),
        "global_batch": plan.global_batch,
        "seq": plan.seq,
        "dtype": str(data.dtype).removeprefix("torch."),
        "separator": data.separator,
        "masked": data.masked,
        "mask_token": data.mask_token,
        **({"model": plan.model} if plan.model else {}),
    }


def _sets(training: Mixture) -> Identity:
    """The files of all sets and, if they have names, how often one of each is dealt out."""
    files = [(part.name, _known_by(part.stream.files)) for part in training.parts]
    weights = " ".join(f"{part.name} {part.weight:g}" for part in training.parts if part.name)
    data = "; ".join(f"{name}: {known}" if name else known for name, known in files)
    return {"data": data, **({"weights": weights} if weights else {})}


def rate(plan: Plan, lr: float, steps: int) -> Identity:
    """The settings of the learning rate, which a run that goes on may change, and says so."""
    return dict(zip(_RATE, (lr, steps, f"{plan.schedule}"), strict=True))


def other_rate(then: Identity, now: Identity, step: int, lr: float) -> list[str]:
    """A line where settings of the learning rate differ from what they were; `lr` is that of the step after `step`."""
    changed = [f"{name} was {then[name]}, now {now[name]}" for name in _RATE if then.get(name, now[name]) != now[name]]
    return [f"learning rate: {', '.join(changed)}; step {step + 1} takes {lr:.2e}"] if changed else []


def differences(then: Identity, now: Identity, step: int) -> list[str]:
    """A line for each setting that differs from what it was, of those that both have, for a run that goes on."""
    return [
        f"{name} was {then[name]}, now {now[name]}: {_meaning(name, then, now, step)}"
        for name in now
        if name in then and name not in _RATE and then[name] != now[name]
    ]


def _meaning(name: str, then: Identity, now: Identity, step: int) -> str:
    if name == "global_batch":
        first, was = (step * int(each[name] or 0) for each in (now, then))
        missed = f"{first - was:,} are skipped" if first > was else f"{was - first:,} are seen twice"
        return f"step {step + 1} begins with sample {first:,}, not {was:,}: {missed}"
    return _MEANING[name]


def _known_by(files: Sequence[str]) -> str:
    """Number, size and a hash of files in their order: of the size and both ends of each, wherever they lie."""
    digest, whole = blake2b(digest_size=6), 0
    for path in files:
        size = os.path.getsize(path)
        with open(path, "rb") as file:
            digest.update(size.to_bytes(8, "big") + file.read(_ENDS))
            file.seek(max(0, size - _ENDS))
            digest.update(file.read(_ENDS))
        whole += size
    return f"{counted(len(files), 'file')} of {counted(whole, 'byte')}, {digest.hexdigest()}"
