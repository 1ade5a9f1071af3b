"""The syntax tree of a plan, on one page.

Nodes have the written text and its place; two are equal if the same was written, wherever that was.
"""

from collections.abc import Iterator

from attrs import field, frozen

from .source import Span


def _span() -> Span:
    return field(eq=False, repr=False)


# ---- expressions


@frozen
class Name:
    """A name, as an expression and everywhere else: of bound values, dims, axes, keys,
    functions.
    """

    name: str
    span: Span = _span()

    def __str__(self) -> str:
        return self.name


@frozen
class Number:
    """`8192`, `3e-4`, `25MiB`, `5%`: a value and the unit after it, "" for none."""

    value: int | float
    unit: str
    span: Span = _span()


@frozen
class Range:
    """`4..8`: all whole numbers from the first to the last."""

    first: Number
    last: Number
    span: Span = _span()


@frozen
class String:
    """`"corpus/*.txt"`, without its quotes and escapes."""

    value: str
    span: Span = _span()


@frozen
class List:
    """`[a, b]`."""

    items: tuple["Expr", ...]
    span: Span = _span()


@frozen
class Call:
    """`attention(q, k, v, mask=causal)`."""

    name: Name
    args: tuple["Expr", ...]
    kwargs: tuple["Setting", ...]
    span: Span = _span()


@frozen
class Negative:
    """`-value`."""

    value: "Expr"
    span: Span = _span()


@frozen
class Binary:
    """`left op right`, op one of `+ - * / @`.

    Long chains nest deep on the left: walk their `links`.
    """

    op: str
    left: "Expr"
    right: "Expr"
    span: Span = _span()

    @property
    def links(self) -> "list[Binary]":
        """The operations of the chain, the innermost first, whose left side is no operation."""
        links: list[Binary] = [self]
        while isinstance(left := links[-1].left, Binary):
            links.append(left)
        return links[::-1]


@frozen
class ParamUse:
    """A parameter declared where it is first used: `wq[hidden -> heads, head_dim]`; without
    arrow `ins` is empty.
    """

    name: Name
    ins: tuple[Name, ...]
    outs: tuple[Name, ...]
    span: Span = _span()


Expr = Name | Number | Range | String | List | Call | Negative | Binary | ParamUse


# ---- sections


@frozen
class Setting:
    """`key = value`, in a section or among the arguments of a call; `pad` is the number after
    `pad`, for a dim.

    With `every`, `key every value`.
    """

    key: Name
    value: Expr
    span: Span = _span()
    pad: "Number | None" = None
    every: bool = False


@frozen
class Rule:
    """`seq over cp as zigzag via ring`: the dims lie over the axes, outer axis first."""

    dims: tuple[Name, ...]
    axes: tuple[Name, ...]
    layout: Name | None
    via: Name | None
    span: Span = _span()


@frozen
class Section:
    """`train { … }`, `optimizer adamw { … }`: a kind, perhaps a name, and entries."""

    kind: Name
    name: Name | None
    entries: tuple["Entry", ...]
    span: Span = _span()

    @property
    def head(self) -> Span:
        """The span of kind and name, without the entries."""
        return self.kind.span.to(self.name.span) if self.name else self.kind.span


Entry = Setting | Rule | Section


# ---- the model


@frozen
class Bind:
    """`q, k = expr`."""

    names: tuple[Name, ...]
    expr: Expr
    span: Span = _span()


@frozen
class Repeat:
    """`repeat layers as i { … }`: the body once for each index of a dim, which may have a name."""

    dim: Name
    body: tuple["Statement", ...]
    span: Span = _span()
    index: Name | None = None


@frozen
class If:
    """`if i < dense { … } else { … }`: one body for the first iterations of a repeat, and one
    for the others.
    """

    index: Name
    end: Expr
    body: tuple["Statement", ...]
    others: tuple["Statement", ...]
    span: Span = _span()


@frozen
class Route:
    """`route y to experts by top(…) { … }`: the body once for each expert, of the tokens that
    are sent to it.
    """

    value: Name
    dim: Name
    by: Call
    body: tuple[Bind, ...]
    span: Span = _span()

    @property
    def binds(self) -> tuple[Bind, ...]:
        """The bindings of the route: its value, which the choice binds, and the bindings of its
        body.
        """
        return (Bind((self.value,), self.by, self.span), *self.body)


Statement = Bind | Repeat | If | Route


@frozen
class Init:
    """`init wo ~ normal(0.01)`: how parameters begin; without names, all that have no other
    rule.
    """

    names: tuple[Name, ...]
    dist: Name | Call
    span: Span = _span()


@frozen
class Input:
    """`tokens[batch, seq]`: an input of the model."""

    name: Name
    dims: tuple[Name, ...]
    span: Span = _span()


@frozen
class Model:
    """`model llama(tokens[batch, seq], …) { … }`: sections `dims` and `const`, inits and
    statements, as written.

    `sees` has the words that say what a loss may depend on beside its own document's tokens up to
    its own.
    """

    name: Name
    inputs: tuple[Input, ...]
    sees: tuple[str, ...]
    body: tuple[Section | Init | Statement, ...]
    span: Span = _span()


# ---- the plan


@frozen
class Use:
    """`use "models/llama.scale" { dims { … } }`: another file's items, with sections merged
    over its own.
    """

    path: String
    sections: tuple[Section, ...]
    span: Span = _span()


@frozen
class UserOperand:
    """`linear x[.., ffn]`: a tensor that a user op takes; without dims, a number."""

    name: Name
    dims: tuple[Name, ...]
    is_linear: bool
    span: Span = _span()


@frozen
class UserPositions:
    """`at = s`: a user op takes its positions along a dim by this keyword."""

    keyword: Name
    dim: Name
    span: Span = _span()


@frozen
class UserOp:
    """`op swiglu(x[.., f], y[.., f]) -> [.., f] over .., f from "my_ops:swiglu"`; dims are the op's
    own names.

    `gives` has the dims of each result.  Along the dim `causal` a position of the results depends
    on no later position.  A function that is deterministic gives the same bits each time, backward
    too.
    """

    name: Name
    operands: tuple[UserOperand, ...]
    positions: tuple[UserPositions, ...]
    gives: tuple[tuple[Name, ...], ...]
    along: tuple[Name, ...]
    causal: Name | None
    function: String
    is_deterministic: bool
    span: Span = _span()


@frozen
class Plan:
    """A file."""

    items: tuple[Use | Model | UserOp | Section, ...]
    span: Span = _span()

    def sections(self) -> Iterator[Section]:
        """The top-level sections, in order."""
        return (item for item in self.items if isinstance(item, Section))
