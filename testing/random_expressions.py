"""Random expressions of any shape, with every op of the language's table.

Purpose: text that is right but for what only the compiler can say.  The rules that the model is
drawn for leave whole on each rank what an op needs so.  Non-goals: statements (`random_models`).
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

from attrs import Factory, field, frozen

from ..compiler.ops import OPS, Attribute
from ..compiler.ops.pointwise import FUNCTIONS
from .random_draws import Draws

Dims = tuple[str, ...]
"""The dims of a value after `batch`, which every value has."""

STREAM, HEADED = ("seq", "hidden"), ("seq", "heads", "head_dim")
JOINED = {"wide": ("few", "rest"), "broad": ("few", "rest", "ffn")}
WIDTHS = ("hidden", "ffn", "few", "rest", *JOINED)

ALONG = [entry for entry in OPS.values() if any(each.dims == "last" for each in entry.attributes)]
"""Ops of one operand that go over one of its dims, and give as many."""

WHOLE_NUMBERS = ("1", "3", "-2")
NUMBERS = ("0.5", "3", "c", "1 / sqrt(hidden)")
SETTINGS = {
    "cap": ("2", "c * 4"),
    "eps": ("eps", "1e-3"),
    "theta": ("theta", "100"),
    "dims": ("2", "4"),
    "factor": ("4",),
    "low": ("0.5",),
    "high": ("8",),
    "original": ("16",),
    "window": ("3", "few"),
    "scale": ("0.3", "1 / sqrt(heads)"),
    "softcap": ("2",),
    "documents": ("documents",),
    "dropout": ("0.25", "1 - c"),
    "smoothing": ("0.1",),
    "z": ("0.01",),
}
"""Possible arguments of ops, by name."""

LEVELS = SUM, PRODUCT, ATOM = range(3)
"""How tightly an expression binds."""

DEPTH = 2
"""How deep expressions nest before they end in values and parameters."""


class Rules(Protocol):
    """The facts that a model must know about its plan's sharding."""

    def works(self, dims: Dims) -> set[str]:
        """The dims that an op works on, whose operands and results have these."""
        ...

    def clash(self, dims: Dims) -> bool:
        """Whether two of these, as dims of one parameter, lie over one axis."""
        ...


@frozen
class Text:
    """An expression, and how tightly it binds."""

    text: str
    level: int = ATOM

    def at(self, level: int) -> str:
        """The text where at least this level is needed."""
        return self.text if self.level >= level else f"({self.text})"


@frozen
class Scope:
    """The names in a repeat and what they are: values by dims, matrices by their dims on both
    sides.
    """

    values: list[tuple[str, Dims]] = field(factory=list[tuple[str, Dims]])
    matrices: list[tuple[str, tuple[str, Dims]]] = field(factory=list[tuple[str, tuple[str, Dims]]])


