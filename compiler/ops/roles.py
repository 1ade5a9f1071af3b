"""The roles of dims: the meaning of an operand's dim to an op, whatever the plan calls it."""

from collections.abc import Callable, Sequence

from attrs import frozen

from ..ir import Op, Type


@frozen
class Roles:
    """The dims of an op by their meaning; "" where it has none of that.

    query_seq        the positions of queries; for an op that rotates by positions, these
    key_seq          the positions of the keys that queries see
    heads, kv_heads  of queries, and of the keys and values that several of these may share
    rotated          the dim whose pairs are rotated
    rows             the rows of a table, which ids count
    classes          the classes of a loss, which labels count
    routed           experts, of an op that works on them only where its tokens are whole
    """

    query_seq: str = ""
    key_seq: str = ""
    heads: str = ""
    kv_heads: str = ""
    rotated: str = ""
    rows: str = ""
    classes: str = ""
    routed: str = ""


RolesOf = Callable[[Sequence[Type], Op], Roles]


def last_is_classes(types: Sequence[Type], op: Op) -> Roles:
    """The first operand is logits."""
    return Roles(classes=types[0].dims[-1])
