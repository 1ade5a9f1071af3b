"""`watch { copies  replay }`: what should be the same is compared: copies of ranks, state at rest,
                 steps run twice.

Ranks compare hashes by the job's store, in which no group of the plan takes part; a step that is
run twice does its own collectives twice.  Only where hashes differ do ranks exchange values, to
find the first, and then the run ends.
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
"""The most differences of a rank that are named."""

TrainStep = Callable[[nn.Module, TrainState, Batch, float], Metrics]


class CopyCheck:
    """Compares inputs, parameters, optimizer state, working copies and reduced gradients over the
    ranks that hold them.

    Also the state at the beginning of a step, which may be one rank's alone, with that before its
    update.
    """

    def __init__(
        self,
        model: nn.Module,
        state: TrainState,
        inputs: Mapping[str, Input],
        comparison: Comparison,
    ) -> None:
        self._model, self._state, self._comparison = model, state, comparison
        whole = {
            name: {axis for axes in it.split.values() for axis in axes}
            for name, it in inputs.items()
        }
        self._inputs = {name: state.mesh.without(split) for name, split in whole.items()}
        self._held = [*state.copies()]
        self._by_axis: dict[Axis, list[Copies]] = {}
        self._begun: dict[str, Tensor] = {}

    def begin(self, batch: Batch) -> None:
        """The beginning of a step that is compared."""
        self._by_axis = {}
        given: list[tuple[str, Tensor]] = [(name, getattr(batch, name)) for name in self._inputs]
        inputs = (
            Copies(x, self._inputs[k], "state", "input ", partial(_of_input, k, x.shape))
            for k, x in given
        )
        for each in (*inputs, *self._held):
            if each.axis.size > 1:
                self._by_axis.setdefault(each.axis, []).append(each)
        self._begun = self._at_rest()

    def _at_rest(self) -> dict[str, Tensor]:
        """Hashes of what nothing but an update changes, by key."""
        counted = dict(self._state.kept)
        boxes = {
            box.key: box.tensor
            for box in self._state.boxes()
            if box.key not in counted and box.tensor.numel()
        }
        return dict(zip(boxes, self._comparison.hashes([*boxes.values()]).cpu(), strict=True))

    def compare(self, step: int) -> None:
        """RunError on all ranks, with the first that differs.

        All ranks call it before the update of the same step.
        """
        differing = [self._differs(step, axis, copies) for axis, copies in self._by_axis.items()]
        moved = [
            key
            for key, hashes in self._at_rest().items()
            if not torch.equal(hashes, self._begun[key])
        ]
        found = meet("copies", "differ" if any(differing) else "moved" if moved else "")
        for axis in self._by_axis:
            if axis.rank == 0:
                job_store().delete_key(_key(step, axis))
        if "differ" in found:
            _end(
                f"step {step}",
                [
                    self._comparison.first_copy(copies, axis, self._model)
                    for axis, copies in self._by_axis.items()
                ],
            )
        if [*found] != [""]:
            more = f" and {len(moved) - 1} others" if moved[1:] else ""
            _end(
                f"step {step}",
                [f"`{moved[0]}`{more} changed before the update, on {_who()}" if moved else ""],
            )

    def _differs(self, step: int, axis: Axis, copies: Sequence[Copies]) -> bool:
        """Whether this rank has other values than the rank of the axis that came first."""
        hashes = self._comparison.hashes([each.tensor for each in copies]).cpu()
        own = blake2b(hashes.numpy().tobytes(), digest_size=16).hexdigest()
        return job_store().compare_set(_key(step, axis), "", own).decode() != own


class Replay:
    """Runs a step twice from one state, and compares loss, norm and each bucket's gradients;
    then each update.
    """

    def __init__(self, state: TrainState, train_step: TrainStep, comparison: Comparison) -> None:
        """`train_step` is that of the program, which nothing else watches."""
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
        """Step `number` by `run`, after the same without an update.

        RunError on all ranks where a bit differs.
        """
        self._state.held.paused = True
        try:
            with c10d.unrecorded():  # the step is recorded once
                first, _ = self._seen(self._train_step, model, batch, lr)
        finally:
            self._state.held.paused = False
        begin()
        usual, updated = self._state.around, list[str]()
        self._state.around = partial(self._twice, updated)
        try:
            second, metrics = self._seen(run, model, batch, lr)
        finally:
            self._state.around = usual
        places = [at for at, name in enumerate(first) if not torch.equal(first[name], second[name])]
        other = [[*first][at] for at in places[:_SHOWN]] or updated[:_SHOWN]
        told = f"run twice, {_who()} has another {', '.join(other)}" if other else ""
        _end(f"step {number}", [told], places[0] if places else 0)
        return metrics

    def _twice(self, found: list[str], part: Part, update: Callable[[Part], None]) -> None:
        """Updates a part, piece by piece, twice from one state, which is kept meanwhile;
        `found` gets what differs.
        """
        names = ", ".join(" + ".join(each) for each in part.group.patterns)
        for piece in part.pieces(_PIECE):
            tensors = piece.tensors()
            kept = {name: tensor.clone() for name, tensor in tensors.items()}
            update(piece)
            first = self._comparison.hashes([*tensors.values()])
            for name, tensor in tensors.items():
                tensor.copy_(kept[name])
            update(piece)
            same = (self._comparison.hashes([*tensors.values()]) == first).all(-1)
            found += [
                f"update of {name} in {names}"
                for name, alike in zip(tensors, same, strict=True)
                if not alike
            ]

    def _seen(
        self, run: TrainStep, model: nn.Module, batch: Batch, lr: float
    ) -> tuple[Mapping[str, Tensor], Metrics]:
        """Hashes by name, in the order in which they are made, and the step's metrics."""
        seen, calls = dict[str, Tensor](), Counter[str]()

        def result(name: str, made: Any) -> None:
            calls[name] += 1
            several = isinstance(made, tuple)
            values = [
                each
                for each in (cast("tuple[Any, ...]", made) if several else (made,))
                if isinstance(each, Tensor)
            ]
            if values:
                seen[f"result of {name} in call {calls[name]}"] = self._comparison.hashes(values)

        def look() -> None:
            for name, flat in self._state.gradients().items():
                flats = cast("list[Tensor]", flat) if isinstance(flat, list) else [flat]
                seen[f"gradient of bucket `{name}`"] = self._comparison.hashes(flats)

        self._state.looks.append(look)
        try:
            with telling(model, result):
                metrics = run(model, self._state, batch, lr)
        finally:
            self._state.looks.remove(look)
        values = {"loss": metrics.loss, "gradient norm": metrics.norm}
        return seen | {
            k: self._comparison.hashes([v]) for k, v in values.items() if v is not None
        }, metrics


