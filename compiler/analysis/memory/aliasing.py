"""Which values of a step lie in one piece of memory, and what each piece takes on one rank.

A storage is known by the value that it was made for: views, what a repeat takes apart, and what
backward reads of forward are other names for it.  The carried value of a repeat is a storage of its
own, by the name that one layer has for it.  Non-goals: when a storage comes and goes.
"""

from ...ir import ITEM_BYTES, Enter, Leave, Op, Program, Region, Stmt, walk
from ...ops import OPS
from ...ops.fused_loss import KEPT, LINEAR_CROSS_ENTROPY
from ..stage_program import StageProgram


class Storages:
    """The storages of a step, or of one stage of a pipeline, which receives values from others.

    layers      of each repeat that is cut, where this is one stage
    received, received_gradients  from the stage before it and from the one after it
    state, inputs   those that are there all the time
    gathered    weights that layers of repeats gather for themselves, as flat buffers and by
                parameter: autograd keeps views of these, whose memory comes and goes with the layer
    packs       the ops after which a layer's gradient is summed in each microbatch
    recomputed  values that backward recomputes → the op of forward that computed them
    second      forward's values that backward recomputes → their names in backward
    recomputed_from  forward's values that backward recomputes → the operands of their op
    sometimes   those of them that it makes not in every layer
    """

    def __init__(self, program: Program, stage: StageProgram | None = None) -> None:
        assert program.region.kind == "step", f"memory: a program after {program.after} has no step"
        self.program = program
        self.layers = stage.layers if stage else {}
        inputs = (*stage.forward.inputs, *stage.backward.inputs) if stage else ()
        self.received = [value.name for value in stage.forward.inputs] if stage else []
        self.received_gradients = [value.name for value in stage.backward.inputs] if stage else []
        self.types = {**program.types} | {value.name: value.type for value in inputs}
        self._root = {param.name: param.name for param in program.params}
        self._bytes: dict[str, int] = {}  # of values that are no tensors of their types
        self.state = {*self._root}
        self.inputs = {arg.value.name for arg in program.region.args}
        for stmt in program.region.body:
            self._bind(stmt)
            if isinstance(stmt, Op) and any(self.root(name) in self.state for name in stmt.inputs):
                # on a parameter's way to the model
                self.state |= {self.root(value.name) for value in stmt.outputs}
        inner = [*walk(self.program.microbatches.body)]
        unpacks = [op for op in inner if op.kind == "unpack"]
        self.gathered = {self.root(op.inputs[0]) for op in unpacks} | {
            v.name for op in unpacks for v in op.outputs
        }
        self.packs = [op for op in inner if op.kind == "pack"]
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

    def held(self, name: str) -> bool:
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
                self._root |= {value.name: self.root(stmt.inputs[0]) for value in stmt.outputs}
            return
        self._root |= {
            arg.value.name: self.root(arg.source) for arg in stmt.args if arg.enter is Enter.EACH
        }
        for inner in stmt.body:
            self._bind(inner)
        self._root |= {
            result.name: self.root(end.name)
            for end, result in zip(stmt.yields, stmt.results, strict=True)
            if end.leave is Leave.STACK
        }
        for arg, end, result in carried(stmt):
            if self.root(end) == arg:
                source = next(it.source for it in stmt.args if it.value.name == arg)
                self._root[result] = self.root(source)  # it goes through unchanged

    def origin(self, name: str) -> str:
        """The storage of forward that a value of backward reads or recomputes."""
        root = self.root(name)
        return self.root(self._first.get(root, root))

    def _find_recomputed(self) -> None:
        """Backward's ops that do what one of forward's did, to the same operands."""
        done = {self._does(op): op for op in walk(self.program.forward.body)}
        for op in walk(self.program.backward.body):
            if first := done.get(self._does(op)):
                pairs = [
                    (second.name, value.name)
                    for second, value in zip(op.outputs, first.outputs, strict=True)
                ]
                self._first |= dict(pairs)
                self.second |= {value: second for second, value in pairs}
                self.recomputed |= {value.name: first for value in op.outputs}
                self.recomputed_from |= {value.name: first.inputs for value in first.outputs}
                self.sometimes |= (
                    {value.name for value in first.outputs} if "every" in dict(op.attrs) else set()
                )

    def _find_given(self) -> None:
        """Gradients that a loss makes in forward, and backward scales where they lie."""
        losses = {
            tuple(map(self.root, op.inputs)): op.outputs[0].name
            for op in walk(self.program.forward.body)
            if op.kind == LINEAR_CROSS_ENTROPY.name
        }
        for op in walk(self.program.backward.body):
            if dict(op.attrs).get("of") == LINEAR_CROSS_ENTROPY.name:
                loss = losses[tuple(map(self.origin, op.inputs[1:]))]
                pairs = zip(op.outputs, op.names("wrt"), strict=True)
                self._root |= {value.name: f"{loss}: {KEPT[operand]}" for value, operand in pairs}

    def _does(self, op: Op) -> object:
        attrs = tuple(attr for attr in op.attrs if attr[0] != "every")
        return op.kind, attrs, tuple(self.origin(name) for name in op.inputs)


def carried(region: Region) -> list[tuple[str, str, str]]:
    """Values that a layer of a repeat is handed, those it hands on, and their names after the
    last.
    """
    args = [arg.value.name for arg in region.args if arg.enter is Enter.CARRY]
    lasts = [
        (e.name, r.name)
        for e, r in zip(region.yields, region.results, strict=True)
        if e.leave is Leave.LAST
    ]
    return [(arg, end, result) for arg, (end, result) in zip(args, lasts, strict=True)]
