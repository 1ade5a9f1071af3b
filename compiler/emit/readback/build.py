"""Compares what `build` makes with the program: the model, each parameter in its bucket, the
optimizer, element types.

Non-goals: the model's classes (`weights`), and the settings of the run (`plan`).
"""

import ast
from collections.abc import Mapping
from typing import cast

from ...analysis.kernel_tiles import accumulates, optimizer_kernel
from ...analysis.param_uses import leaves, products
from ...config.settings import ON, Flow
from ...ir import Bucket, Program, walk
from ..naming import DTYPES
from .machine import Machine
from .terms import Event, Term, called, demand, frozen_key, within, wrong
from .values import Class, Instance


class Build:
    """Runs `build` once; `model` is the class of the model."""

    def __init__(self, machine: Machine, node: ast.FunctionDef, program: Program) -> None:
        self._machine, self._node, self._program = machine, node, program
        machine.log = []
        self._made: object = machine.function(node, [machine.terms.name("mesh")])
        self._at = {event.term: event.node for event in machine.log if isinstance(event, Event)}
        self.model, self.whole, self._holders = self._model()

    def _model(self) -> tuple[Class, object, object]:
        """The class, the model, and of a pipeline the stages that have each parameter."""
        result = self._made
        results = cast(tuple[object, ...], result) if isinstance(result, tuple) else (None,)
        demand(self._node, len(results) == 2, "does not return the model and its state")
        whole = results[0]
        if isinstance(whole, Instance) and not self._program.pipeline:
            return whole.of, whole, None
        classes = [
            candidate
            for candidate in self._machine.classes
            if whole is self._of_stages(candidate, 0)
        ]
        demand(self._node, bool(self._program.pipeline and classes), "makes another model")
        return classes[0], whole, self._of_stages(classes[0], 1)

    def _of_stages(self, model_class: Class, index: int) -> object:
        """The model of a rank's stages, or the stages that have each parameter."""
        log, self._machine.log = self._machine.log, []
        term = self._machine.spec("PIPELINE.build(of, mesh)", of=model_class)
        self._machine.log = log
        return self._machine.terms("item", term, index, 2)

    def check(self, paths: Mapping[str, str]) -> None:
        """Compares it with the program; `paths` are the parameters' names in the model's state."""
        program, machine = self._program, self._machine
        _, state = cast(tuple[object, object], self._made)
        state_call = called(state, "TrainState")
        if state_call is None or len(state_call[0]) != 4 or not isinstance(state_call[0][2], dict):
            raise wrong(self._node, "makes no state of model, mesh, buckets and optimizer")
        buckets = cast(dict[object, object], state_call[0][2])
        self._check_buckets(buckets, paths)
        (master,) = {p.type.dtype for p in program.params}
        options = f"dtype={DTYPES[self.dtype()]}, master={DTYPES[master]}"
        options += ", accumulate=Accumulate()" if accumulates(program) else ""
        options += ", stages_of_param=holders" if program.pipeline else ""
        wanted = machine.spec(
            f"TrainState(model, mesh, buckets, {_optimizer(program)}, {options})",
            model=self.whole, buckets=buckets, holders=self._holders,
        )  # fmt: skip
        demand(self._at_of(state), state is wanted, f"the state is {state}, not {wanted}")
        self._check_compiled(within([self._made]))

    def _check_compiled(self, used: "set[Term]") -> None:
        """torch.compile compiles the classes without repeats inside, if any; nothing else is
        run.
        """
        compiled: object = None
        if self._program.train.compile == ON:
            classes = [
                model_class
                for model_class in self._machine.classes
                if not _has_modules(model_class.node)
            ]
            compiled = self._machine.spec(
                "compile_each(model, *of)", model=self.whole, of=tuple(classes)
            )
            demand(
                self._node,
                compiled in self._at,
                "does not compile the classes without repeats inside",
            )
        for term, node in self._at.items():
            demand(node, term in used or term is compiled, f"nothing uses `{ast.unparse(node)}`")

    def dtype(self) -> str:
        """The element type of parameters as the model uses them, one for all."""
        types, param_of_value = self._program.types, leaves(self._program)
        (dtype,) = {
            types[n].dtype
            for op in walk(self._program.forward.body)
            for n in op.inputs
            if n in param_of_value
        } or {self._program.params[0].type.dtype}
        return dtype

    def _check_buckets(self, buckets: "dict[object, object]", paths: Mapping[str, str]) -> None:
        """A bucket's groups have its parameters, each once and with its settings."""
        program, names = self._program, [bucket.name for bucket in self._program.buckets]
        demand(self._node, [*buckets] == names, f"the buckets are {', '.join(map(str, buckets))}")
        for bucket in program.buckets:
            bucket_call = called(buckets[bucket.name], "Bucket")
            if bucket_call is None:
                raise wrong(self._node, f"`{bucket.name}` is no bucket")
            node, (groups, options) = self._at_of(buckets[bucket.name]), bucket_call
            self._check_bucket(node, bucket, [*map(self._group, groups)], paths)
            wanted = dict(sorted(_kept(self._machine, bucket, program).items()))
            demand(
                node,
                frozen_key(wanted) == frozen_key(options),
                f"{bucket.name} is kept as {options}, not {wanted}",
            )

    def _at_of(self, term: object) -> ast.AST:
        """Where a term was made."""
        return self._at.get(term, self._node) if isinstance(term, Term) else self._node

    def _check_bucket(
        self, node: ast.AST, bucket: Bucket, groups: "list[Group]", paths: Mapping[str, str]
    ) -> None:
        actual = sorted(
            (name, settings) for several, settings in groups for names in several for name in names
        )
        wanted = sorted(
            (paths.get(param, ""), _settings(param, self._program)) for param in bucket.params
        )
        demand(node, actual == wanted, f"bucket {bucket.name} is {actual}, not {wanted}")
        together = sorted(names for several, _ in groups for names in several if len(names) > 1)
        demand(
            node,
            together == _together(bucket, self._program, paths),
            f"lays {together} side by side",
        )

    def _group(self, group: object) -> "Group":
        """The patterns of a group, weights that lie side by side together, and its settings."""
        group_call, node = called(group, "ParamGroup"), self._at_of(group)
        if group_call is None:
            raise wrong(node, f"`{group}` is no group")
        patterns, options = group_call
        decay, scale = options.get("weight_decay"), options.get("lr_scale", 1.0)
        if not (patterns and isinstance(decay, float) and isinstance(scale, float)) or not {
            *options
        } <= {
            "weight_decay",
            "lr_scale",
        }:
            raise wrong(node, f"sets {sorted(options)}")
        several = [
            cast(tuple[object, ...], names) if isinstance(names, tuple) else (names,)
            for names in patterns
        ]
        return [tuple(map(str, names)) for names in several], (decay, scale)


