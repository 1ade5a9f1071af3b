"""State that outlives a step, and values before one: rows 68, 81, 82, 84, 94, 97 to 103, 107
and 108.

State, checkpoints, data, initial values and kernels: nothing that the proof evaluates.  Each is
planted in the runtime, in one process where that shows it.
"""

import importlib.util
from collections.abc import Iterator
from dataclasses import replace
from itertools import chain
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

import scalec.runtime
from helpers.forked_ranks import run_ranks
from helpers.kernels.cases_experts_rows import order_of
from helpers.kernels.compiled import far_offsets, recorded
from helpers.late_process_group import Link
from helpers.layered_model import F64, ZERO, data, furthest, plain, shared
from helpers.oracle import harness, reference
from helpers.oracle.plans import Case
from helpers.planted_defects import Defect
from helpers.planted_runs import LR, first_step, planted, right_step, wrong_gradients
from helpers.ranks_alone import mesh_at
from helpers.small_state import made, update, whole
from scalec.runtime import AdamW, Input, Loader, Mesh, RunError, TrainState, attention
from scalec.runtime.checkpoint import saver
from scalec.runtime.data import order
from scalec.runtime.data.mixture import Mixture, Part, Stream
from scalec.runtime.data.samples import Windows
from scalec.runtime.kernels import Tile
from scalec.runtime.kernels.experts import rows as kernels
from scalec.runtime.state import bucket_memory, flat_param, grad_reduction, parameters
from scalec.runtime.state.shards import Box

# ---- checkpoints


def _saved(module: ModuleType, start: dict[str, Tensor], folder: Path, swaps: bool) -> None:
    mesh = Mesh(module.PLAN.mesh)
    _, state = module.build(mesh)
    harness.fill(state, start)
    if swaps:
        own, boxes = mesh.rank("dp"), state.boxes
        state.boxes = lambda: (_of_rank(box, 1 - own) for box in boxes())
    saver.save(folder, 1, state)


def _of_rank(box: Box, rank: int) -> Box:
    """A box of experts, as if it were another rank's."""
    if "w_" not in box.key:
        return box
    return replace(box, offset=(rank * len(box.tensor), *box.offset[1:]))


def _loaded(module: ModuleType, folder: Path) -> dict[str, Tensor]:
    _, state = module.build(Mesh({}))
    saver.load(folder / "step-000001", state)
    return {box.key: box.tensor.clone() for box in harness._boxes(state)}


@pytest.mark.parametrize("swaps", [False, True])
def test_row_68_experts_are_saved_in_another_order_than_ranks_hold_them(
    swaps: bool, tmp_path: Path
) -> None:
    """A run on another mesh resumes with other experts: no thread found.

    Parameters of two ranks, read by one.
    """
    case, alone = Case(dp=2, model="two", experts="dp"), Case(model="two")
    start = reference.initial(case.config)
    run_ranks(
        2, _saved, harness.load_case(case, tmp_path / "two"), start, tmp_path / "saved", swaps
    )
    (found,) = run_ranks(1, _loaded, harness.load_case(alone, tmp_path / "one"), tmp_path / "saved")
    differ = {
        name for name, value in start.items() if not torch.equal(found[name].view_as(value), value)
    }
    assert differ == {
        name for name in start if swaps and name.rpartition(".")[2] in ("w_gate", "w_up", "w_down")
    }


def _resumed(folder: Path, dtype: torch.dtype = torch.float32) -> bool:
    """Whether a state that is saved after three updates, and loaded by another, goes on as it
    does itself.
    """
    state, other = (made({"dp": 1}, seed, dtype=dtype) for seed in (0, 1))
    for step in range(3):
        update(state, step)
    saver.load(saver.save(folder, 3, state), other)
    for each in (state, other):
        update(each, 3)
    return all(torch.equal(value, whole(other)[key]) for key, value in whole(state).items())


