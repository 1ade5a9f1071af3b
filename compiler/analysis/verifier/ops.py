"""The form of an op: how many operands, which attributes, and what these name."""

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
        """Checks an op; returns its results' types.

        `here` has the types of bound names; `in_reverse` says whether a reversed repeat is around
        the op.
        """
        assert op.kind in OPS, f"there is no op {op.kind}"
        for name in op.inputs:
            assert name in here, f"{name} is used before it is bound, in {op.kind}"
        operands = [here[name] for name in op.inputs]
        self._check_form(op, in_reverse)
        try:
            forward, around = VJPS.forward(op, operands)
            for key, value in forward.attrs:
                assert self._is_right(forward, key, value, around), (
                    f"{forward.kind}: {key} = {value}"
                )
            types = OPS[op.kind].infer(self.program, operands, op)
        except (TypingError, LookupError, StopIteration) as error:
            # LookupError and StopIteration come from operands of too few dims
            name = op.outputs[0].name if op.outputs else op.kind
            raise AssertionError(f"{error} ({name})") from None
        assert len(types) == len(op.outputs), (
            f"{op.kind} has {len(types)} results, not {len(op.outputs)}"
        )
        return types

    def _check_form(self, op: Op, in_reverse: bool) -> None:
        """Checks that an op has as many operands, and such attributes, as its kind takes."""
        entry, count = OPS[op.kind], len(op.inputs)
        assert entry.fits(count), f"{op.kind} of {count} operands"
        assert op.outputs or op.kind == "begin", f"{op.kind} without a result"
        wanted: dict[str, tuple[type, ...]] = {}
        defaults: dict[str, object] = {}
        for attribute in (*entry.attributes, *VJPS.attributes(op)):
            wanted[attribute.name] = attribute.types
            if attribute.default is not None:
                defaults[attribute.name] = attribute.default
        attrs = dict(op.attrs)
        if self._has_work and op.kind != "leaf":
            wanted["work"] = (tuple,)
        if op.kind == "update" and self._buckets:
            wanted["bucket"] = (str,)
        if in_reverse and "every" in attrs:
            wanted["every"] = (int,)
        is_complete = wanted.keys() - defaults.keys() <= attrs.keys() <= wanted.keys()
        fits = is_complete and len(attrs) == len(op.attrs)
        assert fits, f"{op.kind} has {', '.join(wanted)}"
        for key, value in op.attrs:
            assert value != defaults.get(key), f"{op.kind}: a default is written"
        for key, value in op.attrs:
            assert isinstance(value, wanted[key]), (
                f"{op.kind}: {key} is not {wanted[key][0].__name__}"
            )

    def _is_right(self, op: Op, key: str, value: Attr, operands: Sequence[Type]) -> bool:
        """Whether the names in an attribute exist, and its value is in range."""
        match key:
            case "work":
                results = [result.type for result in op.outputs]
                return self._works(op.names("work"), [*operands, *results])
            case "over":
                shared = ({*type.dims} for type in operands if type.differentiable)
                return _distinct(op.names("over"), set[str].intersection(*shared))
            case "axes":
                return self._are_right_axes(op, operands)
            case "bucket" if value not in self._buckets:
                return False
            case "bucket":
                return self._fits(op, self._buckets[str(value)], operands)
            case _:
                return self._is_right_value(key, value)

    def _are_right_axes(self, op: Op, operands: Sequence[Type]) -> bool:
        """Whether a coercion's axes exist, and its ends are placements of its operand."""
        axes, (source, target) = op.names("axes"), ends(op)
        if not axes or not _distinct(axes, self.axes):
            return False
        for end in (source, target):
            if end.dim not in ("", *operands[0].dims):
                return False
            if bool(end.dim) != (end.kind is Kind.SHARDED):
                return False
        return (source.kind, target.kind) in COERCIONS and source != target

    def _is_right_value(self, key: str, value: Attr) -> bool:
        """Whether an attribute's value is one of the program's, or in range."""
        match key:
            case "dtype":
                return value in FLOATS
            case "max":
                return value == self.program.train.optimizer.clip
            case "mask":
                return value in OPS["attention"].attributes[0].choices
            case "every":
                return value == self.program.train.recompute.number
            case "p" | "dropout":
                return 0 < float(str(value)) < 1
            case "site":
                return int(str(value)) > 0
            case _:
                return True

    def _works(self, work: Iterable[str], types: Sequence[Type]) -> bool:
        """Whether the items of `work` are `axis:dim`, or `axis:*` for replicated work."""
        dims = {"*"}
        for type in types:
            dims.update(type.dims)
        for item in work:
            axis, colon, dim = item.partition(":")
            if axis not in self.axes or not colon or dim not in dims:
                return False
        return True

    def _fits(self, op: Op, bucket: Bucket, operands: Sequence[Type]) -> bool:
        """Whether an op on a bucket has all its parameters or their gradients, of a layer or
        stacked, and the whole bucket or its gradient.
        """
        if op.kind == "update":
            return bucket.params == op.inputs[3:] and bucket.type == operands[0]
        results = [value.type for value in op.outputs]
        flat: Sequence[Type] = {"pack": results, "unpack": operands, "begin": []}[op.kind]
        for type in flat:
            self.type(bucket.name, type)
        dims_of_parts = [type.dims for type in (results if op.kind == "unpack" else operands)]
        stacked = [self._params[name].dims for name in bucket.params]
        layer = [dims[len(bucket.layers) :] for dims in stacked]
        is_stack = bool(flat) and flat[0].dims == bucket.type.dims
        if dims_of_parts != layer and not (is_stack and dims_of_parts == stacked):
            return False
        size = layout_of(self.program, bucket).size
        for type in flat:
            if bucket.dim in type.dims and self.program.local_size(type, bucket.dim) != size:
                return False
        return True


def _distinct(names: tuple[str, ...], among: Collection[str]) -> bool:
    return len({*names}) == len(names) and all(name in among for name in names)
