"""Any plan's model in plain torch, one process, float64: what emitted programs of random plans are
held against.

Purpose: walks the syntax tree, a statement at a time, and computes by the formulas of
docs/language.md; of scalec it uses the parser alone, and of torch no fused op.  Non-goals: mistakes
in a plan, other dims of a tensor than its own in that order, speed.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import pairwise
from math import prod, sqrt
from types import ModuleType
from typing import Any, cast

import numpy as np
import torch
from attrs import field, frozen
from torch import Tensor

from helpers import reference_ops
from helpers.oracle.reference import Tensors, Training
from helpers.random_models.dropout_masks import Draws, draws_of, dropped, forked
from helpers.unary_ops import UNARY, goes_over_one
from scalec.compiler.syntax import tree
from scalec.compiler.syntax.parser import parse_plan
from scalec.compiler.syntax.source import Source

Dims = tuple[str, ...]


@frozen(eq=False)
class Value:
    """A tensor and the names of its dims."""

    dims: Dims
    tensor: Tensor

    def onto(self, dims: Dims) -> Tensor:
        """The tensor with a 1 for each dim that it lacks."""
        sizes = dict(zip(self.dims, self.tensor.shape, strict=True))
        return self.tensor.reshape([sizes.get(dim, 1) for dim in dims])

    def places(self, dims: Sequence[str]) -> list[int]:
        """Where these dims stand."""
        return [self.dims.index(dim) for dim in dims]


Env = dict[str, Value]


@frozen
class TorchModel:
    """The model of a plan; user ops are functions of `own`, and have the dims of their first
    operand.
    """

    plan: tree.Plan
    own: ModuleType

    @classmethod
    def of(cls, text: str, own: ModuleType) -> "TorchModel":
        """That of a plan's text."""
        return cls(parse_plan(Source("plan.scale", text)), own)

    @property
    def model(self) -> tree.Model:
        """The model's syntax."""
        return next(item for item in self.plan.items if isinstance(item, tree.Model))

    def numbers(self) -> dict[str, float]:
        """Dims, as they are padded, and constants."""
        found: dict[str, float] = {}
        for setting in self._model_settings():
            value = number(setting.value, found)
            found[setting.key.name] = (
                -(-value // setting.pad.value) * setting.pad.value if setting.pad else value
            )
        return found

    def classes(self) -> int:
        """The vocabulary without padding."""
        return int(
            next(number(s.value, {}) for s in self._model_settings() if s.key.name == "vocab")
        )

    def loss(self, parameters: Tensors, *inputs: Tensor) -> Tensor:
        """The sum of token losses over labels ≥ 0, of the model's inputs, [rows, seq], and
        draws if it drops.
        """
        statements = [item for item in self.model.body if isinstance(item, tree.Statement)]
        names = [given.name.name for given in self.model.inputs]
        env = {
            name: Value(("batch", "seq"), given) for name, given in zip(names, inputs, strict=False)
        }
        declared = {op.name.name: op for op in self.plan.items if isinstance(op, tree.UserOp)}
        own = {
            name: getattr(self.own, op.function.value.partition(":")[2])
            for name, op in declared.items()
        }
        numbers = self.numbers() | {"seq": inputs[0].shape[1]}
        draws = draws_of(inputs[len(names)]) if len(inputs) > len(names) else NO_DRAWS
        evaluation = _Evaluation(by_place(parameters), numbers, self.classes(), own)
        return evaluation.body(statements, env, LayerPlace(draws))["loss"].tensor

    def training(self) -> Training:
        """The optimizer."""
        train = next(section for section in self.plan.sections() if section.kind.name == "train")
        optimizer = next(entry for entry in train.entries if isinstance(entry, tree.Section))
        assert optimizer.name
        settings = _settings(optimizer)
        known: dict[str, Any] = {
            key: settings[key]
            for key in ("momentum", "weight_decay", "clip", "eps")
            if key in settings
        }
        groups = [
            _settings(entry) for entry in optimizer.entries if isinstance(entry, tree.Section)
        ]
        assert len(groups) <= 1, "the only group that these plans have is that of the embedding"
        decay = tuple(("wte", group["weight_decay"]) for group in groups)
        return Training(
            optimizer.name.name,
            **known,
            decay=decay,
            scale=tuple(("wte", g["lr_scale"]) for g in groups),
        )

    def _model_settings(self) -> list[tree.Setting]:
        sections = [item for item in self.model.body if isinstance(item, tree.Section)]
        return [
            entry
            for section in sections
            for entry in section.entries
            if isinstance(entry, tree.Setting)
        ]


def _settings(section: tree.Section) -> dict[str, float]:
    """The entries that are numbers."""
    settings = [entry for entry in section.entries if isinstance(entry, tree.Setting)]
    return {s.key.name: float(s.value.value) for s in settings if isinstance(s.value, tree.Number)}


Places = dict[str, dict[tuple[int, ...], Tensor]]


def by_place(parameters: Tensors) -> Places:
    """Parameters by the last part of their name and the indices of the repeats that hold them."""
    found: Places = {}
    for name, value in parameters.items():
        *path, last = name.split(".")
        found.setdefault(last, {})[tuple(int(part) for part in path if part.isdecimal())] = value
    return found


def number(expr: tree.Expr, known: Mapping[str, float]) -> float:
    """Arithmetic."""
    match expr:
        case tree.Number(value):
            return value
        case tree.Name(name):
            return known[name]
        case tree.Negative(inner):
            return -number(inner, known)
        case tree.Call(tree.Name("sqrt"), (inner,)):
            return sqrt(number(inner, known))
        case tree.Binary(op, left, right):
            return ARITHMETIC[op](number(left, known), number(right, known))
        case _:
            raise AssertionError(f"no number: {expr}")


ARITHMETIC: dict[str, Callable[[Any, Any], Any]] = {
    "+": lambda x, y: x + y,
    "-": lambda x, y: x - y,
    "*": lambda x, y: x * y,
    "/": lambda x, y: x / y,
}
WORDS = ("over", "as", "mask", "approximate", "scaling")
"""Arguments that are names."""


NO_DRAWS = np.zeros(0, np.uint64)


@frozen(eq=False)
class LayerPlace:
    """One layer of the repeats around a statement.

    A repeat with branches is one repeat for each of its parts: `place` counts layers in each, and
    `part` is its number.  `index` is the layer in the repeat as it is written.
    """

    draws: Draws
    place: tuple[int, ...] = ()
    part: int = 0
    index: int = 0


@frozen
class _Evaluation:
    parameters: Places
    numbers: dict[str, float]
    classes: int
    own: dict[str, Callable[..., Tensor | tuple[Tensor, ...]]]
    declared: dict[str, Dims] = field(factory=dict[str, Dims])
    sites: dict[tuple[int, int], int] = field(factory=dict[tuple[int, int], int])
    # of a repeat's dim, their numbers
    parts: dict[str, dict[range, int]] = field(factory=dict[str, dict[range, int]])

    def body(self, statements: Sequence[tree.Statement], env: Env, layer: LayerPlace) -> Env:
        """The values of names after the statements."""
        for item in statements:
            match item:
                case tree.Bind():
                    env = env | self._bound(item, env, layer)
                case tree.If():
                    chosen = (
                        item.body if layer.index < number(item.end, self.numbers) else item.others
                    )
                    env = _known(env, self.body(chosen, env, layer))
                case tree.Repeat():
                    for inner in self._layers(item, layer):
                        env = _known(env, self.body(item.body, env, inner))
        return env

    def _layers(self, repeat: tree.Repeat, layer: LayerPlace) -> Iterator[LayerPlace]:
        cuts = sorted(
            {0, int(self.numbers[repeat.dim.name]), *self._ends(repeat.body, repeat.index)}
        )
        numbers = self.parts.setdefault(repeat.dim.name, {})
        for part in (range(*pair) for pair in pairwise(cuts)):
            own = numbers.setdefault(part, len(numbers)) if len(cuts) > 2 else layer.part
            for i in part:
                local = i - part.start
                yield LayerPlace(
                    forked(layer.draws, local),
                    (*layer.place, local),
                    own,
                    i if repeat.index else layer.index,
                )

    def _ends(self, body: Sequence[tree.Statement], index: tree.Name | None) -> Iterator[int]:
        """Where the branches of this index end."""
        for item in body:
            if isinstance(item, tree.If) and item.index == index:
                yield int(number(item.end, self.numbers))
            if isinstance(item, tree.If):
                yield from self._ends(item.others, index)
            if not isinstance(item, tree.Bind):
                yield from self._ends(item.body, index)

    def _bound(self, item: tree.Bind, env: Env, layer: LayerPlace) -> Env:
        if len(item.names) == 1:
            return {item.names[0].name: self._value(item.expr, env, layer)}
        assert isinstance(item.expr, tree.Call), "only calls have several results"
        results = self._split if item.expr.name.name == "split" else self._results
        return {
            name.name: value
            for name, value in zip(item.names, results(item.expr, env, layer), strict=True)
        }

    def _split(self, call: tree.Call, env: Env, layer: LayerPlace) -> list[Value]:
        whole, parts = self._value(call.args[0], env, layer), call.args[1]
        assert isinstance(parts, tree.List), "split takes a list of dims"
        dims = [str(part) for part in parts.items]
        pieces = whole.tensor.split([int(self.numbers[dim]) for dim in dims], -1)
        return [
            Value((*whole.dims[:-1], dim), piece) for dim, piece in zip(dims, pieces, strict=True)
        ]

    def _results(self, call: tree.Call, env: Env, layer: LayerPlace) -> list[Value]:
        """The dims of a user op, with as many of its first operand's dims as they have."""
        args, given = self._arguments(call, env, layer)
        operands = [value for value in (*args, *given.values()) if isinstance(value, Value)]
        made = self.own[call.name.name](
            *map(_bare, args), **{key: _bare(value) for key, value in given.items()}
        )
        each = made if isinstance(made, tuple) else (made,)
        return [Value(operands[0].dims[: tensor.dim()], tensor) for tensor in each]

    def _arguments(
        self, call: tree.Call, env: Env, layer: LayerPlace
    ) -> tuple[list[Any], dict[str, Any]]:
        given = {s.key.name: self._setting(s, env, layer) for s in call.kwargs}
        return [self._either(arg, env, layer) for arg in call.args], given

    def _value(self, expr: tree.Expr, env: Env, layer: LayerPlace) -> Value:
        found = self._either(expr, env, layer)
        assert isinstance(found, Value), f"not a tensor: {expr}"
        return found

    def _either(self, expr: tree.Expr, env: Env, layer: LayerPlace) -> Value | float:
        match expr:
            case tree.Name(name) if name in env:
                return env[name]
            case tree.Name(name) if name in self.declared:
                return self._parameter(name, layer)
            case tree.ParamUse():
                self.declared[expr.name.name] = tuple(map(str, (*expr.outs, *expr.ins)))
                return self._parameter(expr.name.name, layer)
            case tree.Call(name=name) if name.name in self.own:
                (result,) = self._results(expr, env, layer)
                return result
            case tree.Call(name=name) if name.name != "sqrt":
                return self._call(expr, *self._arguments(expr, env, layer), layer)
            case tree.Negative(inner):
                value = self._either(inner, env, layer)
                return Value(value.dims, -value.tensor) if isinstance(value, Value) else -value
            case tree.Binary("@", left, right):
                over = tuple(map(str, right.ins)) if isinstance(right, tree.ParamUse) else ()
                return contracted(
                    self._value(left, env, layer), self._value(right, env, layer), over
                )
            case tree.Binary(op, left, right):
                return elementwise(
                    ARITHMETIC[op], self._either(left, env, layer), self._either(right, env, layer)
                )
            case _:
                return number(expr, self.numbers)

    def _parameter(self, name: str, layer: LayerPlace) -> Value:
        """One that several parts of a repeat declare is one for each, of a name with the part's
        number.
        """
        own, dims = f"{name}_{layer.part}", self.declared[name]
        held = self.parameters[own if own in self.parameters else name]
        deep = len(next(iter(held)))
        return Value(
            dims, held[layer.place[:deep]].reshape([int(self.numbers[dim]) for dim in dims])
        )

    def _call(
        self, call: tree.Call, args: list[Any], given: dict[str, Any], layer: LayerPlace
    ) -> Value:
        name = call.name.name
        if name == "cross_entropy":
            return cross_entropy(*args, classes=self.classes, **given)
        if name == "dropout" or "dropout" in given:
            site = self.sites.setdefault((id(call), layer.part), len(self.sites) + 1)
            given["drop"] = partial(dropped, draws=layer.draws, site=site)
        return OPS[name](*args, **given)

    def _setting(self, setting: tree.Setting, env: Env, layer: LayerPlace) -> Any:
        if setting.key.name not in WORDS:
            return self._either(setting.value, env, layer)
        return (
            tuple(map(str, setting.value.items))
            if isinstance(setting.value, tree.List)
            else str(setting.value)
        )


def _known(env: Env, inner: Env) -> Env:
    """The new values of names that were known before."""
    return {name: inner[name] for name in env}


def _bare(value: Value | float) -> Tensor | float:
    return value.tensor if isinstance(value, Value) else value


# ---- ops


def contracted(x: Value, w: Value, over: Dims) -> Value:
    """x·w summed over these dims, or all that both have."""
    over = over or tuple(dim for dim in x.dims if dim in w.dims)
    rest = tuple(dim for dim in w.dims if dim not in over)
    left = x.tensor.flatten(x.tensor.dim() - len(over)) if over else x.tensor
    right = w.tensor.reshape(prod(w.onto((*rest, *over)).shape[: len(rest)]), -1)
    sizes = dict(zip(w.dims, w.tensor.shape, strict=True))
    product = (left @ right.T).unflatten(-1, [sizes[dim] for dim in rest])
    return Value((*x.dims[: -len(over)], *rest), product)


def elementwise(
    op: Callable[[Any, Any], Any], left: Value | float, right: Value | float
) -> Value | float:
    """The op on tensors, one of which has all dims of the other, and numbers."""
    values = [side for side in (left, right) if isinstance(side, Value)]
    dims = max((value.dims for value in values), key=len, default=())
    sides = [side.onto(dims) if isinstance(side, Value) else side for side in (left, right)]
    return Value(dims, op(*sides)) if values else op(*sides)


def of_one(name: str) -> Callable[..., Value]:
    """Ops of one operand; over one dim, the last by default."""

    def call(x: Value, *args: float, over: str | Dims = (), **given: Any) -> Value:
        (at,) = x.places(_dims(over) or x.dims[-1:]) if goes_over_one(name) else (None,)
        where = {} if at is None else {"dim": at}
        return Value(x.dims, UNARY[name].formula(x.tensor, *args, **given, **where))

    return call


def reduced(function: Callable[..., Tensor]) -> Callable[..., Value]:
    """Sums and means."""

    def reduce(x: Value, over: str | Dims) -> Value:
        return Value(
            tuple(dim for dim in x.dims if dim not in _dims(over)),
            function(x.tensor, x.places(_dims(over))),
        )

    return reduce


def _dims(over: str | Dims) -> Dims:
    return (over,) if isinstance(over, str) else over


def rmsnorm(x: Value, weight: Value, eps: float) -> Value:
    """Over the weight's dims, which are the last ones."""
    return Value(x.dims, reference_ops.rms_norm(x.tensor, weight.tensor, eps))


def layernorm(x: Value, weight: Value, *rest: Any, eps: float = 0) -> Value:
    """`rest` is a bias, eps, or both."""
    numbers = [each for each in rest if not isinstance(each, Value)]
    bias = next((each.tensor for each in rest if isinstance(each, Value)), None)
    eps = numbers[0] if numbers else eps
    return Value(x.dims, reference_ops.layer_norm(x.tensor, weight.tensor, bias, eps=eps))


def concat(*parts: Value, **given: str) -> Value:
    """One behind the other, each for all indices of the dims that it lacks."""
    *before, _ = max((part.dims for part in parts), key=len)
    placed = [part.onto((*before, part.dims[-1])) for part in parts]
    sizes: Any = cast(Any, torch).broadcast_shapes(*(each.shape[:-1] for each in placed))
    return Value(
        (*before, given["as"]), torch.cat([each.expand(*sizes, -1) for each in placed], -1)
    )


def embedding(tokens: Value, table: Value) -> Value:
    """Rows of a table."""
    return Value((*tokens.dims, *table.dims[1:]), table.tensor[tokens.tensor])


def rope(x: Value, theta: float, dims: float = 0, scaling: str = "none", **given: float) -> Value:
    """Rotary positions of the first `dims` elements, of all by default."""
    frequencies = reference_ops.rope_frequencies(int(dims) or x.tensor.shape[-1], theta)
    scaled = scaled_frequencies(frequencies, theta, scaling, **given)
    return Value(x.dims, reference_ops.rope(x.tensor, scaled, x.dims.index("seq")))


def scaled_frequencies(
    frequencies: Tensor,
    theta: float,
    scaling: str,
    factor: float = 1,
    low: float = 1,
    high: float = 4,
    original: float = 8192,
) -> Tensor:
    """The frequencies as `scaling` changes them; "linear" is of Chen et al. 2023."""
    match scaling:
        case "yarn":
            return reference_ops.yarn_frequencies(frequencies, theta, factor, low, high, original)
        case "llama3":
            return reference_ops.llama3_frequencies(frequencies, factor, low, high, original)
        case "linear":
            return frequencies / factor
        case _:
            return frequencies


def dropout(x: Value, p: float, drop: Callable[..., Tensor]) -> Value:
    """Srivastava et al. 2014."""
    return Value(x.dims, drop(x.tensor, p=p))


def attention(
    q: Value,
    k: Value,
    v: Value,
    mask: str,
    documents: Value | None = None,
    window: float = 0,
    scale: float = 0,
    softcap: float = 0,
    dropout: float = 0,
    drop: Callable[..., Tensor] | None = None,
) -> Value:
    """Attention of [batch, seq, heads, head_dim]."""
    tensor = reference_ops.attention(
        q.tensor,
        k.tensor,
        v.tensor,
        causal=mask != "full",
        scale=scale or None,
        softcap=softcap,
        window=int(window),
        documents=documents.tensor if documents else None,
        change_weights=partial(drop, p=dropout) if drop else None,
    )
    return Value(q.dims, tensor)


def cross_entropy(
    logits: Value, labels: Value, classes: int, smoothing: float = 0, z: float = 0
) -> Value:
    """The loss over the classes that are no padding."""
    real = logits.tensor[..., :classes]
    return Value((), reference_ops.cross_entropy(real, labels.tensor, smoothing, z))


OPS: dict[str, Callable[..., Value]] = {
    **{name: of_one(name) for name in UNARY},
    "attention": attention,
    "concat": concat,
    "dropout": dropout,
    "embedding": embedding,
    "layernorm": layernorm,
    "mean": reduced(torch.mean),
    "rmsnorm": rmsnorm,
    "rope": rope,
    "sum": reduced(torch.sum),
}
