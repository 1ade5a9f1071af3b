"""The semantics of ops `vjp`: gradients of an op's operands, by a tape of what the op computes."""

from collections.abc import Mapping, Sequence

from attrs import evolve

from ...ir import Value
from ...ir.placements import dual_type
from ...ops import VJPS
from ...ops.vjp import Pulled
from ..tape import Tape
from ..tensors import RANDOM, Tensor
from .call import Call, Semantics


def vjp(c: Call, meanings: Mapping[str, Semantics]) -> list[Tensor]:
    """Gradients by the semantics of the op whose vjp it is; operands that it is not given count
    zero.
    """
    pulled = VJPS.take_apart(c.op, c.types)
    meaning, inputs = meanings[pulled.op.kind], c.args[pulled.grads :]
    call = _forward_call(c, pulled, dict(zip(pulled.read, inputs, strict=False)))
    grads, saved = c.args[: pulled.grads], inputs[len(pulled.read) :]
    if meaning.from_result:
        return [meaning.from_result(call, *grads, *saved)]
    results, gradients_or_none = pull_back(meaning, call, grads, pulled.wrt)
    gradients = list[Tensor]()
    for i, gradient in zip(pulled.wrt, gradients_or_none, strict=True):
        assert gradient, f"verify: {call.op.kind} has no gradient of operand {i}"
        gradients.append(gradient)
    if not saved:
        return gradients
    mismatch = _mismatch(call, saved[0], results[0])
    return [_disturb(call, gradient, mismatch) for gradient in gradients]


def _forward_call(c: Call, pulled: Pulled, read: Mapping[int, Tensor]) -> Call:
    """The call of the op that a vjp is of, with the results that have gradients."""
    args, outputs = list[Tensor](), list[Value]()
    for i, type in enumerate(pulled.types):
        args.append(read[i] if i in read else c.zero(type))
    for type in c.types[: pulled.grads]:
        outputs.append(Value("", dual_type(type)))
    op = evolve(pulled.op, outputs=tuple(outputs))
    return evolve(c, op=op, args=args, types=pulled.types)


def pull_back(
    meaning: Semantics, c: Call, grads: Sequence[Tensor], wrt: Sequence[int]
) -> tuple[list[Tensor], list[Tensor | None]]:
    """The results of an op, and the gradients of the operands `wrt`; None for an operand on which
    no result depends.

    `grads` are the gradients of the results that depend on numbers: of a maximum, or of ids, there
    are none.
    """
    tape, args = Tape(c.numbers), [*c.args]
    for i, type in enumerate(c.types):
        if type.differentiable:
            args[i] = tape.make_leaf(args[i])
    results = meaning.value(evolve(c, numbers=tape, args=args))
    pairs = zip(filter(tape.knows, results), grads, strict=True)
    return results, tape.gradients(pairs, [args[i] for i in wrt])


def _mismatch(c: Call, saved: Tensor, result: Tensor) -> Tensor:
    """Zero where a saved result is the op's result; else a sum of the differences, each times a
    number of its own.
    """
    n = c.numbers
    difference = n.total(result.dims, saved, n.negative(result))
    return n.product((), difference, n.function("mismatch", saved, result))


def _disturb(c: Call, gradient: Tensor, mismatch: Tensor) -> Tensor:
    """The gradient, with a random multiple of a mismatch added to each element."""
    n, array = c.numbers, gradient.array
    random = n.random((1,) * len(c.world.axes) + array.shape[gradient.lead :], "disturbed gradient")
    disturbance = n.product(gradient.dims, Tensor(gradient.dims, random, RANDOM), mismatch)
    return n.total(gradient.dims, gradient, disturbance)
