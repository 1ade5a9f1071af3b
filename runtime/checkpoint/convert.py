"""Converts a run's checkpoint into a folder of safetensors that torch.distributed.checkpoint reads,
and such a folder into a checkpoint.

`scalec convert` starts it, and gives the plan's description of the tensors on standard input.
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

from ..errors import RunError, count_with_noun, quote_first_names, reason
from ..state.engine import STEP
from ..state.shards import Box
from ..state.skips import LossScale
from .export import LazyTensor, find_parts, make_tensor, put_tensors
from .files import DAMAGE, Disk
from .hf_weights import HFNames, HFWeight, Places
from .index import Identity
from .reader import INDEX, Saved, folder_name
from .saver import newest, write
from .torch_folder import TorchFolder

BESIDE = "scalec.json"
"""The file beside converted tensors that holds what no tensor holds: the identity of the run."""

OTHERS = ("lr_scheduler", "dataloader", "train_state", "optimizer.param_groups.")
"""The prefixes of keys that other programs save beside parameters and optimizer state."""


@dataclass(frozen=True)
class Contents:
    """The contents of a plan's checkpoints: how a folder names and cuts each parameter, the
    parameter's shape, and its optimizer state.

    names   the names of parameters in the folder; their `dtype` is the masters' element type
    shapes  the shapes of parameters in the plan's own checkpoints, by name pattern
    slots   the names of the optimizer's values for each element of a parameter
    copies  by the name of a tensor that a folder may have in addition, the tensor that has the
            same values
    scaled  whether the plan's steps have a loss scale
    """

    names: HFNames
    shapes: Mapping[str, tuple[int, ...]]
    slots: tuple[str, ...]
    copies: Mapping[str, str]
    scaled: bool

    @cached_property
    def places(self) -> Places:
        """The tensors that hold each parameter and each value of its optimizer state, by key."""
        places = dict(self.names.places)
        for name, (tensors, stored) in self.names.places.items():
            if stored.wide:  # biases of routers, which no optimizer trains
                continue
            for slot in self.slots:
                state_tensors = tuple(_state_key(tensor, slot) for tensor in tensors)
                places[f"optimizer/{slot}/{name}"] = state_tensors, stored
        return places

    @property
    def steps(self) -> list[str]:
        """The keys of the number of updates, which torch's Adam keeps for each parameter."""
        if "exp_avg" not in self.slots:
            return []
        trained_tensors: dict[str, None] = {}  # without repeats, in order
        for tensors, stored in self.names.places.values():
            if not stored.wide:
                trained_tensors |= dict.fromkeys(tensors)
        return [_state_key(tensor, "step") for tensor in trained_tensors]

    def shape(self, key: str) -> tuple[int, ...]:
        """The shape of a parameter, or of its optimizer state."""
        return self.shapes[re.sub(r"\.\d+(?=\.)", ".*", key.rpartition("/")[2])]

    def dtype(self, key: str) -> torch.dtype:
        """The element type of a parameter or state in checkpoints."""
        _, stored = self.places[key]
        return torch.float32 if stored.wide else self.names.dtype


def _state_key(tensor: str, slot: str) -> str:
    return f"optimizer.state.{tensor}.{slot}"


def contents(text: str) -> Contents:
    """The description of a plan's tensors that `scalec convert` writes."""
    description = json.loads(text)
    names = HFNames(
        getattr(torch, description["dtype"]),
        {name: HFWeight.read(fields) for name, fields in description["weights"].items()},
        description["repeats"],
    )
    shapes = {pattern: tuple(shape) for pattern, shape in description["shapes"].items()}
    return Contents(
        names,
        shapes,
        tuple(description["slots"]),
        description["copies"],
        description["scaled"],
    )


# ---- to torch


