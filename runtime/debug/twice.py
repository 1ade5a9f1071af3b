"""`watch { copies  replay }`: compares values that should be the same: copies on ranks, state at
rest, steps that are run twice.

Ranks compare hashes by the job's store, so that no group of the plan takes part; a step that is
run twice does its own collectives twice.  Only where hashes differ do ranks exchange values, to
find the first that differs, and then the run ends.
"""

from collections import Counter
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from hashlib import blake2b
from socket import gethostname
from typing import Any, cast

import torch
from torch import Tensor, nn

from ..comm import c10d
from ..comm.mesh import Axis, Copies
from ..comm.store import job_store, meet
from ..config.plan import Metrics
from ..data.loader import Batch, Input
from ..errors import RunError
from ..state.engine import TrainState
from ..state.optimizers import Part
from .compare import Comparison

_PIECE = 1 << 24  # elements of the state that are kept at a time: `explain memory` counts them
_SHOWN = 3
"""The most differences of a rank that a message names."""

TrainStep = Callable[[nn.Module, TrainState, Batch, float], Metrics]


class CopyCheck:
    """Compares inputs, parameters, optimizer state, working copies and reduced gradients over the
    ranks that hold them.

    Also compares the state at the beginning of a step, which only one rank may hold, with the state
    before the step's update.
    """

    def __init__(
        self,
        model: nn.Module,
        state: TrainState,
        inputs: Mapping[str, Input],
        comparison: Comparison,
    ) -> None:
        self._model, self._state, self._comparison = model, state, comparison
        self._inputs = dict[str, Axis]()
        for name, layout in inputs.items():
            split = set[str]().union(*layout.split.values())
            self._inputs[name] = state.mesh.without(split)
        self._copies = [*state.copies()]
        self._by_axis: dict[Axis, list[Copies]] = {}
        self._hashes_at_begin: dict[str, Tensor] = {}

    def begin(self, batch: Batch) -> None:
        """Takes the copies and the state at the beginning of a step that is compared."""
        copies_of_inputs = list[Copies]()
        for name, axis in self._inputs.items():
            value: Tensor = getattr(batch, name)
            element = partial(_locate_in_input, name, value.shape)
            copies_of_inputs.append(Copies(value, axis, "state", "input ", element))
        self._by_axis = {}
        for copies in (*copies_of_inputs, *self._copies):
            if copies.axis.size > 1:
                self._by_axis.setdefault(copies.axis, []).append(copies)
        self._hashes_at_begin = self._at_rest()

    def _at_rest(self) -> dict[str, Tensor]:
        """Hashes of the state that only an update changes, by key."""
        counters = dict(self._state.replicated_values)
        boxes = dict[str, Tensor]()
        for box in self._state.boxes():
            if box.key not in counters and box.tensor.numel():
                boxes[box.key] = box.tensor
        return dict(zip(boxes, self._comparison.hashes([*boxes.values()]).cpu(), strict=True))

    def compare(self, step: int) -> None:
        """RunError on all ranks, with the first value that differs.

        All ranks call it before the update of the same step.
        """
        differing = [self._differs(step, axis, copies) for axis, copies in self._by_axis.items()]
        change = self._change_at_rest()
        word = ""
        if any(differing):
            word = "differ"
        elif change:
            word = "moved"
        words = meet("copies", word)
        for axis in self._by_axis:
            if axis.rank == 0:
                job_store().delete_key(_key(step, axis))
        if "differ" in words:
            differences = list[str]()
            for axis, copies in self._by_axis.items():
                differences.append(self._comparison.first_copy(copies, axis, self._model))
            _end(f"step {step}", differences)
        if [*words] != [""]:
            _end(f"step {step}", [change])

    def _change_at_rest(self) -> str:
        """Words for state that has changed since the beginning of the step; "" if none has."""
        changed = list[str]()
        for key, hashes in self._at_rest().items():
            if not torch.equal(hashes, self._hashes_at_begin[key]):
                changed.append(key)
        if not changed:
            return ""
        more = f" and {len(changed) - 1} others" if changed[1:] else ""
        return f"`{changed[0]}`{more} changed before the update, on {_who()}"

    def _differs(self, step: int, axis: Axis, copies: Sequence[Copies]) -> bool:
        """Whether this rank has other values than the rank of the axis that came first."""
        hashes = self._comparison.hashes([copy.tensor for copy in copies]).cpu()
        digest = blake2b(hashes.numpy().tobytes(), digest_size=16).hexdigest()
        return job_store().compare_set(_key(step, axis), "", digest).decode() != digest