@frozen
class Expressions(Draws):
    """Draws expressions of the names in `scopes`, and of new parameters."""

    rules: Rules
    padded: bool
    scopes: list[Scope] = Factory(lambda: [Scope()])
    _numbers: Iterator[int] = Factory(lambda: iter(range(1000)))

    def _expr(self, dims: Dims, depth: int) -> Text:
        """An expression of `batch` and these dims."""
        if depth <= 0 or self._maybe(5):
            return self._leaf(dims)
        return self._one(list(self._makers(dims)))(dims, depth - 1)

    def _makers(self, dims: Dims) -> Iterator[Callable[[Dims, int], Text]]:
        """The kinds of expressions that have such dims."""
        yield from (
            self._function,
            self._with_number,
            self._sum,
            self._product,
            self._quotient,
            self._reduced,
        )
        yield self._dropped
        if dims:
            yield self._normed
        if any(dim not in self.rules.works(("batch", *dims)) for dim in dims):
            yield self._along
        if dims[:1] == ("seq",) and dims[1:]:
            yield self._product_with_matrix
            yield from [self._rotated] * self._turns(dims)
        if (
            len(dims) == 2
            and dims[0] == "seq"
            and dims[1] != "vocab"
            and not self.rules.clash(("vocab", dims[1]))
        ):
            yield self._looked_up
        if dims[-1:] and self._joins(dims):
            yield from [self._joined] * 3
        if dims == HEADED and self._turns(("kv_heads", *HEADED)):
            yield from [self._attention] * 4

    def _turns(self, dims: Dims) -> bool:
        """Whether rope and attention may take such dims: each rank has the sequence and the
        last of them whole.
        """
        return not {"seq", *dims[-1:]} & self.rules.works(("batch", *dims))

    def _joins(self, dims: Dims) -> bool:
        joined = (dims[-1], *JOINED.get(dims[-1], ()))
        return dims[-1] in JOINED and not {*joined} & self.rules.works(
            ("batch", *dims[:-1], *joined)
        )

    def _leaf(self, dims: Dims) -> Text:
        """A value of these dims, or the least that makes one."""
        known = [name for scope in self.scopes for name, of in scope.values if of == dims]
        if known and not self._maybe(4):
            return Text(self._one(known))
        if dims[:1] == ("seq",) and dims[1:]:
            return self._matrix_product(STREAM, dims, "x")
        over = [dim for dim in STREAM if dim not in dims]
        if all(dim in STREAM for dim in dims):
            return Text(f"{self._one(['mean', 'sum'])}(x, over=[{', '.join(over)}])")
        return Text(f"mean({self._matrix_product(STREAM, ('seq', *dims), 'x').text}, over=seq)")

    def _function(self, dims: Dims, depth: int, of: str = "") -> Text:
        entry = self._one(FUNCTIONS)
        settings = self._settings_of(entry.attributes)
        x = of or self._expr(dims, depth).text
        # or all is infinite
        return Text(f"exp(tanh({x}))" if entry.name == "exp" else f"{entry.name}({x}{settings})")

    def _dropped(self, dims: Dims, depth: int) -> Text:
        return Text(f"dropout({self._expr(dims, depth).text}, {self._one(SETTINGS['dropout'])})")

    def _with_number(self, dims: Dims, depth: int) -> Text:
        x, number = self._expr(dims, depth), self._one(NUMBERS)
        return self._one(
            [
                Text(f"{x.at(PRODUCT)} * ({number})", PRODUCT),
                Text(f"{x.at(PRODUCT)} / ({number})", PRODUCT),
                Text(f"({number}) * {x.at(ATOM)}", PRODUCT),
                Text(f"{x.at(SUM)} - {number}", SUM),
                Text(f"{number} - {x.at(PRODUCT)}", SUM),
                Text(f"{number} + {x.at(PRODUCT)}", SUM),
                Text(f"(-{x.at(ATOM)})"),
            ]
        )

    def _sum(self, dims: Dims, depth: int) -> Text:
        left, right = self._two(dims, depth)
        return self._added(left, self._one("++-"), right)

    def _added(self, left: Text, sign: str, right: Text) -> Text:
        """Both with the sign between them; but never a value less itself, behind which no
        parameter matters.
        """
        return Text(f"{left.at(SUM)} {'+' if left == right else sign} {right.at(PRODUCT)}", SUM)

    def _product(self, dims: Dims, depth: int) -> Text:
        left, right = self._two(dims, depth)
        return Text(f"{left.at(PRODUCT)} * {right.at(ATOM)}", PRODUCT)

    def _two(self, dims: Dims, depth: int) -> Sequence[Text]:
        """Two operands, one with these dims, made in the order in which they are written."""
        return [make(dims, depth) for make in self._permuted([self._expr, self._narrower])]

    def _quotient(self, dims: Dims, depth: int) -> Text:
        """The divisor is one that is never near zero."""
        above = self._expr(dims, depth).at(PRODUCT)
        return Text(f"{above} / (2 + tanh({self._narrower(dims, depth).text}))", PRODUCT)

    def _narrower(self, dims: Dims, depth: int) -> Text:
        """Something that may be added to these dims: of the same, of some of them, or a
        parameter of the last.
        """
        if dims and self._maybe(3):
            some = dims[self._some(0, len(dims) - 1) :]
            return (
                Text(f"{self._name('b')}[{', '.join(some)}]")
                if not self.rules.clash(some)
                else self._leaf(dims)
            )
        if dims == STREAM and self._maybe():
            return self._expr(self._one([("seq",), ("hidden",), ()]), depth)
        return self._expr(dims, depth)

    def _reduced(self, dims: Dims, depth: int) -> Text:
        """A sum or a mean of something with more dims."""
        wider: dict[Dims, list[Dims]] = {
            ("seq",): [STREAM, HEADED],
            ("hidden",): [STREAM],
            (): [STREAM, HEADED, ("seq",)],
        }
        if dims not in wider:
            return self._expr(dims, depth)
        source = self._one(wider[dims])
        over = self._permuted([dim for dim in source if dim not in dims])
        named = f"[{', '.join(over)}]" if len(over) > 1 else over[0]
        return Text(f"{self._one(['mean', 'sum'])}({self._expr(source, depth).text}, over={named})")

    def _normed(self, dims: Dims, depth: int) -> Text:
        return self._norm(self._expr(dims, depth), dims)

    def _norm(self, x: Text, dims: Dims) -> Text:
        """Over the last dim or dims."""
        last = dims[-1:] if len(dims) < 3 or self._maybe() else dims[-2:]
        weight, bias = (f"{self._name('norm')}[{', '.join(last)}]" for _ in range(2))
        return Text(
            self._one(
                [
                    f"rmsnorm({x.text}, {weight}, eps)",
                    f"layernorm({x.text}, {weight}, eps=1e-3)",
                    f"layernorm({x.text}, {weight}, {bias}, eps)",
                ]
            )
        )

    def _along(self, dims: Dims, depth: int) -> Text:
        whole = [dim for dim in dims if dim not in self.rules.works(("batch", *dims))]
        entry, over = self._one(ALONG), self._one(whole)
        settings = self._settings_of([each for each in entry.attributes if not each.dims])
        named = "" if over == dims[-1] and self._maybe() else f", over={over}"
        return Text(f"{entry.name}({self._expr(dims, depth).text}{settings}{named})")

    def _product_with_matrix(self, dims: Dims, depth: int) -> Text:
        widths = [(dim,) for dim in WIDTHS if dims[1:] != (dim,)] + [HEADED[1:]] * (dims != HEADED)
        if not self.padded:
            widths.append(("vocab",))
        source = self._one(widths)
        return self._matrix_product(
            ("seq", *source), dims, self._expr(("seq", *source), depth).at(PRODUCT)
        )

    def _matrix_product(self, source: Dims, dims: Dims, value: str) -> Text:
        """`value` times a matrix: a new one, or one that has been declared, and is so tied."""
        inner, outer = source[1:], dims[1:]
        # no matrix has a dim twice, or two over an axis
        if {*inner} & {*outer} or self.rules.clash((*inner, *outer)):
            by = ("seq", next(dim for dim in ("few", "rest") if dim not in (*inner, *outer)))
            return self._matrix_product(by, dims, self._matrix_product(source, by, value).text)
        key = (" ".join(inner), outer)
        known = [name for scope in self.scopes for name, of in scope.matrices if of == key]
        if known and self._maybe(3):
            return Text(f"{value} @ {self._one(known)}", PRODUCT)
        name = self._name("w")
        self.scopes[-1].matrices.append((name, key))
        return Text(f"{value} @ {name}[{', '.join(inner)} -> {', '.join(outer)}]", PRODUCT)

    def _rotated(self, dims: Dims, depth: int) -> Text:
        """The op's own dims and scaling of angles, in all their settings."""
        by_turns = self._settings("factor", "low", "high", "original")
        scaling = self._one(
            [
                "",
                ", scaling=linear, factor=4",
                f", scaling={self._one(['llama3', 'yarn'])}{by_turns}",
            ]
        )
        return Text(f"rope({self._expr(dims, depth).text}, theta{self._settings('dims')}{scaling})")

    def _looked_up(self, dims: Dims, depth: int) -> Text:
        return Text(f"embedding(tokens, {self._name('t')}[vocab, {dims[1]}])")

    def _joined(self, dims: Dims, depth: int) -> Text:
        first, *others = JOINED[dims[-1]]
        shapes = [
            (*dims[:-1], first),
            *((part,) if self._maybe(4) else (*dims[:-1], part) for part in others),
        ]
        parts = (self._expr(shape, depth).text for shape in shapes)
        return Text(f"concat({', '.join(parts)}, as={dims[-1]})")

    def _attention(self, dims: Dims, depth: int) -> Text:
        heads = self._one(["heads", "kv_heads", "kv_heads"])
        q, k, v = (self._turned(("seq", of, "head_dim"), depth) for of in ("heads", heads, heads))
        settings = self._settings("documents", "window", "scale", "softcap", "dropout")
        return Text(f"attention({q}, {k}, {v}, mask={self._one(['causal', 'full'])}{settings})")

    def _turned(self, dims: Dims, depth: int) -> str:
        return (self._rotated if self._maybe(3) else self._expr)(dims, depth).text

    # ---- arguments and names

    def _settings(self, *names: str) -> str:
        """Some of these arguments."""
        return "".join(f", {name}={self._one(SETTINGS[name])}" for name in names if self._maybe())

    def _settings_of(self, attributes: Sequence[Attribute]) -> str:
        """The arguments of an op, those with defaults perhaps."""
        given = [a for a in attributes if a.default is None or self._maybe()]
        return "".join(f", {a.name}={self._one(self._values_of(a))}" for a in given)

    def _values_of(self, attribute: Attribute) -> Sequence[str]:
        numbers = WHOLE_NUMBERS if attribute.kinds == (int,) else NUMBERS
        return attribute.choices or SETTINGS.get(attribute.name, numbers)

    def _name(self, stem: str) -> str:
        return f"{stem}{next(self._numbers)}"

    def _know(self, name: str, dims: Dims) -> None:
        self.scopes[-1].values.append((name, dims))
