"""The form of an op: how many operands, which attributes, and what those name."""

from collections.abc import Collection, Iterable, Mapping, Sequence

from ...ir import FLOATS, Attr, Bucket, Kind, Op, Program, Type
from ...ir.placements import COERCIONS, ends
from ...ops import OPS, VJPS, TypingError
from ..bucket_layout import layout_of
from .checker import Checker

WORK_PASSES = ("propagate", "choose_layout")
"""After these passes every op but leaves says what it works on."""


class Ops(Checker):
    """The ops of a program."""

    def __init__(self, program: Program) -> None:
        super().__init__(program)
        self._buckets = {bucket.name: bucket for bucket in program.buckets}
        self._params = {p.name: p.type for p in program.params}
        self._has_work = program.after in WORK_PASSES

    def check(self, op: Op, here: Mapping[str, Type], in_reverse: bool) -> tuple[Type, ...]:
        """Its results' types, of what is bound `here`; `in_reverse` says whether a reversed
        repeat is around it.
        """
        assert op.kind in OPS, f"there is no op {op.kind}"
        for name in op.inputs:
            assert name in here, f"{name} is used before it is bound, in {op.kind}"
        operands = [here[name] for name in op.inputs]
        self._form(op, in_reverse)
        try:
            forward, around = VJPS.forward(op, operands)
            for key, value in forward.attrs:
                assert self._right(forward, key, value, around), f"{forward.kind}: {key} = {value}"
            types = OPS[op.kind].infer(self.program, operands, op)
        except (
            TypingError,
            LookupError,
            StopIteration,
        ) as error:  # the latter two: operands of too few dims
            raise AssertionError(
                f"{error} ({op.outputs[0].name if op.outputs else op.kind})"
            ) from None
        assert len(types) == len(op.outputs), (
            f"{op.kind} has {len(types)} results, not {len(op.outputs)}"
        )
        return types

    def _form(self, op: Op, in_reverse: bool) -> None:
        """As many operands, and such attributes, as an op of the kind has."""
        entry, count = OPS[op.kind], len(op.inputs)
        attributes = (*entry.attributes, *VJPS.attributes(op))
        assert entry.fits(count), f"{op.kind} of {count} operands"
        assert op.outputs or op.kind == "begin", f"{op.kind} without a result"
        wanted: dict[str, tuple[type, ...]] = {
            attribute.name: attribute.types for attribute in attributes
        }
        if self._has_work and op.kind != "leaf":
            wanted["work"] = (tuple,)
        if op.kind == "update" and self._buckets:
            wanted["bucket"] = (str,)
        if in_reverse and "every" in dict(op.attrs):
            wanted["every"] = (int,)
        given, optional = (
            dict(op.attrs),
            {a.name: a.default for a in attributes if a.default is not None},
        )
        fits = len(given) == len(op.attrs) and {*wanted} - {*optional} <= {*given} <= {*wanted}
        assert fits, f"{op.kind} has {', '.join(wanted)}"
        assert all(value != optional.get(key) for key, value in op.attrs), (
            f"{op.kind}: a default is written"
        )
        for key, value in op.attrs:
            assert isinstance(value, wanted[key]), (
                f"{op.kind}: {key} is not {wanted[key][0].__name__}"
            )

    def _right(self, op: Op, key: str, value: Attr, operands: Sequence[Type]) -> bool:
        """Whether the names in an attribute exist."""
        match key:
            case "work":
                return self._works(op.names("work"), [*operands, *(v.type for v in op.outputs)])
            case "over":
                shared = ({*t.dims} for t in operands if t.differentiable)
                return _distinct(op.names("over"), set[str].intersection(*shared))
            case "axes":
                source, target = ends(op)
                dims = {source.dim, target.dim} <= {"", *operands[0].dims}
                known = (source.kind, target.kind) in COERCIONS and source != target
                shards = all(
                    bool(each.dim) == (each.kind is Kind.SHARDED) for each in (source, target)
                )
                return (
                    bool(op.names("axes"))
                    and _distinct(op.names("axes"), self.axes)
                    and dims
                    and known
                    and shards
                )
            case "dtype":
                return value in FLOATS
            case "max":
                return value == self.program.train.optimizer.clip
            case "mask":
                return value in OPS["attention"].attributes[0].choices
            case "every":
                return value == self.program.train.recompute.number
            case "bucket" if value not in self._buckets:
                return False
            case "bucket":
                return self._fits(op, self._buckets[str(value)], operands)
            case "p" | "dropout":
                return 0 < float(str(value)) < 1
            case "site":
                return int(str(value)) > 0
            case _:
                return True

    def _works(self, work: Iterable[str], types: Sequence[Type]) -> bool:
        """Items are `axis:dim`, or `axis:*` for replicated work."""
        space = {dim for type in types for dim in type.dims} | {"*"}
        items = [item.partition(":") for item in work]
        return all(axis in self.axes and colon and dim in space for axis, colon, dim in items)

    def _fits(self, op: Op, bucket: Bucket, operands: Sequence[Type]) -> bool:
        """All parameters of a bucket or their gradients, of a layer or stacked, and its whole
        or its gradient.
        """
        if op.kind == "update":
            return bucket.params == op.inputs[3:] and bucket.type == operands[0]
        flat = {"pack": [v.type for v in op.outputs], "unpack": operands, "begin": []}[op.kind]
        parts = [value.type for value in op.outputs] if op.kind == "unpack" else operands
        for type in flat:
            self.type(bucket.name, type)
        sizes = {
            self.program.local_size(type, bucket.dim) for type in flat if bucket.dim in type.dims
        }
        layer = [self._params[name].dims[len(bucket.layers) :] for name in bucket.params]
        own = [type.dims for type in parts] if flat and flat[0].dims == bucket.type.dims else []
        whole = own == [self._params[name].dims for name in bucket.params]
        return (whole or [type.dims for type in parts] == layer) and sizes <= {
            layout_of(self.program, bucket).size
        }


def _distinct(names: tuple[str, ...], among: Collection[str]) -> bool:
    return len({*names}) == len(names) and all(name in among for name in names)
