"""Converts a checkpoint of a run into safetensors that torch.distributed.checkpoint reads, and such
a folder into one.

Started by `scalec convert`, which gives the plan's description of the tensors on standard input.
One process does it, on any machine: no mesh, no GPU.  Optimizer state has the keys of torch's
flattened state: `optimizer.state.NAME.exp_avg`.
"""

import json
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from hashlib import blake2b
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor

from ..errors import RunError, counted, named, reason
from ..state.engine import STEP
from ..state.shards import Box
from ..state.skips import LossScale
from .export import Made, held_in, made, put_tensors
from .files import DAMAGE, Disk
from .hf_weights import HFNames, HFWeight, Places
from .index import Identity
from .reader import INDEX, Saved, folder_name
from .saver import newest, write
from .torch_folder import TorchFolder

BESIDE = "scalec.json"
"""The file beside converted tensors that has what no tensor has: the identity of the run."""

OTHERS = ("lr_scheduler", "dataloader", "train_state", "optimizer.param_groups.")
"""Beginnings of keys of what other programs save beside parameters and optimizer state."""


@dataclass(frozen=True)
class Contents:
    """A plan's checkpoints: how a folder names and cuts each parameter, its shape, and its
    optimizer state.

    names   of parameters in the folder; their `dtype` is that of masters
    shapes  of parameters in the plan's own checkpoints, by name pattern
    slots   the optimizer's state of each element of a parameter
    copies  tensors that a folder may have beside others of the same values: these, by the copy's
            name
    scaled  whether the plan's steps have a loss scale
    """

    names: HFNames
    shapes: Mapping[str, tuple[int, ...]]
    slots: tuple[str, ...]
    copies: Mapping[str, str]
    scaled: bool

    @cached_property
    def places(self) -> Places:
        """The tensors that hold each parameter, and its optimizer state by its key."""
        params = self.names.places
        state = {
            f"optimizer/{slot}/{name}": (
                tuple(_state_key(tensor, slot) for tensor in tensors),
                stored,
            )
            for name, (tensors, stored) in params.items()
            if not stored.wide
            for slot in self.slots
        }
        return {**params, **state}

    @property
    def steps(self) -> list[str]:
        """The keys of the number of updates, which torch's Adam keeps for each parameter."""
        trained = {
            tensor: None
            for tensors, stored in self.names.places.values()
            if not stored.wide
            for tensor in tensors
        }
        return [_state_key(tensor, "step") for tensor in trained] if "exp_avg" in self.slots else []

    def shape(self, key: str) -> tuple[int, ...]:
        """The shape of a parameter, or of its optimizer state."""
        return self.shapes[re.sub(r"\.\d+(?=\.)", ".*", key.rpartition("/")[2])]

    def dtype(self, key: str) -> torch.dtype:
        """The element type of a parameter or state in checkpoints."""
        return torch.float32 if self.places[key][1].wide else self.names.dtype


def _state_key(tensor: str, slot: str) -> str:
    return f"optimizer.state.{tensor}.{slot}"


def contents(text: str) -> Contents:
    """The description of a plan's tensors that `scalec convert` writes."""
    said = json.loads(text)
    names = HFNames(
        getattr(torch, said["dtype"]),
        {k: HFWeight.read(v) for k, v in said["weights"].items()},
        said["repeats"],
    )
    shapes = {pattern: tuple(shape) for pattern, shape in said["shapes"].items()}
    return Contents(names, shapes, tuple(said["slots"]), said["copies"], said["scaled"])


# ---- to torch