@contextmanager
def telling(model: nn.Module, result: Callable[[str, Any], None]) -> Generator[None]:
    """Tells the results of modules; of those that torch.compile has made graphs of, the graphs',
    and none within them.

    A hook on these has torch make the graph anew, with the hook in it, for each such step.
    """
    modules: dict[str, Any] = dict([*cast(Any, model).named_modules()][1:])
    graphs = {
        name: module for name, module in modules.items() if module._compiled_call_impl is not None
    }
    within = tuple(f"{name}." for name in graphs)
    plain = {
        name: module
        for name, module in modules.items()
        if name not in graphs and not name.startswith(within)
    }
    with ExitStack() as ends:
        for name, module in plain.items():

            def hook(*call: Any, name: str = name) -> None:
                result(name, call[-1])

            ends.callback(module.register_forward_hook(hook).remove)
        for name, module in graphs.items():
            graph = module._compiled_call_impl
            ends.callback(setattr, module, "_compiled_call_impl", graph)
            module._compiled_call_impl = partial(_run, graph, result, name)
        yield


def _run(
    graph: Callable[..., Any],
    result: Callable[[str, Any], None],
    name: str,
    *given: Any,
    **named: Any,
) -> Any:
    made = graph(*given, **named)
    result(name, made)
    return made


def _end(when: str, found: Sequence[str], place: int = 0) -> None:
    """RunError on all ranks, with what the ranks say that have found something, that of the
    first place first.
    """
    own = next((f"{place:08} {each}" for each in found if each), "")
    if told := sorted(each for each in meet("watch", own) if each):
        first, *others = (each.partition(" ")[2] for each in told)
        raise RunError(f"{when}: {first}", *others[:3])


def _who() -> str:
    return f"rank {c10d.place()[0]} on {gethostname()}"


def _of_input(name: str, shape: Sequence[int], at: int) -> tuple[str, str]:
    """An element of an input: microbatch, and the place in it."""
    return name, str([int(each) for each in torch.unravel_index(torch.tensor(at), [*shape])])


def _key(step: int, axis: Axis) -> str:
    return f"copies/{step}/{axis.name}/{axis.ranks()[0]}"
