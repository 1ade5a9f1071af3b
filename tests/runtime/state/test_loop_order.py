"""Layers that are gathered and reduced one by one: when each begins and is awaited, and what is
in memory meanwhile.
"""

import gc
import time
from dataclasses import replace
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from helpers.forked_ranks import HANGS, run_ranks
from helpers.late_process_group import Link
from helpers.layered_model import F64, LAYERS, WAYS, WIDTH, ZERO, Dtypes, Model, Way, data, shared
from scalec.runtime import AdamW, Bucket, Mesh, ParamGroup, TrainState, unshard_ahead
from scalec.runtime.debug.sanitize import Sanitizer
from scalec.runtime.errors import RunError
from scalec.runtime.state import flat_param

pytestmark = pytest.mark.usefixtures("calls_uncompared")

# ---- when what moves


def _events(way: Way, microbatches: int) -> tuple[list[str], list[str]]:
    """What is begun and waited for of the bucket with rows, by number: in forward, and in
    backward.
    """
    link = Link()
    ours = shared(way, Mesh({"dp": 2, "replica": 1}), AdamW(), F64, link.late)
    ours.state.initialise(seed=2)
    flat_params, forward = ours.begin(microbatches), 0
    for tokens, odd in data(0, 0, microbatches):
        link.events.clear()
        loss = ours.model(tokens, odd, flat_params)
        forward = len(link.events)
        loss.backward()
    events = [f"{what} {name} {number}" for what, name, number in link.events]
    ours.state.gradients()
    return events[:forward], events[forward:]


def test_weights_are_gathered_ahead_in_order_and_gradients_summed_behind() -> None:
    forward, backward = run_ranks(2, _events, ZERO[3], 1)[0]
    # Of three layers the first two are begun before the first is waited for, the third before the
    # second.
    assert forward == [
        "begin gather 0",
        "begin gather 1",
        "wait gather 0",
        "begin gather 2",
        "wait gather 1",
        "wait gather 2",
    ]
    # In backward the same from the end; behind a layer its sums begin: of the norms, alike on all
    # ranks, `sum`.
    assert [event for event in backward if "gather" in event] == [
        "begin gather 3",
        "begin gather 4",
        "wait gather 3",
        "begin gather 7",
        "wait gather 4",
        "wait gather 7",
    ]
    # A layer's is finished when the next one's begins, and the last is under way when backward
    # ends.
    assert [event for event in backward if "scatter" in event] == [
        "begin scatter 5",
        "wait scatter 5",
        "begin scatter 8",
        "wait scatter 8",
        "begin scatter 10",
    ]


@pytest.mark.parametrize("way", ZERO[1:3], ids=str)
def test_gathers_that_all_begin_together_are_awaited_by_each_turn_once(way: Way) -> None:
    forward, _ = run_ranks(2, _events, way, 1)[0]
    assert forward == ["wait gather 0", "wait gather 1", "wait gather 2"]
    assert run_ranks(2, _events, way, 2)[0][0] == []


def _together() -> list[int]:
    """The sizes of what is gathered, in order, of two buckets of the same layers."""
    link, mesh = Link(), Mesh({"dp": 2})
    model = Model(mesh, ZERO[1], shared=False)
    buckets = {
        name: Bucket(ParamGroup(f"layers.*.{name}"), per_layer=True, shard_axes=("dp",))
        for name in ("bias", "w")
    }
    buckets["rest"] = Bucket(ParamGroup("wte", "head", "layers.*.norm"))
    flat_params = TrainState(model, mesh, buckets, AdamW()).flat_params()
    unshard_ahead(link.late(mesh.axis("dp")), flat_params["layers"])
    return [late.output.numel() for late in link.under_way]


def test_buckets_that_are_gathered_together_are_turn_by_turn() -> None:
    assert run_ranks(2, _together)[0] == [6 * WIDTH, WIDTH] * LAYERS  # of 5 rows each has 3


@pytest.mark.parametrize("microbatches", [1, 3])
def test_gradients_that_are_kept_whole_are_reduced_in_the_last_microbatch(
    microbatches: int,
) -> None:
    _, backward = run_ranks(2, _events, ZERO[1], microbatches)[0]
    begun = [event.split()[1] for event in backward]
    assert begun == ["scatter", "sum"] * LAYERS  # and not waited for


def _time(way: Way, latency: float) -> tuple[float, float]:
    """The time of a forward and of its backward, where each layer computes for 1."""
    link = Link(latency)
    ours = shared(
        way, Mesh({"dp": 2, "replica": 1}), AdamW(), F64, link.late, partial(link.computes, 1.0)
    )
    ours.state.initialise(seed=2)
    loss = ours.model(*data(0, 0, 1)[0], ours.begin(1))
    forward = link.now
    loss.backward()
    return forward, link.now - forward