def to_torch(saved: Saved, folder: Path, plan: Contents) -> str:
    """Writes a checkpoint of a run into the new `folder`, whole or not at all; returns a line that
    says what was written.

    RunError.
    """
    recorded = saved.tensors()
    plan_tensors = {key: tensor for key, tensor in recorded.items() if not _is_kept(key)}
    parts_by_tensor = find_parts(plan_tensors, plan.places, saved.path)
    dtypes = {key: (tensor.dtype, plan.dtype(key)) for key, tensor in plan_tensors.items()}
    _check_dtypes(dtypes, saved.path)
    tensors = dict[str, LazyTensor]()
    for tensor, parts in parts_by_tensor.items():
        tensors[tensor] = make_tensor(parts, plan.names.dtype, saved)
    for copy, original in plan.copies.items():
        tensors[copy] = tensors[original]
    for key in recorded:
        if _is_kept(key):
            tensors[key] = _make_whole_copy(key, saved, recorded)
    if STEP in recorded:
        tensors |= dict.fromkeys(plan.steps, _make_whole_copy(STEP, saved, recorded))
    if plan.scaled:  # the first scale where the run had none, as in another precision
        first_scale = dict[str, LazyTensor]()
        for key, value in LossScale(torch.device("cpu")).get_checkpoint_values():
            first_scale[key] = LazyTensor(value.nbytes, partial(Tensor.clone, value))
        tensors = first_scale | tensors
    put_tensors(folder, tensors, {BESIDE: _beside(saved.run)})
    return f"wrote {saved} to {folder}: {count_with_noun(len(tensors), 'tensor')}"


def _is_kept(key: str) -> bool:
    """Whether a key belongs to no parameter, as the number of updates and a loss scale do."""
    return key.startswith("optimizer/") and key.count("/") == 1


def _make_whole_copy(key: str, saved: Saved, recorded: Mapping[str, Tensor]) -> LazyTensor:
    return LazyTensor(recorded[key].nbytes, lambda: saved.whole([key])[key])


# ---- from torch


def from_torch(source: TorchFolder, target: Path, plan: Contents) -> str:
    """Makes the checkpoint `target`, step-NNNNNN, of a folder, whole or not at all; returns a line
    that says what was written.

    RunError.
    """
    step, source_tensors = _step_of(target), source.tensors()
    key_of = _keys(source_tensors, plan)
    _check(source, source_tensors, key_of, plan)
    checkpoint_tensors = dict[str, Tensor]()
    for key, (tensors, stored) in plan.places.items():
        keys = [key_of[tensor] for tensor in tensors]
        values = source.read(keys)
        checkpoint_tensors[key] = stored.to_parameter(
            [values[name] for name in keys], plan.shape(key)
        )
    checkpoint_tensors |= source.read([key for key in source_tensors if _is_kept(key)])
    checkpoint_tensors[STEP] = _updates(source, source_tensors, key_of, plan, step)
    boxes = dict[str, Box]()
    for key, value in checkpoint_tensors.items():
        boxes[key] = Box(key, tuple(value.shape), (0,) * value.ndim, value, is_own=True)
    target.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(prefix=f".{target.name}.", dir=target.parent) as part:
        write(Path(part), step, boxes, _run_of(source.path), Disk()).rename(target)
    return f"wrote {source.path} to {target}: {count_with_noun(len(checkpoint_tensors), 'tensor')}"


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


def _keys(folder_tensors: Mapping[str, Tensor], plan: Contents) -> dict[str, str]:
    """Each tensor's key in a folder, which may hold parameters under the prefix `model.`."""
    names = list[str]()
    for tensors, _ in plan.places.values():
        names.extend(tensors)
    key_of = dict[str, str]()
    for name in [*names, *plan.steps, *plan.copies]:
        prefixed = f"model.{name}"
        is_prefixed = name not in folder_tensors and prefixed in folder_tensors
        key_of[name] = prefixed if is_prefixed else name
    return key_of


