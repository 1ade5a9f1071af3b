"""The lines of `train_step` and `eval_step`, around the model's forward and backward.

Purpose: one line per reduction, in the order of the IR.  Non-goals: the model (`model_classes`),
and the buckets that move inside it layer by layer (`loop_hooks`).
"""

from collections.abc import Iterator, Mapping, Sequence

from attrs import define, evolve, field, frozen

from ..analysis.stage_buckets import chunk_moves, chunks
from ..analysis.stage_program import rank_programs
from ..ir import Bucket, Kind, Op, Program, Region, Value, base
from ..ir.placements import ends
from ..ops.dropout import are_draws
from .loop_hooks import gathered, repeat_of, working
from .naming import DTYPES, WIDTH, axes_word, call, exploded, identifier, literal, place

LOCALS = set(
    """
        documents draws finite flat_params grad_norm gradients inv_num_tokens labels limit load
        load_sum loss loss_sum num_tokens router_loss router_loss_sum scale tokens usual weights
    """.split()
)
"""The names that the lines below give their values."""

_FINITE = "finite="
"""The argument by which an update knows whether the step's values are as they should be."""

LOSSES = "loss", "router_loss"
"""The names of a step's losses."""


def names_of_results(program: Program) -> tuple[str, ...]:
    """The names of what microbatches make and a step adds up: losses and loads."""
    return (*LOSSES[: program.losses], *load_names(program))


def load_names(program: Program) -> tuple[str, ...]:
    """The names of a step's loads: numbered, if there are several."""
    return ("load",) if program.routes == 1 else tuple(f"load_{i}" for i in range(program.routes))


# ---- groups of ranks, functions under construction, sums of squares


@frozen
class Ranks:
    """A group of ranks: over some axes, or some of the ranks of one."""

    axes: tuple[str, ...]
    among: tuple[str, ...] = ()

    def asked(self) -> str:
        """How the mesh is asked for it."""
        if self.among:
            return f"mesh.among({', '.join([*map(literal, self.axes), *self.among])})"
        return f"mesh.axis({', '.join(map(literal, self.axes))})"


@define
class Function:
    """The lines of one function, and the groups over axes that it asks the mesh for."""

    groups: dict[Ranks, str] = field(factory=dict[Ranks, str])  # the names
    lines: list[str] = field(factory=list[str])

    def add(self, code: str, comment: str) -> None:
        """A line with its comment, if any."""
        self.lines += lined(code, comment) if comment else [code]

    def all(self) -> list[str]:
        """The groups first."""
        groups = [f"{name} = {ranks.asked()}" for ranks, name in self.groups.items()]
        return [*(["mesh = state.mesh"] if groups else []), *groups, *self.lines]


def lined(code: str, comment: str) -> list[str]:
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
        arguments = [*self.operands, *([f"once={self.once}"] if self.once else [])]
        if not self.group:
            return call("sum_squares", arguments, indent, others)
        line = f"all_reduce_(sum_squares({', '.join(arguments)}), {self.group})"
        if indent + len(line) + others <= WIDTH:
            return line
        return exploded(
            "all_reduce_", [call("sum_squares", arguments, indent + 4), self.group], indent
        )


# ---- the step


def step_lines(
    program: Program, patterns: Mapping[str, str], sizes: Mapping[str, str]
) -> tuple[list[str], list[str]]:
    """The bodies of the two functions for the program's step, without indentation.

    `patterns` are the parameters' names in the model's state, `sizes` those of dims' sizes.
    """
    step = _Step(program, patterns, sizes)
    for stmt in program.region.body:
        if isinstance(stmt, Region):
            step.microbatches(stmt)
        else:
            step.write(stmt)
    loss, norm, count = (step.text[end.name] for end in program.region.yields[:3])
    scale = ", loss_scale=scale" if "scale" in step.text.values() else ""
    limit = ", limit=limit" if "limit" in step.text.values() else ""
    routers = ", router_loss=router_loss" if program.losses > 1 else ""
    loads = f", loads=({', '.join(load_names(program))},)" if program.routes else ""
    step.train.lines.append(
        f"return Metrics(loss={loss}, norm={norm}, tokens={count}{routers}{loads}{scale}{limit})"
    )
    step.evaluate.lines.append(f"return Metrics(loss={loss}, tokens={count})")
    return step.train.all(), step.evaluate.all()


