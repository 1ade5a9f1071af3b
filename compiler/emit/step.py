"""The lines of `train_step` and `eval_step`, around the model's forward and backward.

Purpose: lines in the order of the IR, their names, and a line per reduction.  Non-goals: how each
op is written (`ops.step`), the model (`model_classes`), and the buckets that move inside it layer
by layer (`loop_hooks`).
"""

from collections.abc import Iterator, Mapping, Sequence

from attrs import define, evolve, field, frozen

from ..analysis.stage_buckets import chunk_moves, chunks
from ..analysis.stage_program import rank_programs
from ..ir import Bucket, Kind, Op, Program, Region, Value, base, uses
from ..ir.placements import ends
from ..ops import OPS
from ..ops.dropout import are_draws
from ..ops.line import Line
from ..ops.step import RECIPROCAL
from .loop_hooks import gather_size, repeat_of, working_dtype
from .naming import DTYPES, WIDTH, axes_word, call, explode, identifier, literal, place
from .step_formulas import CONDITIONS, fill, get_conditions_text, get_fields, get_line, get_targets

LOCALS = set(
    """
        documents draws finite flat_params grad_norm gradients inv_num_tokens labels limit load
        load_sum loss loss_sum num_tokens router_loss router_loss_sum scale tokens usual weights
    """.split()
)
"""The names of values that no group of ranks takes."""

LOSSES = "loss", "router_loss"
"""The names of a step's losses."""


def names_of_results(program: Program) -> tuple[str, ...]:
    """The names of the results of microbatches that a step adds up: losses and loads."""
    return (*LOSSES[: program.losses], *load_names(program))


def load_names(program: Program) -> tuple[str, ...]:
    """The names of a step's loads: numbered, if there are several."""
    if program.routes == 1:
        return ("load",)
    return tuple(f"load_{i}" for i in range(program.routes))


# ---- groups of ranks, functions under construction, sums of squares


@frozen
class Ranks:
    """A group of ranks: all over some axes, or `among` the ranks of one axis."""

    axes: tuple[str, ...]
    among: tuple[str, ...] = ()

    def mesh_call(self) -> str:
        """The call that asks the mesh for the group."""
        if self.among:
            return f"mesh.among({', '.join([*map(literal, self.axes), *self.among])})"
        return f"mesh.axis({', '.join(map(literal, self.axes))})"


@define
class Function:
    """The lines of one function, and the groups over axes that it asks the mesh for."""

    groups: dict[Ranks, str] = field(factory=dict[Ranks, str])  # the names
    lines: list[str] = field(factory=list[str])

    def add(self, code: str, comment: str) -> None:
        """Adds a line with its comment, if any."""
        self.lines += to_lines(code, comment) if comment else [code]

    def all(self) -> list[str]:
        """All lines, first the lines of groups."""
        groups = [f"{name} = {ranks.mesh_call()}" for ranks, name in self.groups.items()]
        if groups:
            groups.insert(0, "mesh = state.mesh")
        return [*groups, *self.lines]


def to_lines(code: str, comment: str) -> list[str]:
    """A line with its comment, which precedes it where both are too long for one line."""
    indent = " " * (len(code) - len(code.lstrip()))
    fits = "\n" not in code and len(f"    {code}  # {comment}") <= WIDTH
    return [f"{code}  # {comment}"] if fits else [f"{indent}# {comment}", code]


@frozen
class Squares:
    """A sum of squares of gradients, and the group over whose ranks it is summed, if any."""

    operands: tuple[str, ...]
    group: str = ""
    once: str = ""

    def text(self, indent: int, others: int = 1) -> str:
        """The expression, with an argument a line where it is too long for one line with
        `others` more characters.
        """
        arguments = [*self.operands]
        if self.once:
            arguments.append(f"once={self.once}")
        if not self.group:
            return call("sum_squares", arguments, indent, others)
        line = f"all_reduce_(sum_squares({', '.join(arguments)}), {self.group})"
        if indent + len(line) + others <= WIDTH:
            return line
        return explode(
            "all_reduce_", [call("sum_squares", arguments, indent + 4), self.group], indent
        )


