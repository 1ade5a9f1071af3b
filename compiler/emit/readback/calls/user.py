"""Reads calls of a plan's own functions."""

import ast

from ....analysis.certificate import trusted
from ....ir import Program, walk
from ..ast_matching import keywords, number, wrong
from ..expressions import Expressions, Reader
from ..values import Seen


def readers(program: Program) -> dict[str, Reader]:
    """The functions that `program` calls, each as it is written: `module.function`."""
    return {function.replace(":", "."): _reader(function) for function in trusted(program)}


def _reader(function: str) -> Reader:
    return lambda e, call: _read(e, call, function)


def _read(e: Expressions, call: ast.Call, function: str) -> Seen:
    """A function of the user's own, of tensors and then numbers; the IR knows what else was said of it."""
    keywords(call)
    numbers = [number(node) for node in call.args]
    count = numbers.count(None)
    operands = e.operands(ast.Call(call.func, call.args[:count], []), count)
    names, given = [operand.name for operand in operands], tuple(map(repr, numbers[count:]))
    for op in walk(e.program.region.body):
        alike = op.kind == "call" and (op.get("function"), op.get("constants")) == (function, given)
        if alike and e.ops.has("call", names, dict(op.attrs)):
            results = e.take(call, "call", operands, dict(op.attrs))
            return results[0] if len(results) == 1 else results
    raise wrong(call, f"the IR has no call of {function} of {', '.join(names)} here that is not done yet")
