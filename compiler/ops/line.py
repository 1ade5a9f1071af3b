"""How a program writes an op of the training step: as a statement, or within other statements.

An op of the step says it twice: `text` is what the program computes, and `value` is the same for
Python's numbers.  The emitter writes the text (`emit.step`); the read-back evaluates the text on
numbers and compares (`emit.readback.numbers`), so that each is a check of the other.
"""

from collections.abc import Callable, Mapping
from typing import Any

from attrs import Factory, frozen

from ..ir import Op, Program

Value = (
    Callable[[], Any]
    | Callable[[Any], Any]
    | Callable[[Any, Any], Any]
    | Callable[[Any, Any, Any], Any]
)
"""A function of Python's numbers: numbers and truths."""


@frozen
class Formula:
    """An expression of the program.

    text   Python, where `{name}` is the operand or the attribute of this name, and the sum of all
           operands that share the last name of an op of any number of operands
    value  the same for Python's numbers, from the operands; None where the text is a call of the
           op's own function
    """

    text: str
    value: Value | None = None


@frozen
class Line:
    """How a program writes an op of the step.

    formula        the result; of a count that updates take, whether the step's values are as they
                   should be
    target         the name that a statement gives the result, once the result is summed over ranks;
                   "" for a statement without a result; None where the formula is a part of the
                   statement that reads the result
    comment        the statement's comment
    in_evaluation  whether `eval_step` has the statement too
    metric         the metric of the step that the result is, "" for none
    conditions     of a count that updates take: the other keywords by which an update knows whether
                   it changes anything; a statement that takes them writes `{conditions}`.  An op of
                   such a count hands them on
    """

    formula: Formula
    target: str | None = None
    comment: str = ""
    in_evaluation: bool = False
    metric: str = ""
    conditions: Mapping[str, Formula] = Factory(dict[str, Formula])


LineOf = Callable[[Program, Op], Line]