def sum_text(squares: Sequence[Squares], others: int) -> str:
    """The sum of squares of all gradients, in a statement of as many `others` characters; with an
    operand a line where it is too long for one line.
    """
    if len(squares) == 1:
        return squares[0].text(4, others)
    total = f"({' + '.join(term.text(0) for term in squares)})"
    if len(total) + others <= WIDTH - 4:
        return total
    total = "\n        + ".join(term.text(8) for term in squares)
    return f"(\n        {total}\n    )"


# ---- the step

LOSS_COMMENT = "mean over the step's labels"

ONE = "1.0"
"""The gradient of a loss that counts as it is: no factor says it."""


def step_lines(
    program: Program, patterns: Mapping[str, str], sizes: Mapping[str, str]
) -> tuple[list[str], list[str]]:
    """The bodies of the two functions for the program's step, without indentation.

    `patterns` are the parameters' names in the model's state, `sizes` the names of dims' sizes.
    """
    step = _Step(program, patterns, sizes)
    for stmt in program.region.body:
        if isinstance(stmt, Region):
            step.microbatches(stmt)
        else:
            step.write(stmt)
    loss, norm, count = (step.text[end.name] for end in program.region.yields[:3])
    metrics = [f"loss={loss}", f"norm={norm}", f"tokens={count}"]
    if program.losses > 1:
        metrics.append("router_loss=router_loss")
    if program.routes:
        metrics.append(f"loads=({', '.join(load_names(program))},)")
    metrics += [f"{metric}={name}" for metric, name in step.metrics.items()]
    step.train.lines.append(f"return Metrics({', '.join(metrics)})")
    step.evaluate.lines.append(f"return Metrics(loss={loss}, tokens={count})")
    return step.train.all(), step.evaluate.all()