class _Step:
    def __init__(
        self, program: Program, patterns: Mapping[str, str], sizes: Mapping[str, str]
    ) -> None:
        self._program, self._patterns, self._sizes = program, patterns, sizes
        self.text: dict[str, str] = {}  # a value of the step → its expression
        self._squares: dict[str, Squares] = {}
        self._seed = "inv_num_tokens"  # the gradient from which backward begins
        self._scale = ""  # of the losses, if they have one
        self.train, self.evaluate = Function(), Function()
        self._of_ranks = rank_programs(program) if program.pipeline else (program,)
        self._given = ["flat_params"] if any(bucket.layers for bucket in program.buckets) else []
        self._chunked = chunk_moves(program)
        self._runs = {run[0].name: run for run in runs(program)}  # by the first bucket's name

    def write(self, op: Op) -> None:
        """An op of the step: a cast is part of what moves the value, and views of a bucket are
        no line.
        """
        if op.kind == "cast":
            self.text[op.outputs[0].name] = self.text.get(op.inputs[0], "")
        elif op.kind != "unpack":
            getattr(self, f"_{op.kind}")(op)

    def _coerce(self, op: Op) -> None:
        """The sum of a scalar is part of another line, that of a bucket is a line."""
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
                # a rank's part of a bucket, and its parameters as the model uses them, are there
                pass
            case _:
                raise AssertionError(
                    f"emit: nothing does {op.outputs[0].name} at the scope of the step"
                )
        self.text[result.name] = text

    def _gather_per_layer(self, op: Op, bucket: Bucket) -> None:
        """Gathers of all layers or chunks begin here, together where they follow each other;
        reductions in backward.
        """
        run = self._runs.get(bucket.name)
        if ends(op)[0].kind is not Kind.SHARDED or not run:
            return
        self._both_flats()
        self._both(*unshard_ahead(self._program, run, self._group(op), self._patterns))

    def _both_flats(self) -> None:
        """The buffers of layers, which training is told the number of microbatches for, or of
        chunks.
        """
        if (self._given or self._chunked) and "flat_params" not in self.text.values():
            self.train.lines.append(
                "flat_params = state.flat_params()"
                if self._chunked
                else "flat_params = state.flat_params(len(batch))"
            )
            self.evaluate.lines.append("flat_params = state.flat_params()")
            self.text["flat_params"] = "flat_params"

    def _sent(self, value: Value) -> str:
        """The element type in which a gradient is reduced, where it is not that of the state."""
        dtype = value.type.dtype
        return "" if dtype == self._program.params[0].type.dtype else f", dtype={DTYPES[dtype]}"

    def _size(self, value: Value) -> str:
        """A rank's part of a flat buffer."""
        sizes = {each.elements(value.type) for each in self._of_ranks}
        return f"{'up to ' if len(sizes) > 1 else ''}{max(sizes):,} × {value.type.dtype}"

    def _group(self, op: Op) -> str:
        """The name of the joint group of a reduction; evaluation asks for those of counts and
        losses only.
        """
        ranks = self._ranks(op.names("axes"), op.names("among"))
        name = self._named(ranks)
        if base(op.inputs[0]) in ("num_tokens", "loss") or ends(op)[0].kind is Kind.SHARDED:
            self.evaluate.groups[ranks] = name
        return name

    def _ranks(self, axes: tuple[str, ...], among: tuple[str, ...]) -> Ranks:
        return Ranks(axes, among if len(among) < self._program.degree(axes) else ())

    def _named(self, ranks: Ranks) -> str:
        """The name of a group, which training asks the mesh for."""
        if ranks not in self.train.groups:
            like = "_".join([axes_word(ranks.axes, self._program), *ranks.among])
            taken = LOCALS | {*load_names(self._program), *self.train.groups.values()}
            self.train.groups[ranks] = identifier(like, taken)
        return self.train.groups[ranks]

    def _count_valid(self, op: Op) -> None:
        self.text[op.outputs[0].name] = f"count_valid(batch.{base(op.inputs[0])})"

    def _reciprocal(self, op: Op) -> None:
        self._both(f"num_tokens = {self.text[op.inputs[0]]}", "tokens with a label, over all ranks")
        self._both(
            "inv_num_tokens ="
            f" num_tokens.clamp(min=1).to({DTYPES[str(op.get('dtype'))]}).reciprocal()"
        )
        if not self._program.pipeline:
            self._both("loss = torch.zeros_like(inv_num_tokens)")
            if self._program.losses > 1:
                self.train.add("router_loss = torch.zeros_like(loss)", "")
        for name, load in zip(load_names(self._program), self._loads(), strict=True):
            self.train.add(f"{name} = no_load(num_tokens, {load})", "")
        self.text |= {op.inputs[0]: "num_tokens", op.outputs[0].name: "inv_num_tokens"}

    def _loads(self) -> list[str]:
        """The sizes of each load."""
        of = self._program.microbatches.yields[self._program.losses : self._program.made]
        dims = (self._program.types[end.name].dims for end in of)
        return [
            ", ".join(self._sizes.get(dim, str(self._program.size(dim))) for dim in each)
            for each in dims
        ]

    def _one(self, op: Op) -> None:
        self.text[op.outputs[0].name] = "1.0"

    def _loss_scale(self, op: Op) -> None:
        self.train.lines.append(
            "scale = state.loss_scale()  # of gradients, so that float16 holds them"
        )
        self.text[op.outputs[0].name] = self._scale = "scale"

    def microbatches(self, region: Region) -> None:
        """Forward, backward and the sum of losses; gradients add up in the state's buckets."""
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
        """The rows of the pipeline's schedule, and how stages reduce the gradients of chunks
        where they end.
        """
        assert self._program.pipeline, "emit: no pipeline"
        line = place(self._program.axis(self._program.pipeline.axis).span)
        run, evaluate = ["model", "batch", self._seed, "mesh"], ["model", "batch", "mesh"]
        if self._chunked:
            self.train.lines += stage_reductions(self._program)
            run, evaluate = [*run, "flat_params"], [*evaluate, "flat_params"]
        if self._program.losses > 1:
            run.append(f"router_share={self._scale or 1.0}")
        if loads := load_names(self._program):
            run.append(f"loads=({', '.join(loads)},)")
        results = ", ".join(names_of_results(self._program))
        self.train.add(call(f"{results} = PIPELINE.run", run, 4, 0), f"forward, backward  {line}")
        self.evaluate.add(f"loss = PIPELINE.evaluate({', '.join(evaluate)})", f"forward  {line}")

    def _loop(self, region: Region) -> None:
        names = [base(arg.value.name) for arg in region.args]
        kept = [
            "_" if are_draws(arg.value.type) else name
            for arg, name in zip(region.args, names, strict=True)
        ]
        program, totals = self._program, names_of_results(self._program)
        sums = [f"{total}_sum" for total in totals]
        routers = (
            f" + router_loss_sum{f' * {self._scale}' if self._scale else ''}"
            if program.losses > 1
            else ""
        )
        added = [f"{total}_sum{'.detach()' if total in LOSSES else ''}" for total in totals]
        self.train.lines += [
            f"for {', '.join(names)} in batch.microbatches():",
            f"    {', '.join(sums)} = model({', '.join([*names, *self._given])})",
            f"    (loss_sum * {self._seed}{routers}).backward()",
            *(f"    {total} += {each}" for total, each in zip(totals, added, strict=True)),
        ]
        given = ", ".join(["None" if name == "_" else name for name in kept] + self._given)
        self.evaluate.lines += [
            f"for {', '.join(kept)} in batch.microbatches():",
            f"    loss += model({given}){'[0]' * bool(sums[1:])}"
            + ("  # nothing is dropped" if "_" in kept else ""),
        ]

    def _mul(self, op: Op) -> None:
        """The gradient from which backward begins, with its loss scale; or the step's loss."""
        if self.text[op.inputs[1]] == "scale":
            self._seed = self.text[op.outputs[0].name] = "inv_num_tokens * scale"
            return
        self._both(
            f"loss = {self.text[op.inputs[0]]} * inv_num_tokens", "mean over the step's labels"
        )
        self.text[op.outputs[0].name] = "loss"
        whose = (
            "the stages' reductions"
            if self._chunked
            else "the reductions of backward"
            if self._given
            else ""
        )
        self.train.lines.append(
            f"gradients = state.gradients(){f'  # waits for {whose}' if whose else ''}"
        )

    def _pack(self, op: Op) -> None:
        """The flat parameters of buckets that ranks share out, or the flat gradients."""
        bucket = self._program.bucket(str(op.get("bucket")))
        of = "weights" if op.inputs == bucket.params else "gradients"
        if (
            of == "weights"
            and not (bucket.layers or self._program.pipeline)
            and "weights" not in self.text.values()
        ):
            self._both("weights = state.weights()")
            self.text["weights"] = "weights"
        self.text[op.outputs[0].name] = f"{of}[{literal(bucket.name)}]"

    def _sum_squares(self, op: Op) -> None:
        held = op.names("once")
        once = self._named(self._ranks((str(op.get("stages")),), held)) if held else ""
        # of chunks, as many as a rank has
        each = "*" if self._program.pipeline and not held else ""
        self._squares[op.outputs[0].name] = Squares(
            tuple(each + self.text[name] for name in op.inputs), once=once
        )

    def _grad_norm(self, op: Op) -> None:
        self._norm(op, op.inputs, "")

    def _unscaled_norm(self, op: Op) -> None:
        self._norm(op, op.inputs[1:], " / scale")

    def _norm(self, op: Op, squares: Sequence[str], unscaled: str) -> None:
        terms = [self._squares[each] for each in squares]
        others = len(f"grad_norm = .sqrt(){unscaled}")
        total = (
            terms[0].text(4, others)
            if len(terms) == 1
            else f"({' + '.join(each.text(0) for each in terms)})"
        )
        if len(terms) > 1 and len(total) + others > WIDTH - 4:
            total = "(\n        " + "\n        + ".join(each.text(8) for each in terms) + "\n    )"
        self.train.lines.append(f"grad_norm = {total}.sqrt(){unscaled}")
        self.text[op.outputs[0].name] = "grad_norm"

    def _clip_scale(self, op: Op) -> None:
        limit = op.get("max")
        self.text[op.outputs[0].name] = f"clip_scale(grad_norm, {literal(limit)})" if limit else ""

    def _unscaled(self, op: Op) -> None:
        self.text[op.outputs[0].name] = f"{self.text[op.inputs[0]] or 1} / scale"

    def _if_finite(self, op: Op) -> None:
        """With a loss scale a norm that is not finite is an overflow, of which the state makes
        something else.
        """
        if self._scale:
            self.text[op.outputs[0].name] = (
                f"num_tokens == 0, overflow=~grad_norm.isfinite(), {_FINITE}loss.isfinite()"
            )
            return
        self.train.lines.append(
            "finite = loss.isfinite() & grad_norm.isfinite()  # or else the step changes nothing"
        )
        self.text[op.outputs[0].name] = f"num_tokens == 0, {_FINITE}finite"

    def _loss_limit(self, op: Op) -> None:
        self.text[op.outputs[0].name] = "limit"
        call = f"limit = state.loss_limit({literal(op.get('deviations'))})"
        self.train.lines.append(
            f"{call}  # by the losses of the steps before; a loss above it is a spike"
        )

    def _if_below(self, op: Op) -> None:
        skipped, finite, condition = self.text[op.inputs[0]].partition(_FINITE)
        self.train.lines.append(f"usual = {condition} & (loss <= limit)")
        self.text[op.outputs[0].name] = f"{skipped}{finite}usual"

    def _balanced(self, op: Op) -> None:
        """All biases of a route's routers, by its load."""
        bias, load, count = op.inputs
        given = (
            f"{literal(self._patterns[bias])}, {self.text[load]}, rate={literal(op.get('rate'))}"
        )
        self.train.lines.append(f"state.balance({given}, skip={self.text[count]})")

    def _update(self, op: Op) -> None:
        """All buckets' updates are one call, which scales too."""
        scale = self.text[op.inputs[1]]
        scale = f"scale={scale}, " if scale else ""
        line = f"state.update(lr, {scale}skip={self.text[op.inputs[2]]})"
        if self.train.lines[-1] != line:
            self.train.lines.append(line)

    def _both(self, code: str, comment: str = "") -> None:
        for function in (self.train, self.evaluate):
            function.add(code, comment)