def test_row_84_moments_of_the_optimizer_stay_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What had no memory yet was not filled, and a resumed run began without (KempnerForge PR #115,
    DeepSpeed#8147).  Here all that a checkpoint has must be taken, and all that a run needs must be
    there."""
    assert _resumed(tmp_path / "right")
    opened = saver._open_for_boxes

    def without(path: Path, boxes: list[Box], rows: Any) -> tuple[Any, list[Box]]:
        return opened(path, [box for box in boxes if not box.key.startswith("optimizer/")], rows)

    monkeypatch.setattr(saver, "_open_for_boxes", without)
    with pytest.raises(RunError, match=r"has `optimizer/exp_avg/norm`, .* which the plan has not"):
        _resumed(tmp_path / "wrong")


def test_row_102_masters_are_made_of_rounded_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A checkpoint had the weights of bfloat16, and each resumption lost what masters had more
    (OpenTau#185).
    """
    assert _resumed(tmp_path / "right", torch.bfloat16)
    boxes = TrainState.boxes

    def rounded(state: TrainState) -> Iterator[Box]:
        for box in boxes(state):
            yield (
                box
                if "/" in box.key
                else replace(box, tensor=box.tensor.copy_(box.tensor.bfloat16()))
            )

    save = saver.save

    def wrong_save(folder: Path, step: int, state: TrainState) -> Path:
        kept = {box.key: box.tensor.clone() for box in boxes(state)}
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(TrainState, "boxes", rounded)
            path = save(folder, step, state)
        for box in boxes(state):
            box.tensor.copy_(kept[box.key])
        return path

    monkeypatch.setattr(saver, "save", wrong_save)
    assert not _resumed(tmp_path / "wrong", torch.bfloat16)


# ---- gradients and updates


def _reduced_too_late(defect: bool) -> float:
    """How far a step of two ranks on a late network is from the plain model's."""
    if defect:

        def finish(self: Any) -> None:
            self.keep(self.shard)

        grad_reduction._Reduction.finish = finish
    ours, theirs = (
        shared(ZERO[2], Mesh({"dp": 2, "replica": 1}), AdamW(), F64, Link().late),
        plain(ZERO[2], AdamW(), F64),
    )
    for each in (ours, theirs):
        each.state.initialise(seed=2)
    batches = [data(0, rank, 2) for rank in range(2)]
    ours.train_step(batches[torch.distributed.get_rank()])
    theirs.train_step([microbatch for batch in batches for microbatch in batch])
    return furthest(ours, theirs)


def test_row_81_gradients_are_used_before_they_are_reduced() -> None:
    """Nothing waited for the stream on which they were (DeepSpeed#8061, #5545; Megatron#5222)."""
    assert max(run_ranks(2, _reduced_too_late, False)) < 1e-12
    # memory that was not received into is NaN
    assert not max(run_ranks(2, _reduced_too_late, True)) < 1e-6


def test_row_97_gradients_of_the_last_step_are_added(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They were not zeroed: no thread found."""
    case = Case()
    start, batches = reference.initial(case.config), [*harness.batches(case, 2)]
    _, right = reference.run(case.config, case.training, start, batches, LR)
    module = harness.load_case(case, tmp_path)
    _, got = harness.run(case, module, start, batches, LR)
    assert wrong_gradients(got, right) == set()
    monkeypatch.setattr(bucket_memory.Memory, "zero", lambda self: None)
    _, got = harness.run(case, module, start, batches, LR)
    assert wrong_gradients(got, right) == {*right.gradients}


def test_row_107_weights_of_other_ranks_are_those_of_the_step_before() -> None:
    """They were gathered before what is gathered was written (DeepSpeed#5059)."""
    gathered = "w_matrices.3: bf16[flat_matrices@tp]{dp: R} = coerce(w_matrices.2)"
    defect = Defect(
        "shared optimizer state",
        ir={gathered: gathered.replace("coerce", "unseen")},
        text={'    all_gather_(weights["matrices"], dp)': '    weights["matrices"]'},
    )
    assert {"loss", "gradient of wte"} <= defect.values()
    assert "does nothing" in defect.emission()


def test_row_108_the_learning_rate_follows_another_count_of_steps() -> None:
    """Schedules advanced with each microbatch, or by each process (accelerate#963,
    lightning#1476).
    """
    for old, new in (("steps=1,", "steps=2,"), ("state.update(lr,", "state.update(lr / 2,")):
        assert Defect("llama", text={old: new}).emission()


def test_row_98_what_should_not_decays(tmp_path: Path) -> None:
    """Norms were in the group of all weights (Fast-LLM PR #545, verl#5070, pytorch#101343)."""
    case = Case(optimizer="groups")
    right = right_step(case)

    def differ(module: ModuleType) -> set[str]:
        got = first_step(case, module)
        assert wrong_gradients(got, right) == set()
        return {
            name
            for name, value in right.parameters.items()
            if not torch.allclose(got.parameters[name], value)
        }

    assert differ(harness.load_case(case, tmp_path / "right")) == set()
    norms = differ(
        planted(
            case,
            tmp_path / "wrong",
            {"weight_decay=0.0, lr_scale=0.5": "weight_decay=0.3, lr_scale=0.5"},
        )
    )
    assert norms == {"layers.0.norm1", "layers.0.norm2", "layers.1.norm1", "layers.1.norm2", "norm"}


# ---- data


FILES = Windows()


def _rows(folder: Path, steps: range, patch: Any = None) -> list[list[int]]:
    """The first tokens of the rows that each of two data-parallel ranks reads."""
    path = folder / "data.bin"
    path.write_bytes(bytes(range(80)))
    stream, layout = (
        Stream([str(path)], torch.uint8, 5),
        Input(("batch", "seq"), {"batch": ("dp",)}),
    )
    inputs = {"tokens": layout, "labels": layout}
    found: list[list[int]] = []
    for rank in range(2):
        mesh: Any = mesh_at(dp=(2, rank))
        mesh.size, mesh.rank = (
            (lambda *axes: 2 if axes else 1),
            (lambda *axes, rank=rank: rank if axes else 0),
        )
        mesh.device = torch.device("cpu")
        dealt = Loader(Mixture([Part("", stream)]), FILES, inputs, mesh, 8, 2, 256, seed=0)
        found.append(
            [int(row[0]) for step in steps for part in dealt.batch(step).tokens for row in part]
        )
    return found


def test_row_99_each_rank_reads_the_same_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As many ranks did the work of one (rbyte PR #106, icefall#1616): of a step no row is on
    two ranks.
    """
    one, other = _rows(tmp_path, range(2))
    assert not {*one} & {*other}
    assert {*one} | {*other} == {*range(0, 80, 5)}
    own = Loader.samples
    monkeypatch.setattr(Loader, "samples", lambda self, step, rank: own(self, step, 0))
    one, other = _rows(tmp_path, range(2))
    assert one == other


def test_row_100_each_pass_has_the_order_of_the_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The number of the pass was not in the seed (pytorch#31771), or was forgotten on resumption
    (accelerate PR #4071): a step's rows are a function of its number alone."""
    first, second = (_rows(tmp_path, steps) for steps in (range(2), range(2, 4)))
    assert first != second
    assert sorted(chain(*first)) == sorted(chain(*second))
    monkeypatch.setattr(
        order.hashlib,
        "sha256",
        lambda text, made=order.hashlib.sha256: made(text.partition(b"/")[0]),
    )
    assert _rows(tmp_path, range(2)) == _rows(tmp_path, range(2, 4))


# ---- initial values, kernels


def test_row_101_all_layers_begin_alike(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One seed was that of every layer (netket#241)."""

    def alike() -> bool:
        begin = harness.initial(Case(), harness.load_case(Case(), tmp_path), seed=5)
        return torch.equal(begin["layers.0.wq"], begin["layers.1.wq"])

    assert not alike()

    def without(values: Tensor, spec: parameters.Spec, mesh: Mesh, seed: int, name: str) -> None:
        parameters.initialise(values, spec, mesh, seed, name.rpartition(".")[2])

    monkeypatch.setattr(flat_param, "initialise", without)
    assert alike()


def _attends(case: Case, folder: Path) -> set[str]:
    return wrong_gradients(first_step(case, harness.load_case(case, folder)), right_step(case))


def test_row_94_scores_are_scaled_by_the_width_of_values(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where values are narrower or wider than keys, and padded (TransformerEngine#2868)."""
    case = Case(model="latent")
    assert _attends(case, tmp_path / "right") == set()

    def wrong_attention(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
        return attention(q, k, v, **options, scale=v.shape[-1] ** -0.5)

    monkeypatch.setattr(scalec.runtime, "attention", wrong_attention)
    assert "layers.0.wq" in _attends(case, tmp_path / "wrong")


def test_row_103_query_heads_attend_to_other_key_heads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Heads of keys were tiled where they are repeated (onnx PR #7274, axlearn PR #842)."""
    case = Case()
    assert _attends(case, tmp_path / "right") == set()

    def wrong_attention(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
        group = q.shape[2] // k.shape[2]
        return attention(q, k.repeat(1, 1, group, 1), v.repeat(1, 1, group, 1), **options)

    monkeypatch.setattr(scalec.runtime, "attention", wrong_attention)
    assert "layers.0.wk" in _attends(case, tmp_path / "wrong")


def test_row_82_places_are_counted_in_32_bits(tmp_path: Path) -> None:
    """524,288 rows of 7,168 numbers are more than 2^31 (torchtitan#3969, #3769): read off the
    compiled kernels.
    """
    assert not _narrow(kernels)
    path = tmp_path / "narrow.py"
    path.write_text(Path(str(kernels.__file__)).read_text().replace(".to(tl.int64)", ""))
    spec = importlib.util.spec_from_file_location(f"{kernels.__package__}.narrow", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert {"dispatch_kernel", "spread_kernel"} <= _narrow(module)


def _narrow(module: ModuleType) -> set[str]:
    """The kernels of rows of experts that count in 32 bits where a tensor may have more
    elements.
    """
    order, tile = order_of(64, 8, "cpu"), {7168: Tile(rows=1, warps=4, columns=1024)}
    order.rows, order.choices = order.rows.to("meta"), order.choices.to("meta")
    x = torch.empty(64, 7168, device="meta", requires_grad=True)
    gates = torch.empty(64, 8, device="meta", requires_grad=True)
    with recorded() as launches:
        out = module.Combine(tile)(module.Dispatch(tile)(x, order), gates, order)
        out.backward(torch.empty_like(out))
    return {launch.kernel.__name__ for launch in launches if far_offsets(launch)}
