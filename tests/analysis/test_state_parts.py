"""Who writes which part of a checkpoint, by types: each element once; and the runtime's boxes
are these parts.
"""

from types import ModuleType
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers.forked_ranks import run_ranks
from helpers.oracle import harness
from helpers.oracle.plans import Case, plan_text
from helpers.programs import make_program
from scalec.compiler.emit.model_classes import model_classes
from scalec.compiler.ir import Program
from scalec.runtime import Mesh
from scalec.tools.convert.state_parts import fault, get_written_parts, shape

Parts = set[tuple[str, tuple[tuple[int, int], ...], int]]


@st.composite
def _cases(draw: st.DrawFn) -> Case:
    pp, dp, tp = (
        draw(st.sampled_from([1, 2])),
        draw(st.sampled_from([1, 2, 4])),
        draw(st.sampled_from([1, 2])),
    )
    state = (
        draw(st.sampled_from(["", "zero 1 over dp", "zero 2 over dp", "zero 3 over dp"]))
        if dp > 1
        else ""
    )
    model = draw(
        st.sampled_from(["llama", "tied", "every", "latent"] if pp == 1 else ["llama", "tied"])
    )
    return Case(
        pp=pp,
        dp=dp,
        tp=tp,
        model=model,
        layers=draw(st.sampled_from([2, 4])) if pp > 1 else 2,
        padded=draw(st.booleans()),
        state=state,
        optimizer="adamw",
        microbatches=pp,
    )


@settings(max_examples=8)
@given(_cases())
def test_each_element_is_written_once(case: Case) -> None:
    program = make_program(plan_text(case))
    found = get_written_parts(program)
    assert {name for name, _ in found} == {param.name for param in program.params_and_buffers}
    for (name, _), parts in found.items():
        assert not fault(shape(program, name), [part for part, _ in parts])


def test_a_part_too_many_or_too_few_is_told() -> None:
    whole = [(range(2), range(4)), (range(2, 3), range(4))]
    assert not fault((3, 4), whole)
    assert fault((3, 4), whole[:1]) == "the parts have more or fewer elements than the tensor"
    assert fault((3, 4), [whole[0], (range(1, 2), range(4))]) == "two parts overlap"
    assert fault((3, 4), [whole[0], (range(3, 4), range(4))]) == "a part lies outside of the tensor"


CASES = [
    Case(dp=2, tp=2, state="zero 3 over dp", optimizer="adamw", model="tied", padded=True),
    Case(
        pp=2,
        dp=2,
        experts="dp",
        state="zero 1 over dp",
        schedule="zbv",
        model="biased softmax",
        layers=4,
        microbatches=2,
    ),
    Case(dp=4, state="zero 1 over dp", optimizer="groups"),
    Case(pp=2, tp=2, model="tied", microbatches=2, schedule="1f1b"),
    Case(dp=2, ep=2, model="biased", experts="ep", state="zero 3 over dp, ep"),
]


@pytest.mark.parametrize(
    "case",
    [CASES[0], CASES[1], *(pytest.param(case, marks=pytest.mark.long) for case in CASES[2:])],
    ids=str,
)
def test_ranks_write_these_parts(case: Case, tmp_path: Any) -> None:
    module = harness.load_case(case, tmp_path)
    of_ranks = run_ranks(case.ranks, _own, module)
    ours = {(key, extent, rank) for rank, own in enumerate(of_ranks) for key, extent in own}
    assert _named(make_program(plan_text(case))) == ours


def _own(module: ModuleType) -> list[tuple[str, tuple[tuple[int, int], ...]]]:
    _, state = module.build(Mesh(module.PLAN.mesh))
    boxes = [
        box
        for box in state.boxes()
        if box.is_own and box.tensor.numel() and not box.key.startswith("optimizer/")
    ]
    return [
        (
            box.key,
            tuple((at, at + size) for at, size in zip(box.offset, box.tensor.shape, strict=True)),
        )
        for box in boxes
    ]


def _named(program: Program) -> Parts:
    """The parts by the names of the program's state."""
    patterns = model_classes(program).patterns
    named: Parts = set()
    for (name, layer), parts in get_written_parts(program).items():
        assert patterns[name].count("*") <= 1
        key = patterns[name].replace("*", str(layer))
        named |= {
            (key, tuple((each.start, each.stop) for each in extent), rank) for extent, rank in parts
        }
    return named