class Replay:
    """Runs a step twice from one state, and compares loss, norm and each bucket's gradients;
    then each update.
    """

    def __init__(self, state: TrainState, train_step: TrainStep, comparison: Comparison) -> None:
        """`train_step` is the program's own, which nothing else watches."""
        self._state, self._train_step, self._comparison = state, train_step, comparison

    def step(
        self,
        number: int,
        model: nn.Module,
        batch: Batch,
        lr: float,
        run: TrainStep,
        begin: Callable[[], None],
    ) -> Metrics:
        """Runs step `number` without an update, then by `run`.

        RunError on all ranks where a bit differs.
        """
        self._state.hold.paused = True
        try:
            with c10d.hide_from_recorders():  # the step is recorded once
                first, _ = self._seen(self._train_step, model, batch, lr)
        finally:
            self._state.hold.paused = False
        begin()
        around_before, updated = self._state.around, list[str]()
        self._state.around = partial(self._twice, updated)
        try:
            second, metrics = self._seen(run, model, batch, lr)
        finally:
            self._state.around = around_before
        places, names = list[int](), list[str]()
        for place, name in enumerate(first):
            if not torch.equal(first[name], second[name]):
                places.append(place)
                names.append(name)
        differing = names[:_SHOWN] or updated[:_SHOWN]
        words = f"run twice, {_who()} has another {', '.join(differing)}" if differing else ""
        _end(f"step {number}", [words], places[0] if places else 0)
        return metrics

    def _twice(self, differing: list[str], part: Part, update: Callable[[Part], None]) -> None:
        """Updates a part, piece by piece, twice from one state, which is kept meanwhile; adds the
        updates that differ to `differing`.
        """
        names = ", ".join(" + ".join(patterns) for patterns in part.group.patterns)
        for piece in part.pieces(_PIECE):
            tensors = piece.tensors()
            before = {name: tensor.clone() for name, tensor in tensors.items()}
            update(piece)
            first = self._comparison.hashes([*tensors.values()])
            for name, tensor in tensors.items():
                tensor.copy_(before[name])
            update(piece)
            are_equal = (self._comparison.hashes([*tensors.values()]) == first).all(-1)
            for name, is_equal in zip(tensors, are_equal, strict=True):
                if not is_equal:
                    differing.append(f"update of {name} in {names}")

    def _seen(
        self, run: TrainStep, model: nn.Module, batch: Batch, lr: float
    ) -> tuple[Mapping[str, Tensor], Metrics]:
        """Runs a step: the hashes of its values by name, in the order of their making, and its
        metrics.
        """
        hashes, calls = dict[str, Tensor](), Counter[str]()

        def result(name: str, output: Any) -> None:
            calls[name] += 1
            several = isinstance(output, tuple)
            outputs = cast("tuple[Any, ...]", output) if several else (output,)
            tensors = [value for value in outputs if isinstance(value, Tensor)]
            if tensors:
                hashes[f"result of {name} in call {calls[name]}"] = self._comparison.hashes(tensors)

        def look() -> None:
            for name, flat in self._state.gradients().items():
                buffers = cast("list[Tensor]", flat) if isinstance(flat, list) else [flat]
                hashes[f"gradient of bucket `{name}`"] = self._comparison.hashes(buffers)

        self._state.looks.append(look)
        try:
            with telling(model, result):
                metrics = run(model, self._state, batch, lr)
        finally:
            self._state.looks.remove(look)
        for name, value in {"loss": metrics.loss, "gradient norm": metrics.norm}.items():
            if value is not None:
                hashes[name] = self._comparison.hashes([value])
        return hashes, metrics


@contextmanager
def telling(model: nn.Module, result: Callable[[str, Any], None]) -> Generator[None]:
    """While entered, calls `result` with the name and the result of each call of a module.

    Where torch.compile has made a graph of a module, it is called with the graph's result, and with
    none from within the graph: a hook there would have torch make the graph anew, with the hook in
    it, for each such step.
    """
    modules: dict[str, Any] = dict([*cast(Any, model).named_modules()][1:])
    graphs = dict[str, Any]()
    for name, module in modules.items():
        if module._compiled_call_impl is not None:
            graphs[name] = module
    within_graphs = tuple(f"{name}." for name in graphs)
    with ExitStack() as cleanup:
        for name, module in modules.items():
            if name in graphs or name.startswith(within_graphs):
                continue

            def hook(*call: Any, name: str = name) -> None:
                result(name, call[-1])

            cleanup.callback(module.register_forward_hook(hook).remove)
        for name, module in graphs.items():
            graph = module._compiled_call_impl
            cleanup.callback(setattr, module, "_compiled_call_impl", graph)
            module._compiled_call_impl = partial(_run, graph, result, name)
        yield


def _run(
    graph: Callable[..., Any],
    result: Callable[[str, Any], None],
    name: str,
    *arguments: Any,
    **keywords: Any,
) -> Any:
    output = graph(*arguments, **keywords)
    result(name, output)
    return output


def _end(when: str, findings: Sequence[str], place: int = 0) -> None:
    """RunError on all ranks if one of them has a finding; none where all findings are "".

    Each rank tells its first finding; the one of the least `place` comes first.
    """
    word = ""
    for finding in findings:
        if finding:
            word = f"{place:08} {finding}"
            break
    words = sorted(text for text in meet("watch", word) if text)
    if words:
        first, *others = (text.partition(" ")[2] for text in words)
        raise RunError(f"{when}: {first}", *others[:3])


def _who() -> str:
    return f"rank {c10d.place()[0]} on {gethostname()}"


def _locate_in_input(name: str, shape: Sequence[int], element: int) -> tuple[str, str]:
    """The name of an input, and the indices of its element: its microbatch, and the place in it."""
    indices = torch.unravel_index(torch.tensor(element), [*shape])
    return name, str([int(index) for index in indices])


def _key(step: int, axis: Axis) -> str:
    return f"copies/{step}/{axis.name}/{axis.ranks()[0]}"
