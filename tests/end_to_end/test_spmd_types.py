"""Emitted programs pass the type checker of others, `spmd_types`, and what is left out of them does
not.

It knows the same four placements, infers how each local op carries them, and has collectives of its
own.  Of this project it takes only the types of parameters and inputs, and the rules of
`theirs.RULED`.
"""

import re
import warnings
from collections import Counter
from collections.abc import Iterator

import pytest
import torch
from attrs import evolve

from helpers.forked_ranks import run_ranks
from helpers.omitted_coercions import planted
from helpers.oracle.plans import Case, plan_text
from helpers.programs import get_train_py
from helpers.spmd_types_check import KINDS, checking, run
from helpers.spmd_types_rules import COERCIONS, RULED, I, P, R, S, coerced, rules, spmd
from scalec import runtime
from scalec.compiler.emit.readback import check
from scalec.compiler.ir import Kind, Op, Program
from scalec.compiler.ir.placements import COERCIONS as OURS
from scalec.compiler.ir.placements import DUAL
from scalec.runtime import Mesh

# theirs: they call functions that torch renamed
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")

CASES = {
    "tp": Case(tp=2),
    "tp + SP": Case(tp=2, sp=True),
    "dp × tp": Case(dp=2, tp=2, clip=1.0),
    "dp × tp + SP": Case(dp=2, tp=2, sp=True, microbatches=2),
    "replica × dp × tp": Case(replicas=2, dp=2, tp=2),
    "kv < tp": Case(tp=4, kv=2),
    "kv < tp + SP": Case(tp=4, kv=2, sp=True),
    "regather": Case(dp=2, tp=2, sp=True, gathered="regather"),
    "whole loss": Case(dp=2, tp=2, vocab=False),
    "whole loss + SP": Case(dp=2, tp=2, sp=True, vocab=False),
    "GPT-J block": Case(dp=2, tp=2, model="parallel"),
    "tied": Case(dp=2, tp=2, sp=True, model="tied"),
    "padded": Case(dp=2, tp=2, sp=True, padded=True),
    "padded, whole loss": Case(dp=2, tp=2, padded=True, vocab=False),
    "padded, whole loss + SP": Case(dp=2, tp=2, sp=True, padded=True, vocab=False),
    "gather": Case(dp=2, cp=2, how="via gather"),
    "gather, zigzag × tp + SP": Case(cp=2, how="as zigzag via gather", tp=2, sp=True),
    "gather, regather, kv < tp": Case(
        cp=2, how="as zigzag via gather", tp=4, kv=2, gathered="regather"
    ),
    "Ulysses": Case(dp=2, uly=2),
}


@pytest.mark.sample(4)
@pytest.mark.parametrize("name", CASES)
def test_what_is_emitted_passes(name: str) -> None:
    run(*get_train_py(plan_text(CASES[name])))


# How many defects the read-back refuses and what their checker says of them.  "shapes": torch
# refuses to add tensors of other shapes before types are looked at.  "passes": `regather` as
# `all_gather`, whose types are the same.
FLAGGED = {
    "dp × tp": {"left out, types": 16, "mistaken, types": 29},
    "gather": {"left out, types": 7, "mistaken, types": 11},
    "kv < tp + SP": {
        "left out, types": 11,
        "left out, shapes": 2,
        "mistaken, types": 29,
        "mistaken, shapes": 5,
    },
    "regather": {
        "left out, types": 14,
        "left out, shapes": 2,
        "mistaken, types": 28,
        "mistaken, shapes": 7,
        "mistaken, passes": 3,
    },
    "whole loss + SP": {
        "left out, types": 9,
        "left out, shapes": 2,
        "mistaken, types": 20,
        "mistaken, shapes": 6,
    },
}


@pytest.mark.long
@pytest.mark.sample(1)
@pytest.mark.parametrize("name", FLAGGED)
def test_what_is_left_out_or_mistaken_is_flagged_by_both(name: str) -> None:
    text, program = get_train_py(plan_text(CASES[name]))
    verdicts = Counter[str]()
    for defect in planted(text):
        with pytest.raises(AssertionError):
            check(defect.text, program)
        verdict = _verdict(defect.text, program)
        assert verdict != "passes" or re.match(r"regather\(.*: as all_gather$", str(defect)), defect
        verdicts[f"{'left out' if defect.defect == 'left out' else 'mistaken'}, {verdict}"] += 1
    assert verdicts == FLAGGED[name]


SHAPES = "size of tensor a .* must match|must be a multiple of group_size"