def test_collectives_go_on_while_turns_compute() -> None:
    """Of gathers that take no longer than a layer, only the first is seen."""
    assert run_ranks(2, _time, ZERO[3], 1.0)[0][0] == LAYERS + 1
    assert run_ranks(2, _time, replace(ZERO[3], prefetch=0), 1.0)[0][0] == 2 * LAYERS
    assert run_ranks(2, _time, ZERO[1], 1.0)[0] == (LAYERS + 1, LAYERS)


# ---- what is in memory


def get_state_memory(way: Way, dtypes: Dtypes) -> tuple[int, int, int, int]:
    """Bytes of a state, and after two steps; the most layers in memory meanwhile, of weights
    and of whole gradients.
    """
    mesh, layers, there = Mesh({"dp": 2, "replica": 1}), [0], [0]
    reserve, release = flat_param.reserve, flat_param.release

    def reserved(x: Tensor) -> None:
        there.append(there[-1] + 1)
        reserve(x)

    def released(x: Tensor) -> None:
        there.append(there[-1] - (x.untyped_storage().nbytes() > 0))
        release(x)

    def computes() -> None:
        layers.append(_layers(dtypes[1]) - (there[-1] if dtypes[0] == dtypes[1] else 0))

    gc.collect()
    gc.freeze()  # what follows is all that is looked at
    ours = shared(way, mesh, AdamW(), dtypes, computes=computes)
    ours.state.initialise(seed=2)
    state, at_first = sum(_storages()), _layers(dtypes[1])
    flat_param.reserve, flat_param.release = reserved, released
    for step in range(2):
        ours.train_step(data(step, dist.get_rank(), 2))
    return state, _settled(state), max(there), max(layers) - at_first


def _settled(expected: int) -> int:
    """The bytes of all memory, once gloo's threads let go of what they communicated last: soon
    after it is there.
    """
    deadline = time.monotonic() + HANGS
    while (held := sum(_storages())) > expected and time.monotonic() < deadline:
        time.sleep(0.01)
    return held


def _storages() -> list[int]:
    """Bytes of all memory that a tensor is seen to have."""
    gc.collect()
    tensors = [each for each in gc.get_objects() if isinstance(each, Tensor)]
    return [
        *{
            each.untyped_storage()._cdata: each.untyped_storage().nbytes() for each in tensors
        }.values()
    ]


WHOLE = 5 * WIDTH + WIDTH
"""The elements of one layer that are shared out."""


def _layers(master: torch.dtype) -> int:
    """How many storages are of the size of a layer's gradient."""
    return sum(size == WHOLE * master.itemsize for size in _storages())


def _bytes(way: Way, dtype: torch.dtype, master: torch.dtype) -> int:
    """Bytes of the model's state on one of two ranks."""
    rest, norms, layers = 7 * WIDTH + 3 * WIDTH, LAYERS * WIDTH, LAYERS * WHOLE
    shards, mixed = (2 if way.scatters else 1), dtype != master
    kept = norms + rest // shards + layers // shards
    weights = norms + rest + (0 if way.reshard_after_forward else layers)
    gradients = norms + rest + (layers // 2 if way.shard_gradients else layers)
    part = (
        layers // 2 if way.reshard_after_forward else 0
    )  # in which gathers begin; masters too, where element types agree
    counts = 4 + 8  # of steps, and of those held
    return (
        (weights + part) * dtype.itemsize
        + (gradients + (2 + mixed) * kept) * master.itemsize
        + counts
    )


@pytest.mark.sample(5)
@pytest.mark.parametrize("dtypes", [F64, (torch.bfloat16, torch.float32)], ids=str)
@pytest.mark.parametrize("way", WAYS, ids=str)
def test_what_a_rank_keeps_is_what_was_said(way: Way, dtypes: Dtypes) -> None:
    for state, after, weights, gradients in run_ranks(2, get_state_memory, way, dtypes):
        assert state == after == _bytes(way, *dtypes)
        assert weights == (1 + way.prefetch if way.reshard_after_forward else 0)
        assert gradients == (1 if way.shard_gradients else 0)  # under way, when a layer begins


# ---- sanitized runs


def get_sanitizer_message(way: Way) -> str:
    """What a sanitized run says of gathered weights that rank 1 has otherwise."""
    wait = flat_param.FlatParam.wait_for_unshard

    def odd(self: flat_param.FlatParam) -> None:
        if self._gather:
            self._gather[0].wait()
            self.buffers.unsharded[3] += dist.get_rank()
        wait(self)

    flat_param.FlatParam.wait_for_unshard = odd
    mesh = Mesh({"dp": 2, "replica": 1}, watch=Sanitizer(torch.device("cpu")))
    ours = shared(way, mesh, AdamW(), F64)
    ours.state.initialise(seed=2)
    try:
        ours.eval_step(data(0, 0, 1)[0][0])
    except RunError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("way", ZERO[1:], ids=str)
def test_gathered_weights_are_compared_and_the_line_of_the_program_is_named(way: Way) -> None:
    for message in run_ranks(2, get_sanitizer_message, way):
        assert "not the same over dp" in message
        assert "layered_model.py:" in message