class _Step:
    def __init__(
        self, program: Program, patterns: Mapping[str, str], sizes: Mapping[str, str]
    ) -> None:
        self._program, self._patterns, self._sizes = program, patterns, sizes
        self.text: dict[str, str] = {}  # a value of the step → its expression
        for arg in program.region.args:
            self.text[arg.value.name] = f"batch.{base(arg.value.name)}"
        # of a count that updates take, the keywords besides its text
        self._conditions: dict[str, dict[str, str]] = {}
        self._partial: dict[str, Line] = {}  # lines that are written when their result is summed
        self.metrics: dict[str, str] = {}  # of single ops, with the names of their values
        self._squares: dict[str, Squares] = {}
        self.train, self.evaluate = Function(), Function()
        self._of_ranks = rank_programs(program) if program.pipeline else (program,)
        has_layers = any(bucket.layers for bucket in program.buckets)
        self._extra_inputs = ["flat_params"] if has_layers else []  # of the model
        self._chunked = chunk_moves(program)
        self._runs = {run[0].name: run for run in runs(program)}  # by the first bucket's name
        self._targets = get_targets(program)

    def write(self, op: Op) -> None:
        """Writes an op of the step.

        A cast is part of the line that moves the value, and views of a bucket have no line.
        """
        match op.kind:
            case "unpack":
                pass
            case "cast":
                self.text[op.outputs[0].name] = self.text.get(op.inputs[0], "")
            case "coerce":
                self._coerce(op)
                self._add_summed(op)
            case "pack":
                self._pack(op)
            case "sum_squares":
                self._sum_squares(op)
            case _:
                self._write_line(op)

    # ---- ops that have a line

    def _write_line(self, op: Op) -> None:
        """Writes the line that an op has, or keeps the text for the line that reads the result."""
        line, result = get_line(self._program, op), op.outputs[0].name
        is_loss = result == self._program.region.yields[0].name
        if is_loss:
            line = evolve(line, target="loss", comment=LOSS_COMMENT, in_evaluation=True)
        fields = self._get_fields(op, line)
        self.text[result] = fill(line.formula, op, fields)
        self._keep_conditions(op, line, fields)
        if op.outputs[0].type.axes_in(Kind.PARTIAL):
            self._partial[result] = line
        elif line.target is not None:
            self._add_statement(line, result)
        if op.kind == RECIPROCAL.name:
            self._begin_sums()
        if is_loss:
            self._take_gradients()

    def _add_statement(self, line: Line, result: str) -> None:
        """Adds the statement of a line.

        One statement updates all buckets.
        """
        text = f"{line.target} = {self.text[result]}" if line.target else self.text[result]
        if text in self.train.lines[-1:]:
            return
        self.train.add(text, line.comment)
        if line.in_evaluation:
            self.evaluate.add(text, line.comment)
        if line.target:
            self.text[result] = line.target
        if line.metric:
            self.metrics[line.metric] = self.text[result]

    def _add_summed(self, coercion: Op) -> None:
        """Adds the statement of what a coercion has summed, if it waits for the sum."""
        if line := self._partial.get(coercion.inputs[0]):
            self._add_statement(line, coercion.outputs[0].name)

    def _get_fields(self, op: Op, line: Line) -> dict[str, str]:
        """The texts of an op's operands, by name, and the keywords of a count that updates take."""
        texts = [self._get_text(name) for name in op.inputs]
        fields = get_fields(op, texts)
        if op.inputs and op.inputs[-1] in self._squares:
            name, squares = [*fields][-1], list[Squares]()
            for operand in op.inputs:
                if operand in self._squares:
                    squares.append(self._squares[operand])
            statement = f"{line.target} = {fill(line.formula, op, {**fields, name: ''})}"
            fields[name] = sum_text(squares, len(statement))
        for operand in op.inputs:
            if operand in self._conditions:
                conditions = {**self._conditions[operand], "finite": self.text[operand]}
                fields[CONDITIONS] = get_conditions_text(conditions)
        return fields

    def _get_text(self, name: str) -> str:
        """The text of an operand; a router's biases go by their name in the model's state."""
        if name not in self.text and name in self._patterns:
            return literal(self._patterns[name])
        return self.text.get(name, "")

    def _keep_conditions(self, op: Op, line: Line, fields: Mapping[str, str]) -> None:
        """Keeps the conditions of a count: the line's own, or what its operand has."""
        result = op.outputs[0].name
        if line.conditions:
            self._conditions[result] = {}
            for keyword, formula in line.conditions.items():
                self._conditions[result][keyword] = fill(formula, op, fields)
        elif op.inputs and op.inputs[0] in self._conditions:
            self._conditions[result] = self._conditions[op.inputs[0]]

    def _begin_sums(self) -> None:
        """The zeros at which the sums of losses and loads begin."""
        if not self._program.pipeline:
            self._both("loss = torch.zeros_like(inv_num_tokens)")
            if self._program.losses > 1:
                self.train.add("router_loss = torch.zeros_like(loss)", "")
        for name, load in zip(load_names(self._program), self._loads(), strict=True):
            self.train.add(f"{name} = no_load(num_tokens, {load})", "")

    def _loads(self) -> list[str]:
        """The sizes of each load."""
        program = self._program
        loads = list[str]()
        for end in program.microbatches.yields[program.losses : program.microbatch_results]:
            dims = program.types[end.name].dims
            loads.append(", ".join(self._sizes.get(dim, str(program.size(dim))) for dim in dims))
        return loads

    def _take_gradients(self) -> None:
        """The gradients of all microbatches, when backward is over."""
        line = "gradients = state.gradients()"
        if self._chunked:
            line += "  # waits for the stages' reductions"
        elif self._extra_inputs:
            line += "  # waits for the reductions that backward began"
        self.train.lines.append(line)

    # ---- moves of buckets, and sums over ranks

    def _coerce(self, op: Op) -> None:
        """The sum of a scalar is part of another line, the sum of a bucket has its own line."""
        name, result = op.inputs[0], op.outputs[0]
        text = self.text.get(name, "")
        bucket = self._program.bucket_of(result.type)
        match [end.kind for end in ends(op)]:
            case _ if bucket and (bucket.layers or op in self._chunked):
                self._gather_per_layer(op, bucket)
            case [Kind.PARTIAL, Kind.INVARIANT] if name in self._squares:
                self._squares[result.name] = evolve(self._squares[name], group=self._group(op))
            case [Kind.PARTIAL, Kind.INVARIANT] if text == "router_loss":
                self.train.add(f"router_loss = all_reduce_(router_loss, {self._group(op)})", "")
            case [Kind.PARTIAL, Kind.INVARIANT] if text in load_names(self._program):
                self.train.add(
                    f"{text} = all_reduce_({text}, {self._group(op)})",
                    "tokens that chose each expert",
                )
            case [Kind.PARTIAL, Kind.INVARIANT] if not result.type.dims:
                text = f"all_reduce_({text}, {self._group(op)})"
            case [Kind.PARTIAL, Kind.INVARIANT]:
                call = f"all_reduce_({text}, {self._group(op)}{self._sent(result)})"
                self.train.add(call, f"P→I  {self._size(result)}")
            case [Kind.PARTIAL, Kind.SHARDED]:
                scattered = f"reduce_scatter_({text}, {self._group(op)}{self._sent(result)})"
                self.train.add(f"{text} = {scattered}", f"P→S  {self._size(result)}")
            case [Kind.SHARDED, Kind.REPLICATED]:
                self._both(f"all_gather_({text}, {self._group(op)})", f"S→R  {self._size(result)}")
            case [Kind.INVARIANT, Kind.SHARDED | Kind.REPLICATED]:
                pass  # the state already has a rank's part, and parameters as the model uses them
            case _:
                raise AssertionError(
                    f"emit: nothing does {op.outputs[0].name} at the scope of the step"
                )
        self.text[result.name] = text

    def _gather_per_layer(self, op: Op, bucket: Bucket) -> None:
        """Gathers of all layers or chunks begin here, in one line where they follow each other.

        Their reductions are part of backward.
        """
        run = self._runs.get(bucket.name)
        if ends(op)[0].kind is not Kind.SHARDED or not run:
            return
        self._both_flats()
        self._both(*unshard_ahead(self._program, run, self._group(op), self._patterns))

    def _both_flats(self) -> None:
        """The buffers of layers or chunks, in both functions.

        Layers reduce in the last microbatch, so training says how many there are.
        """
        if not (self._extra_inputs or self._chunked) or "flat_params" in self.text.values():
            return
        count = "" if self._chunked else "len(batch)"
        self.train.lines.append(f"flat_params = state.flat_params({count})")
        self.evaluate.lines.append("flat_params = state.flat_params()")
        self.text["flat_params"] = "flat_params"

    def _sent(self, value: Value) -> str:
        """The element type of a gradient's reduction, where it is not the state's."""
        dtype = value.type.dtype
        if dtype == self._program.params[0].type.dtype:
            return ""
        return f", dtype={DTYPES[dtype]}"

    def _size(self, value: Value) -> str:
        """A rank's part of a flat buffer."""
        sizes = {of_rank.elements(value.type) for of_rank in self._of_ranks}
        size = f"{max(sizes):,} × {value.type.dtype}"
        return f"up to {size}" if len(sizes) > 1 else size

    def _group(self, op: Op) -> str:
        """The name of the joint group of a reduction.

        Evaluation reduces counts and losses only, and gathers, so it asks for no other groups.
        """
        ranks = self._ranks(op.names("axes"), op.names("among"))
        name = self._group_name(ranks)
        if base(op.inputs[0]) in ("num_tokens", "loss") or ends(op)[0].kind is Kind.SHARDED:
            self.evaluate.groups[ranks] = name
        return name

    def _ranks(self, axes: tuple[str, ...], among: tuple[str, ...]) -> Ranks:
        return Ranks(axes, among if len(among) < self._program.degree(axes) else ())

    def _group_name(self, ranks: Ranks) -> str:
        """The name of a group, which training asks the mesh for."""
        if ranks not in self.train.groups:
            like = "_".join([axes_word(ranks.axes, self._program), *ranks.among])
            taken = LOCALS | self._targets
            taken |= {*load_names(self._program), *self.train.groups.values()}
            self.train.groups[ranks] = identifier(like, taken)
        return self.train.groups[ranks]

    def microbatches(self, region: Region) -> None:
        """Writes forward, backward and the sum of losses; the state's buckets add up gradients."""
        self._both_flats()
        if self._program.pipeline:
            self._rows()
        else:
            self._loop(region)
        self.text |= zip(
            (value.name for value in region.results), names_of_results(self._program), strict=False
        )
        for result in region.results:
            if bucket := self._program.bucket_of(result.type):
                self.text[result.name] = f"gradients[{literal(bucket.name)}]"

    def _rows(self) -> None:
        """The rows of the pipeline's schedule, and how stages reduce the gradients of chunks where
        these end.
        """
        assert self._program.pipeline, "emit: no pipeline"
        line = place(self._program.axis(self._program.pipeline.axis).span)
        seed, *router_shares = self._seeds()
        run, evaluate = ["model", "batch", seed, "mesh"], ["model", "batch", "mesh"]
        if self._chunked:
            self.train.lines += stage_reductions(self._program)
            run, evaluate = [*run, "flat_params"], [*evaluate, "flat_params"]
        run += [f"router_share={share}" for share in router_shares]
        if loads := load_names(self._program):
            run.append(f"loads=({', '.join(loads)},)")
        results = ", ".join(names_of_results(self._program))
        self.train.add(
            call(f"{results} = PIPELINE.run", run, 4, 0), f"forward and backward  {line}"
        )
        self.evaluate.add(f"loss = PIPELINE.evaluate({', '.join(evaluate)})", f"forward  {line}")

    def _seeds(self) -> list[str]:
        """The gradients of the losses, where backward begins.

        Backward may read them in any order.  The token loss comes first; the routers' loss counts
        as it is.
        """
        read = uses(self._program.backward)
        makers = dict[str, Op]()
        for op in self._program.region.body:
            if isinstance(op, Op) and op.outputs:
                makers[op.outputs[0].name] = op
        seeds = [self.text[name] for name in read if name in makers and OPS[makers[name].kind].line]
        return sorted(seeds, key=lambda seed: seed == ONE)

    def _loop(self, region: Region) -> None:
        program = self._program
        names = [base(arg.value.name) for arg in region.args]
        totals = names_of_results(program)
        sums = [f"{total}_sum" for total in totals]
        terms = list[str]()
        for total, seed in zip(totals, self._seeds(), strict=False):
            factor = "" if seed == ONE else f" * {seed}"
            terms.append(f"{total}_sum{factor}")
        self.train.lines += [
            f"for {', '.join(names)} in batch.microbatches():",
            f"    {', '.join(sums)} = model({', '.join([*names, *self._extra_inputs])})",
            f"    ({' + '.join(terms)}).backward()",
        ]
        for total in totals:
            detached = ".detach()" if total in LOSSES else ""
            self.train.lines.append(f"    {total} += {total}_sum{detached}")
        # evaluation drops nothing, so that the model gets no draws
        variables, arguments = list[str](), list[str]()
        for arg, name in zip(region.args, names, strict=True):
            is_drawn = are_draws(arg.value.type)
            variables.append("_" if is_drawn else name)
            arguments.append("None" if is_drawn else name)
        first = "[0]" * bool(sums[1:])
        forward = f"    loss += model({', '.join([*arguments, *self._extra_inputs])}){first}"
        if "_" in variables:
            forward += "  # no dropout"
        self.evaluate.lines += [f"for {', '.join(variables)} in batch.microbatches():", forward]

    def _pack(self, op: Op) -> None:
        """The flat parameters of buckets that ranks share out, or the flat gradients."""
        bucket = self._program.bucket(str(op.get("bucket")))
        buffers = "weights" if op.inputs == bucket.params else "gradients"
        is_whole = not (bucket.layers or self._program.pipeline)
        if buffers == "weights" and is_whole and "weights" not in self.text.values():
            self._both("weights = state.weights()")
            self.text["weights"] = "weights"
        self.text[op.outputs[0].name] = f"{buffers}[{literal(bucket.name)}]"

    def _sum_squares(self, op: Op) -> None:
        shared, once = op.names("once"), ""
        if shared:  # several stages have these, and one of them counts
            once = self._group_name(self._ranks((str(op.get("stages")),), shared))
        # of chunks, as many as a rank has
        star = "*" if self._program.pipeline and not shared else ""
        operands = tuple(star + self.text[name] for name in op.inputs)
        self._squares[op.outputs[0].name] = Squares(operands, once=once)

    def _both(self, code: str, comment: str = "") -> None:
        for function in (self.train, self.evaluate):
            function.add(code, comment)