def to_torch(saved: Saved, folder: Path, plan: Contents) -> str:
    """Writes a checkpoint of a run into the new `folder`, whole or not at all; what it has.

    RunError.
    """
    recorded = saved.tensors()
    own = {key: like for key, like in recorded.items() if not _is_kept(key)}
    held = held_in(own, plan.places, saved.path)
    _check_dtypes({key: (like.dtype, plan.dtype(key)) for key, like in own.items()}, saved.path)
    tensors = {tensor: made(parts, plan.names.dtype, saved) for tensor, parts in held.items()}
    tensors |= {copy: tensors[of] for copy, of in plan.copies.items()}
    tensors |= {key: _kept(key, saved, recorded) for key in recorded if _is_kept(key)}
    if STEP in recorded:
        tensors |= dict.fromkeys(plan.steps, _kept(STEP, saved, recorded))
    if plan.scaled:  # the first scale where the run had none, as in another precision
        first = LossScale(torch.device("cpu")).kept()
        tensors = {
            key: Made(value.nbytes, partial(Tensor.clone, value)) for key, value in first
        } | tensors
    put_tensors(folder, tensors, {BESIDE: _beside(saved.run)})
    return f"wrote {saved} to {folder}: {counted(len(tensors), 'tensor')}"


def _is_kept(key: str) -> bool:
    """Whether a key is of no parameter: the number of updates, a loss scale."""
    return key.startswith("optimizer/") and key.count("/") == 1


def _kept(key: str, saved: Saved, recorded: Mapping[str, Tensor]) -> Made:
    return Made(recorded[key].nbytes, lambda: saved.whole([key])[key])


# ---- from torch


def from_torch(found: TorchFolder, target: Path, plan: Contents) -> str:
    """Makes the checkpoint `target`, step-NNNNNN, of a folder, whole or not at all; what it has.

    RunError.
    """
    step, there = _step_of(target), found.tensors()
    key_of = _keys(there, plan)
    _check(found, there, key_of, plan)
    values = {
        key: found.read([key_of[tensor] for tensor in tensors])
        for key, (tensors, _) in plan.places.items()
    }
    own = {
        key: stored.of([values[key][key_of[tensor]] for tensor in tensors], plan.shape(key))
        for key, (tensors, stored) in plan.places.items()
    }
    own |= found.read([key for key in there if _is_kept(key)]) | {
        STEP: _updates(found, there, key_of, plan, step)
    }
    boxes = {key: Box(key, tuple(x.shape), (0,) * x.ndim, x, own=True) for key, x in own.items()}
    target.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(prefix=f".{target.name}.", dir=target.parent) as part:
        write(Path(part), step, boxes, _run_of(found.path), Disk()).rename(target)
    return f"wrote {found.path} to {target}: {counted(len(own), 'tensor')}"


def _step_of(target: Path) -> int:
    """The number of finished steps by the name of a new checkpoint."""
    number = re.fullmatch(r"step-(\d+)", target.name)
    if number is None or target.name != folder_name(int(number[1])):
        example = "runs/NAME/checkpoints/step-000300"
        raise RunError(
            f"{target} is to be a checkpoint: name it by the steps that are done, as in {example}"
        )
    if target.exists():
        raise RunError(f"{target} is there already: a checkpoint is never written over")
    return int(number[1])


def _keys(there: Mapping[str, Tensor], plan: Contents) -> dict[str, str]:
    """Each tensor's key in a folder, in which parameters may be the part `model`."""
    names = (tensor for tensors, _ in plan.places.values() for tensor in tensors)
    return {
        name: f"model.{name}" if name not in there and f"model.{name}" in there else name
        for name in [*names, *plan.steps, *plan.copies]
    }