def _check(
    folder: TorchFolder,
    folder_tensors: Mapping[str, Tensor],
    key_of: Mapping[str, str],
    plan: Contents,
) -> None:
    """RunError unless a folder has the plan's tensors, whole, and no others."""
    needed = dict[str, tuple[str, HFWeight]]()
    for key, (tensors, stored) in plan.places.items():
        for tensor in tensors:
            needed[key_of[tensor]] = key, stored
    _check_keys(folder, folder_tensors, needed, key_of, plan)
    for tensor, (_, stored) in needed.items():
        shape = tuple(folder_tensors[tensor].shape)
        if shape != stored.shape:
            raise RunError(
                f"{folder.path}: `{tensor}` is {[*shape]}, but the plan's is {[*stored.shape]}"
            )
    dtypes = dict[str, tuple[torch.dtype, torch.dtype]]()
    for tensor, (key, _) in needed.items():
        dtypes[tensor] = folder_tensors[tensor].dtype, plan.dtype(key)
    _check_dtypes(dtypes, folder.path)
    folder.check_parts([*needed])
    for copy, original in plan.copies.items():
        if key_of[copy] in folder_tensors and not torch.equal(
            *folder.read([key_of[copy], key_of[original]]).values()
        ):
            raise RunError(
                f"{folder.path}: `{copy}` differs from `{original}`, to which the plan ties it"
            )


def _check_keys(
    folder: TorchFolder,
    folder_tensors: Mapping[str, Tensor],
    needed: Mapping[str, tuple[str, HFWeight]],
    key_of: Mapping[str, str],
    plan: Contents,
) -> None:
    """RunError unless a folder has all tensors that the plan needs, and no others."""
    lacking = [tensor for tensor in needed if tensor not in folder_tensors]
    if lacking:
        weights = [tensor for tensor in lacking if not tensor.startswith("optimizer.")]
        if weights:
            how = "is --names right?"
        else:
            how = "with weights alone, `train.py --init` begins a run"
        raise RunError(
            f"{folder.path} lacks {quote_first_names(weights or lacking)}, which the plan needs:"
            f" {how}"
        )
    expected = {*needed, *(key_of[name] for name in (*plan.steps, *plan.copies))}
    others = list[str]()
    for key in folder_tensors:
        if key not in expected and not key.startswith(OTHERS) and not _is_kept(key):
            others.append(key)
    if others:
        raise RunError(f"{folder.path}: the plan does not use {quote_first_names(others)}")


def _check_dtypes(pairs: Mapping[str, tuple[torch.dtype, torch.dtype]], path: Path) -> None:
    """RunError unless the two element types of each key are equal: the folder's, the plan's."""
    for key, (dtype, wanted) in pairs.items():
        if dtype != wanted:
            raise RunError(
                f"{path}: `{key}` is {_dtype_name(dtype)}, but the plan's masters are"
                f" {_dtype_name(wanted)}: a conversion rounds nothing"
            )


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _updates(
    folder: TorchFolder,
    folder_tensors: Mapping[str, Tensor],
    key_of: Mapping[str, str],
    plan: Contents,
    step: int,
) -> Tensor:
    """The number of updates: Adam's count, else the count that a run kept, else the run's steps."""
    keys = [key_of[name] for name in plan.steps if key_of[name] in folder_tensors]
    if not keys and STEP in folder_tensors:
        keys = [STEP]
    counts = {float(value) for value in folder.read(keys).values()}
    if len(counts) > 1:
        raise RunError(
            f"{folder.path}: parameters were updated {min(counts):.0f} to {max(counts):.0f}"
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
        run = content["run"]
        if "blake2b" in content and content["blake2b"] != _hash_of_run(run):
            raise ValueError
        return {
            str(name): value
            for name, value in run.items()
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
    """Converts a checkpoint, or the newest one in a run's folder, for torch, or one of torch's
    folders into a checkpoint; `source` decides which.

    `text` describes the plan's tensors.
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
