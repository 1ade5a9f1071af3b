"""Which values of a step lie in one piece of memory, and what each piece takes on one rank.

A storage has the name of the value that it was made for.  Views, slices that a repeat takes, and
what backward reads of forward are other names for it.  The carried value of a repeat is a storage
of its own, by the name that one layer has for it.  Non-goals: when a storage comes and goes.
"""

from collections.abc import Mapping

from ...ir import ITEM_BYTES, Enter, Leave, Op, Program, Region, Stmt, walk
from ...ops import OPS, VJPS
from ..stage_program import StageProgram


class Storages:
    """The storages of a step, or of one stage of a pipeline, which receives values from others.

    layers      of each repeat that is cut, where this is one stage
    received, received_gradients  from the stage before it and from the one after it
    state, inputs   storages that are there all the time
    gathered    weights that layers of repeats gather for themselves, as flat buffers and by
                parameter: autograd keeps views of these, whose memory comes and goes with the layer
    packs       the ops after which a layer's gradient is summed in each microbatch
    recomputed  values that backward recomputes → the op of forward that computed them
    second      forward's values that backward recomputes → their names in backward
    recomputed_from  forward's values that backward recomputes → the operands of their op
    sometimes   forward's values that backward recomputes in some layers only
    """

    def __init__(self, program: Program, stage: StageProgram | None = None) -> None:
        assert program.region.kind == "step", f"memory: a program after {program.after} has no step"
        self.program = program
        self.layers: Mapping[str, range] = {}
        self.received = list[str]()
        self.received_gradients = list[str]()
        self.types = {**program.types}
        if stage:
            self.layers = stage.layers
            for value in stage.forward.inputs:
                self.received.append(value.name)
                self.types[value.name] = value.type
            for value in stage.backward.inputs:
                self.received_gradients.append(value.name)
                self.types[value.name] = value.type
        self._root = {param.name: param.name for param in program.params}
        self._bytes: dict[str, int] = {}  # of values that are no tensors of their types
        self.state = {*self._root}
        self.inputs = {arg.value.name for arg in program.region.args}
        for stmt in program.region.body:
            self._bind(stmt)
            if isinstance(stmt, Op) and any(self.root(name) in self.state for name in stmt.inputs):
                # on a parameter's way to the model
                self.state |= {self.root(value.name) for value in stmt.outputs}
        self.gathered = set[str]()
        self.packs = list[Op]()
        for op in walk(self.program.microbatches.body):
            if op.kind == "unpack":
                self.gathered.add(self.root(op.inputs[0]))
                self.gathered.update(value.name for value in op.outputs)
            elif op.kind == "pack":
                self.packs.append(op)
        self.recomputed: dict[str, Op] = {}
        self.second: dict[str, str] = {}
        self._first: dict[str, str] = {}
        self.recomputed_from: dict[str, tuple[str, ...]] = {}
        self.sometimes: set[str] = set()
        self._find_recomputed()
        self._find_given()

    def root(self, name: str) -> str:
        """The storage that a value lies in."""
        return self._root.get(name, name)

    def is_permanent(self, name: str) -> bool:
        """Whether a value lies in the memory of buckets or of the inputs of a step, whatever
        ops read and make.
        """
        root = self.root(name)
        return root in self.state or root in self.inputs or root in self.gathered

    def is_flat(self, name: str) -> bool:
        """Whether a value is the flat buffer of a bucket."""
        return self.program.bucket_of(self.types[name]) is not None

    def bytes(self, name: str) -> int:
        """The size of a value on one rank."""
        type = self.types[name]
        return self._bytes.get(name) or self.program.elements(type) * ITEM_BYTES[type.dtype]

    def _bind(self, stmt: Stmt) -> None:
        if isinstance(stmt, Op):
            if holds := OPS[stmt.kind].holds:
                self._bytes[stmt.outputs[0].name] = holds(self.program, stmt)
            if OPS[stmt.kind].views(self.program, stmt):
                root = self.root(stmt.inputs[0])
                self._root |= dict.fromkeys((value.name for value in stmt.outputs), root)
            return
        for arg in stmt.args:
            if arg.enter is Enter.EACH:
                self._root[arg.value.name] = self.root(arg.source)
        for inner in stmt.body:
            self._bind(inner)
        for end, result in zip(stmt.yields, stmt.results, strict=True):
            if end.leave is Leave.STACK:
                self._root[result.name] = self.root(end.name)
        sources = {arg.value.name: arg.source for arg in stmt.args}
        for arg, end, result in get_carried_values(stmt):
            if self.root(end) == arg:
                self._root[result] = self.root(sources[arg])  # it goes through unchanged

    def origin(self, name: str) -> str:
        """The storage of forward that a value of backward reads or recomputes."""
        root = self.root(name)
        return self.root(self._first.get(root, root))

    def _find_recomputed(self) -> None:
        """Finds backward's ops that do what one of forward's did, to the same operands."""
        forward_ops = {self._does(op): op for op in walk(self.program.forward.body)}
        for op in walk(self.program.backward.body):
            first = forward_ops.get(self._does(op))
            if not first:
                continue
            for again, value in zip(op.outputs, first.outputs, strict=True):
                self._first[again.name] = value.name
                self.second[value.name] = again.name
                self.recomputed[again.name] = first
                self.recomputed_from[value.name] = first.inputs
                if "every" in dict(op.attrs):
                    self.sometimes.add(value.name)

    def _find_given(self) -> None:
        """Finds gradients that forward makes, and backward scales where they lie."""
        losses: dict[tuple[str, ...], str] = {}
        for op in walk(self.program.forward.body):
            vjp = OPS[op.kind].vjp
            if vjp and vjp.from_forward:
                losses[tuple(map(self.root, op.inputs))] = op.outputs[0].name
        for op in walk(self.program.backward.body):
            saved = VJPS.get_gradients_from_forward(op)
            if saved:
                loss = losses[tuple(map(self.origin, op.inputs[1:]))]
                for value, operand in zip(op.outputs, op.names("wrt"), strict=True):
                    self._root[value.name] = f"{loss}: {saved[operand]}"

    def _does(self, op: Op) -> object:
        attrs = tuple(attr for attr in op.attrs if attr[0] != "every")
        return op.kind, attrs, tuple(self.origin(name) for name in op.inputs)


def get_carried_values(region: Region) -> list[tuple[str, str, str]]:
    """Values that a layer of a repeat is handed, the ones it hands on, and their names after the
    last layer.
    """
    args = [arg.value.name for arg in region.args if arg.enter is Enter.CARRY]
    ends, lasts = list[str](), list[str]()
    for end, result in zip(region.yields, region.results, strict=True):
        if end.leave is Leave.LAST:
            ends.append(end.name)
            lasts.append(result.name)
    return [*zip(args, ends, lasts, strict=True)]