def _check(
    found: TorchFolder, there: Mapping[str, Tensor], key_of: Mapping[str, str], plan: Contents
) -> None:
    """RunError unless a folder has the plan's tensors, whole, and no others."""
    needed = {
        key_of[tensor]: (key, stored)
        for key, (tensors, stored) in plan.places.items()
        for tensor in tensors
    }
    if lacking := [tensor for tensor in needed if tensor not in there]:
        weights = [tensor for tensor in lacking if not tensor.startswith("optimizer.")]
        how = (
            "is --names right?" if weights else "with weights alone, `train.py --init` begins a run"
        )
        raise RunError(
            f"{found.path} lacks {named(weights or lacking)}, which the plan needs: {how}"
        )
    known = {*needed, *(key_of[each] for each in (*plan.steps, *plan.copies))}
    others = [
        key
        for key in there
        if key not in known and not key.startswith(OTHERS) and not _is_kept(key)
    ]
    if others:
        raise RunError(f"{found.path}: the plan does not use {named(others)}")
    for tensor, (_, stored) in needed.items():
        if (shape := tuple(there[tensor].shape)) != stored.shape:
            raise RunError(
                f"{found.path}: `{tensor}` is {[*shape]}, but the plan's is {[*stored.shape]}"
            )
    _check_dtypes(
        {tensor: (there[tensor].dtype, plan.dtype(key)) for tensor, (key, _) in needed.items()},
        found.path,
    )
    found.check_parts([*needed])
    for copy, of in plan.copies.items():
        if key_of[copy] in there and not torch.equal(
            *found.read([key_of[copy], key_of[of]]).values()
        ):
            raise RunError(f"{found.path}: `{copy}` differs from `{of}`, to which the plan ties it")


def _check_dtypes(pairs: Mapping[str, tuple[torch.dtype, torch.dtype]], path: Path) -> None:
    for key, (got, wanted) in pairs.items():
        if got != wanted:
            is_, own = (str(dtype).removeprefix("torch.") for dtype in (got, wanted))
            raise RunError(
                f"{path}: `{key}` is {is_}, but the plan's masters are {own}: a conversion"
                " rounds nothing"
            )


def _updates(
    found: TorchFolder,
    there: Mapping[str, Tensor],
    key_of: Mapping[str, str],
    plan: Contents,
    step: int,
) -> Tensor:
    """The number of updates: what Adam has counted; without it, what a run kept; else its steps."""
    keys = [key for name in plan.steps if (key := key_of[name]) in there] or [
        key for key in (STEP,) if key in there
    ]
    counts = {float(value) for value in found.read(keys).values()}
    if len(counts) > 1:
        raise RunError(
            f"{found.path}: parameters were updated {min(counts):.0f} to {max(counts):.0f}"
            " times, not alike"
        )
    return torch.tensor(counts.pop() if counts else float(step))


def _beside(run: Identity) -> str:
    """The text of the file beside converted tensors: the run's identity and its hash."""
    return json.dumps({"run": {**run}, "blake2b": _hash_of_run(run)}) + "\n"


def _hash_of_run(run: Identity) -> str:
    return blake2b(json.dumps(run, sort_keys=True).encode(), digest_size=32).hexdigest()


def _run_of(path: Path) -> Identity:
    """The identity of the run whose tensors were converted, if it is there.

    Earlier versions wrote no hash.
    """
    try:
        content: Any = json.loads((path / BESIDE).read_text("utf-8"))
        said = content["run"]
        if "blake2b" in content and content["blake2b"] != _hash_of_run(said):
            raise ValueError
        return {
            str(name): value
            for name, value in said.items()
            if isinstance(value, str | int | float | None)
        }
    except FileNotFoundError:
        return {}
    except DAMAGE:
        raise RunError(
            f"{path / BESIDE} is damaged: remove it, and the run goes on without looking at"
            " its data"
        ) from None


def main(source: Path, target: Path, text: str) -> str:
    """Converts one into the other, by what `source` is: a checkpoint, a run's folder with such,
    or one of torch's.
    """
    plan, checkpoint = contents(text), newest(source / "checkpoints") or source
    if (checkpoint / INDEX).exists():
        return to_torch(Saved(checkpoint), target, plan)
    return from_torch(TorchFolder(checkpoint), target, plan)


if __name__ == "__main__":
    try:
        print(main(Path(sys.argv[1]), Path(sys.argv[2]), sys.stdin.read()))
    except (RunError, OSError) as error:
        print(f"error: {reason(error)}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)