# ---- flat buffers that move in parts, of layers or of a pipeline's chunks


def runs(program: Program) -> list[list[Bucket]]:
    """The buckets whose layers or chunks the step gathers; neighbours of the same layers go
    together.
    """
    moved = {
        bucket.dim: bucket for bucket in program.buckets if bucket.per_layer or program.pipeline
    }
    runs: list[list[Bucket]] = []
    for op in program.region.body:
        if isinstance(op, Op) and op.kind == "coerce" and ends(op)[0].kind is Kind.SHARDED:
            if not (bucket := moved.get("".join(op.outputs[0].type.dims[-1:]))):
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
    names = [
        bucket.name if program.pipeline else repeat_of(patterns[bucket.params[0]]) for bucket in run
    ]
    flat_params = (f"flat_params[{literal(name)}]" for name in dict.fromkeys(names))
    line = call("unshard_ahead", [axis, *flat_params], 4, after=0)
    if program.pipeline:
        return (
            line,
            f"S→R  {_largest(program, *run)} × {working(program, *run)} a stage, awaited"
            " before its first forward",
        )
    layers = " × ".join(f"{program.size(dim)}" for dim in run[0].layers)
    return line, f"S→R  {layers} × {gathered(program, *run)}, awaited before each layer"


def stage_reductions(program: Program) -> Iterator[str]:
    """Comments on how stages reduce the chunks of each bucket, in the order of the IR."""
    for bucket in program.buckets:
        over = [("P→S", bucket.shard_axes), ("P→I", bucket.reduce_axes)]
        if changes := ", ".join(
            f"{change} over {axes_word(axes, program)}" for change, axes in over if axes
        ):
            sizes = f"{_largest(program, bucket)} × {program.reduce_dtype(bucket)}"
            yield f"# {bucket.name}: {changes}  {sizes} a stage, after its last backward"


def _largest(program: Program, *of: Bucket) -> str:
    """The most elements that any rank has of one chunk of each of these buckets."""
    own = [chunk for each in chunks(program) for chunk in each]
    sizes = [max(chunk.size for chunk in own if chunk.bucket == bucket.name) for bucket in of]
    text = " + ".join(f"{size:,}" for size in sizes)
    return f"up to {f'({text})' if len(of) > 1 else text}"