Settings = tuple[float, float]
"""Weight decay, and the factor on the learning rate."""

Group = tuple[list[tuple[str, ...]], Settings]


def _has_modules(node: ast.ClassDef) -> bool:
    """Whether a class has the modules of a repeat."""
    return any(
        isinstance(inner, ast.Attribute) and inner.attr in ("ModuleList", "ModuleDict")
        for inner in ast.walk(node)
    )


def _optimizer(program: Program) -> str:
    settings = program.train.optimizer
    if settings.kind == "adamw":
        tile = f", tile=TILES[{name!r}]" if (name := optimizer_kernel(program)) else ""
        return f"AdamW(betas={tuple(settings.betas)!r}, eps={settings.eps!r}{tile})"
    return f"SGD(momentum={settings.momentum!r})"


def _together(bucket: Bucket, program: Program, paths: Mapping[str, str]) -> list[tuple[str, ...]]:
    """The patterns of each product with several weights of the bucket, in the product's order."""
    return sorted(
        tuple(paths[name] for name in names)
        for names in products(program)
        if names[0] in bucket.params
    )


def _kept(machine: Machine, bucket: Bucket, program: Program) -> dict[str, object]:
    """The options of a bucket that are not the default."""
    moves = bucket.per_layer or program.pipeline is not None
    facts = ["reshard_after_forward", "shard_gradients", "shard_axes", "per_layer"] + [
        "reduce_axes"
    ] * moves
    options: dict[str, object] = {
        fact: setting for fact in facts if (setting := getattr(bucket, fact))
    }
    if moves and (sent := program.reduce_dtype(bucket)) != bucket.type.dtype:
        options["reduce_dtype"] = machine.spec(DTYPES[sent])
    if pipeline := program.pipeline:
        among = pipeline.ranks_of(bucket.params[0])
        options |= {"stages": pipeline.axis} | ({"among": among} if len(among) > 1 else {})
    ahead = program.flow.prefetch
    is_freed = bucket.per_layer and bucket.reshard_after_forward
    return options | ({"prefetch": ahead} if ahead != Flow().prefetch and is_freed else {})


def _settings(param: str, program: Program) -> Settings:
    """The settings of a parameter's group."""
    group = program.train.optimizer.group_of(param)
    assert group.weight_decay is not None, f"emit: no weight decay of {param}"
    return group.weight_decay, group.lr_scale
