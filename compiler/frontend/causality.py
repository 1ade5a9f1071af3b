"""Mistakes of models whose losses depend on tokens that they must not see.

Non-goals: finding the ops through which they do (`analysis.causality`).
"""

from ..analysis.causality import DOCUMENTS, WORDS, Leak, find_leaks
from ..ir import SEQUENCE, Op, Program
from ..ops import OPS, roles
from ..syntax.diagnostics import Diagnostics

MESSAGES = {
    "later": "the loss of a token depends on later tokens, which it must predict",
    "document": "the loss of a token depends on other documents",
}
"""The mistake, where such a token gets in."""


PURPOSES = {
    "later": "if the model predicts hidden tokens",
    "document": "if documents shall see each other",
}
"""When a model may let such tokens in."""


def check_causality(program: Program, diagnostics: Diagnostics) -> None:
    """Each op through which a loss depends on a later token or another document is a mistake."""
    for leak in find_leaks(program):
        help = _help(program, leak)
        diagnostics.error(
            "E0224",
            f"{MESSAGES[leak.what]}: by {_name(leak.op)}",
            leak.op.span,
            _example(leak),
            help=help,
        )


def _name(op: Op) -> str:
    """The op as a plan writes it."""
    if op.kind == "contract":
        return f"a product that sums over {', '.join(f'`{dim}`' for dim in op.names('over'))}"
    if op.kind == "call":
        return f"`{op.get('function')}`"
    return f"`{OPS[op.kind].plan_name}`"


def _example(leak: Leak) -> str:
    """Two positions that show it."""
    token = f"token {leak.token}"
    if leak.token > leak.length // 2:
        from_end = leak.length - 1 - leak.token
        token = "the last token" if from_end == 0 else f"the last token but {from_end}"
    return (
        f"position {leak.position} depends on"
        f" {token}{' of another document' * (leak.what == 'document')}"
    )


def _help(program: Program, leak: Leak) -> str:
    """How the op could be written, or that the model looks ahead on purpose."""
    op = leak.op
    is_attention = bool(roles(op, program.types).key_seq)
    purpose = f"{PURPOSES[leak.what]}, write `{WORDS[leak.what]}` after its inputs"
    if is_attention:
        argument = "mask=causal" if leak.what == "later" else f"{DOCUMENTS}={DOCUMENTS}"
        return f"write `{argument}`; {purpose}"
    if op.kind == "call" and leak.what == "later":
        return (
            "if no position sees a later one, write `causal` and the dim before `from` in its"
            f" `op`; {purpose}"
        )
    if OPS[op.kind].permutes:
        return (
            f"`{op.kind}` is circular: positions at one end get tokens of the other end; leave"
            f" it out; {purpose}"
        )
    return f"leave `{SEQUENCE}` out of its dims; {purpose}"
