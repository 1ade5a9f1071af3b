"""Random models: statements with every op of the language's table, in repeats and branches.

Non-goals: expressions (`random_expressions`); meshes, rules and settings (`random_plans`).
"""

from collections.abc import Generator, Sequence
from contextlib import contextmanager

from attrs import field, frozen

from .random_expressions import (
    DEPTH,
    HEADED,
    JOINED,
    PRODUCT,
    STREAM,
    SUM,
    Dims,
    Expressions,
    Scope,
    Text,
)

REPEATS = ("layers", "blocks")
ENDS = ("1", "layers - 1")
"""The ends of branches of the outer repeat, which has three iterations."""
INSIDE = {("1", 1): ("layers - 1",), ("layers - 1", 0): ("1",)}
"""The ends of branches in a branch, on the first side or the other: where more than one
iteration runs.
"""


@frozen
class Writer(Expressions):
    """Draws a model's statements.

    `own` are statements of whoever asks, with `{n}` where each needs a number.
    """

    own: Sequence[str] = field(kw_only=True)

    def model(self) -> str:
        """An embedding, statements in repeats of any nesting up to two, and a loss."""
        lines = [
            f"x = {self._start()}",
            f"s = {self._matrix_product(STREAM, ('seq', 'ffn'), 'x').text}",
        ]
        self._know("x", STREAM)
        self._know("s", ("seq", "ffn"))
        for _ in range(self._some(2, 4)):
            lines += self._part(REPEATS)
        end = f"x = x + {self._matrix_product(('seq', 'ffn'), STREAM, 's').at(PRODUCT)}"
        return "\n".join([*lines, end, f"loss = {self._loss()}"])

    # ---- statements

    def _part(self, repeats: Sequence[str], ends: Sequence[str] = ()) -> list[str]:
        """A statement, or a repeat over the first of `repeats` with such parts in it."""
        if not repeats or not self._maybe():
            return self._statement()
        with self._scope():
            if len(repeats) == len(REPEATS) and self._maybe(3):
                inner = [*self._parts(repeats[1:], ENDS), *self._branches(repeats[1:], ENDS)]
                return [f"repeat {repeats[0]} as i {{", *_indented(inner), "}"]
            return [f"repeat {repeats[0]} {{", *_indented(self._parts(repeats[1:], ends)), "}"]

    def _parts(self, repeats: Sequence[str], ends: Sequence[str] = ()) -> list[str]:
        """One or two, and perhaps branches that end at one of `ends`."""
        lines = [line for _ in range(self._some(1, 2)) for line in self._part(repeats, ends)]
        return [*lines, *self._branches(repeats, ends)] if ends and self._maybe(3) else lines

    def _branches(self, repeats: Sequence[str], ends: Sequence[str]) -> list[str]:
        """The statements of the first repetitions, and perhaps others for the rest."""
        lines: list[str] = []
        end = self._one(ends)
        for side, start in enumerate([f"if i < {end} {{", "} else {"][: self._some(1, 2)]):
            inside = [each for each in INSIDE.get((end, side), ()) if each in ends]
            with self._scope():
                lines += [start, *_indented(self._parts(repeats, inside))]
        return [*lines, "}"]

    @contextmanager
    def _scope(self) -> Generator[None]:
        self.scopes.append(Scope())
        yield
        self.scopes.pop()

    def _statement(self) -> list[str]:
        kinds = [self._residual, self._side, self._normed_after, self._named]
        kinds += [
            self._attended,
            self._concatenated,
            self._split,
            *([self._own] * 2 if self.own else []),
        ]
        return self._one(kinds)()

    def _residual(self) -> list[str]:
        return [f"x = {self._added(Text('x'), self._one('+-'), self._expr(STREAM, DEPTH)).text}"]

    def _side(self) -> list[str]:
        return [f"s = {self._expr(('seq', 'ffn'), DEPTH).at(PRODUCT)} + s"]

    def _normed_after(self) -> list[str]:
        return [
            f"x = {self._norm(Text(f'x + {self._expr(STREAM, 1).at(PRODUCT)}', SUM), STREAM).text}"
        ]

    def _attended(self) -> list[str]:
        """Attention, where each rank has the sequence whole."""
        if not self._turns(("kv_heads", *HEADED)):
            return self._residual()
        return [f"x = x + {self._back(self._attention(HEADED, 1), HEADED).at(PRODUCT)}"]

    def _concatenated(self) -> list[str]:
        dims = ("seq", self._one([*JOINED]))
        if not self._joins(dims):
            return self._residual()
        return [f"x = {self._back(self._joined(dims, 1), dims).at(PRODUCT)} - x"]

    def _split(self) -> list[str]:
        """The parts of a last dim, one of which may be left."""
        dims = ("seq", self._one([*JOINED]))
        if not self._joins(dims):
            return self._residual()
        whole, parts = self._expr(dims, 1).text, JOINED[dims[-1]]
        names = [self._name("p") for _ in parts]
        for name, part in zip(names, parts, strict=True):
            self._know(name, ("seq", part))
        used = self._some(0, len(parts) - 1)
        back = self._back(Text(names[used]), ("seq", parts[used]))
        return [
            f"{', '.join(names)} = split({whole}, [{', '.join(parts)}])",
            f"x = x + {back.at(PRODUCT)}",
        ]

    def _named(self) -> list[str]:
        """A value with a name, used once at least, and perhaps by later statements."""
        dims = self._one(
            [(), ("seq",), ("hidden",), ("seq", "ffn"), ("seq", "hidden"), HEADED, ("seq", "wide")]
        )
        name = self._name("y")
        lines = [f"{name} = {self._expr(dims, DEPTH).text}"]
        self._know(name, dims)
        used = self._back(Text(name), dims)
        if self._maybe():
            used = Text(
                f"{used.at(SUM)} + {self._back(self._function(dims, 1, name), dims).at(PRODUCT)}",
                SUM,
            )
        return [*lines, f"x = x + {used.at(PRODUCT)}"]

    def _own(self) -> list[str]:
        return self._one(self.own).replace("{n}", str(next(self._numbers))).splitlines()

    def _back(self, value: Text, dims: Dims) -> Text:
        """Something of the stream's dims, of a value of any."""
        if set(dims) <= set(STREAM):
            return Text(f"x * tanh({value.text})", PRODUCT) if dims != STREAM else value
        return self._matrix_product(dims, STREAM, value.at(PRODUCT))

    def _start(self) -> str:
        looked = "embedding(tokens, wte[vocab, hidden])"
        self.scopes[0].matrices.append(("wte", ("hidden", ("vocab",))))
        return self._one(
            [
                looked,
                f"{looked} + wpe[seq, hidden]",
                f"{looked} * scale[hidden]",
                f"{looked} * sqrt(ffn)",
            ]
        )

    def _loss(self) -> str:
        losses = [f"cross_entropy({self._logits()}, labels{self._settings('smoothing', 'z')})"]
        if self._maybe(4):
            losses.append(f"cross_entropy({self._logits()}, labels)")
        return " + ".join(losses)

    def _logits(self) -> str:
        head = self._one(["wte", f"{self._name('head')}[hidden -> vocab]"])
        x = Text("x")
        last = (
            self._norm(x, STREAM) if self._maybe() else self._added(x, "-", self._expr(STREAM, 1))
        )
        logits = f"{last.at(PRODUCT)} @ {head}"
        return self._one([logits, f"softcap({logits}, 3)", f"{logits} + {self._name('b')}[vocab]"])


def _indented(lines: Sequence[str]) -> list[str]:
    return [f"  {line}" for line in lines]