# ---- flat buffers that move in parts, of layers or of a pipeline's chunks


def runs(program: Program) -> list[list[Bucket]]:
    """The buckets whose layers or chunks the step gathers; neighbours of the same layers go
    together.
    """
    moved = dict[str, Bucket]()
    for bucket in program.buckets:
        if bucket.per_layer or program.pipeline:
            moved[bucket.dim] = bucket
    runs: list[list[Bucket]] = []
    for op in program.region.body:
        if not (isinstance(op, Op) and op.kind == "coerce"):
            continue
        bucket = moved.get("".join(op.outputs[0].type.dims[-1:]))
        if ends(op)[0].kind is not Kind.SHARDED or bucket is None:
            continue
        last = runs[-1][-1] if runs else None
        if last and (last.layers, last.shard_axes) == (bucket.layers, bucket.shard_axes):
            runs[-1].append(bucket)
        else:
            runs.append([bucket])
    return runs


def unshard_ahead(
    program: Program, run: Sequence[Bucket], axis: str, patterns: Mapping[str, str]
) -> tuple[str, str]:
    """The line that begins to gather buckets over an axis, and its comment."""
    if program.pipeline:
        names = [bucket.name for bucket in run]
        size = f"{_largest(program, *run)} × {working_dtype(program, *run)}"
        comment = f"S→R  {size} per stage, awaited before its first forward"
    else:
        names = [repeat_of(patterns[bucket.params[0]]) for bucket in run]
        layers = " × ".join(f"{program.size(dim)}" for dim in run[0].layers)
        size = f"{layers} × {gather_size(program, *run)}"
        comment = f"S→R  {size}, awaited before each layer"
    flat_params = (f"flat_params[{literal(name)}]" for name in dict.fromkeys(names))
    return call("unshard_ahead", [axis, *flat_params], 4, after=0), comment


def stage_reductions(program: Program) -> Iterator[str]:
    """Comments on how stages reduce the chunks of each bucket, in the order of the IR."""
    for bucket in program.buckets:
        changes = list[str]()
        if bucket.shard_axes:
            changes.append(f"P→S over {axes_word(bucket.shard_axes, program)}")
        if bucket.reduce_axes:
            changes.append(f"P→I over {axes_word(bucket.reduce_axes, program)}")
        if changes:
            size = f"{_largest(program, bucket)} × {program.reduce_dtype(bucket)} per stage"
            yield f"# {bucket.name}: {', '.join(changes)}  {size}, after its last backward"


def _largest(program: Program, *buckets: Bucket) -> str:
    """The most elements that any rank has of one chunk of each of these buckets."""
    largest = dict[str, int]()
    for chunks_of_rank in chunks(program):
        for chunk in chunks_of_rank:
            largest[chunk.bucket] = max(chunk.size, largest.get(chunk.bucket, 0))
    text = " + ".join(f"{largest[bucket.name]:,}" for bucket in buckets)
    return f"up to ({text})" if len(buckets) > 1 else f"up to {text}"