def _verdict(text: str, program: Program) -> str:
    try:
        run(text, program)
    except spmd.SpmdTypeError:
        return "types"
    except (RuntimeError, AssertionError) as error:
        return "shapes" if re.search(SHAPES, str(error)) else str(error)
    return "passes"


def test_a_coercion_of_a_parameter_that_the_ir_lacks_is_flagged() -> None:
    text, program = get_train_py(plan_text(CASES["dp × tp + SP"]))
    programs = list(_lacking(program))
    assert len(programs) == len(program.params) + 3, "each over dp, and the norms over tp too"
    for lacking in programs:
        with pytest.raises(spmd.SpmdTypeError, match="cannot mix"):
            run(text, lacking)


def _lacking(program: Program) -> Iterator[Program]:
    """The program with one parameter left I on one axis where its use is R."""
    names = {param.name for param in program.params}
    for at, op in enumerate(program.region.body):
        if isinstance(op, Op) and op.kind == "coerce" and op.inputs[0] in names:
            used = op.outputs[0]
            for axis in used.type.axes_in(Kind.REPLICATED):
                places = tuple(place for place in used.type.places if place[0] != axis)
                less = evolve(op, outputs=(evolve(used, type=evolve(used.type, places=places)),))
                body = (*program.region.body[:at], less, *program.region.body[at + 1 :])
                yield evolve(program, region=evolve(program.region, body=body))


# Where a rule is of use: the plan, and what the checker says without it.
WITHOUT = {
    "zeros_like": ("dp × tp", "requires all operands to be Partial"),
    "attention": ("tp", "No valid sharding strategy for scaled_dot_product_attention"),
    "embedding": ("tp", "No valid sharding strategy for embedding"),
    "max_logit": ("tp", "Only sum-Partial is supported"),
    "local_softmax_stats": ("tp", "not registered for SPMD type checking"),
    "cross_entropy": ("whole loss + SP", "_StridedShard placement for flatten"),
    "sum_squares": ("tp", "_NormPartial"),
}


@pytest.mark.parametrize("function", RULED)
def test_it_does_not_follow_by_itself_what_has_a_rule(function: str) -> None:
    name, message = WITHOUT[function]
    with pytest.raises((spmd.SpmdTypeError, ValueError), match=message):
        run(*get_train_py(plan_text(CASES[name])), without=function)


def test_it_has_no_rule_for_a_product_of_heads_that_lie_on_more_ranks_than_those_of_the_other() -> (
    None
):
    with checking({"tp_0": 2, "tp_1": 2}):
        q = spmd.assert_type(
            torch.randn(3), {}, partition_spec=spmd.PartitionSpec(("tp_0", "tp_1"))
        )
        k = spmd.assert_type(torch.randn(3), {"tp_0": S(0), "tp_1": R})
        with pytest.raises(spmd.SpmdTypeError, match="sharded inconsistently"):
            rules.einsum("n,n->n", q, k)


def test_their_types_are_dual_as_our_placements_are() -> None:
    assert {KINDS[kind].backward_type() for kind in KINDS} == {I, P, R}
    assert all(KINDS[kind].backward_type() is KINDS[DUAL[kind]] for kind in KINDS)
    assert S(1).backward_type() == S(1)


def test_the_table_has_each_of_our_coercions_with_the_same_ends() -> None:
    ends = {Kind.SHARDED: S, **KINDS}
    sums = {coercion.function: pair for pair, coercion in OURS.items() if Kind.MAXIMUM not in pair}
    assert {name: (ends[a], ends[b]) for name, (a, b) in sums.items()} == {
        n: row[1:] for n, row in COERCIONS.items()
    }


def test_their_coercions_do_what_ours_do_forward_and_backward() -> None:
    run_ranks(2, _same_values)


def _same_values() -> None:
    warnings.simplefilter("ignore", FutureWarning)
    axis = Mesh({"tp": 2}).axis("tp")
    generator = torch.Generator().manual_seed(axis.rank)
    for name, (_, *ends) in COERCIONS.items():
        dims = [dim for end, dim in zip(ends, (0, 1), strict=True) if end is S]
        x = torch.randn(4, 6, generator=generator, requires_grad=True)
        ours, theirs = getattr(runtime, name)(x, axis, *dims), coerced(name, x, axis.group, *dims)
        gradient = torch.randn(ours.shape, generator=generator)
        (back,) = torch.autograd.grad(ours, x, gradient)
        (their_back,) = torch.autograd.grad(theirs, x, gradient)
        assert torch.equal(ours, theirs), name
        assert torch.equal(back, their_back), name
