"""`op NAME (…) -> […], … over … from "module:function"`: what a user op takes, and its calls as ops
of the IR.

The signature makes sense, and there is such a function: it is looked for in the text of the module
beside the plan, which is never run.  Files that a program imports can be copied beside it.
"""

import ast
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from keyword import iskeyword
from pathlib import Path, PurePath

from attrs import frozen

from ..ir import Attr, Type
from ..ops import OPS, Attribute, OpDef, Operand, TypingError
from ..ops.protocol import DETERMINISTIC
from ..ops.user import LEAD
from ..syntax import tree as syntax
from ..syntax.diagnostics import Diagnostics, Note, PlanError, did_you_mean, wrong
from ..syntax.limits import load
from ..syntax.source import Source, Span
from .errors import check_name

NOT_OURS = {"scalec", "torch", "torch_ops", "train", *sys.stdlib_module_names}
"""The names that a file beside `train.py` must not have: it would hide the program, or a module
it imports.
"""


@frozen
class UserOp:
    """A declared op: `entry` says which arguments its calls have."""

    declared: syntax.UserOp
    entry: OpDef

    def attributes(
        self, types: Sequence[Type], numbers: Sequence[float]
    ) -> tuple[tuple[str, Attr], ...]:
        """The attributes of a call, with its dims in place of the signature's.

        Raises TypingError.
        """
        tensors = [operand for operand in self.declared.operands if operand.dims]
        dims_by_name: dict[str, tuple[str, ...]] = {}
        for operand, type in zip(tensors, types, strict=True):
            _match(operand, type, dims_by_name)
        along: list[str] = []
        for name in self.declared.along:
            along += dims_by_name[name.name]
        attrs: list[tuple[str, Attr]] = [
            ("function", self.declared.function.value),
            ("takes", tuple(_words(operand.dims, dims_by_name) for operand in tensors)),
            ("gives", tuple(_words(dims, dims_by_name) for dims in self.declared.gives)),
            ("along", tuple(along)),
            ("linear", tuple(str(i) for i, operand in enumerate(tensors) if operand.is_linear)),
            ("constants", tuple(map(repr, numbers))),
            *self._positions(dims_by_name),
            *self._causal(dims_by_name),
        ]
        if self.declared.is_deterministic:
            attrs.append((DETERMINISTIC.name, "on"))
        return tuple(attrs)

    def _positions(self, dims_by_name: Mapping[str, tuple[str, ...]]) -> list[tuple[str, Attr]]:
        """The attribute with the keywords that the function takes positions by, if it does."""
        words = list[str]()
        for position in self.declared.positions:
            (dim,) = dims_by_name[position.dim.name]
            words.append(f"{position.keyword} {dim}")
        return [("positions", tuple(words))] if words else []

    def _causal(self, dims_by_name: Mapping[str, tuple[str, ...]]) -> list[tuple[str, Attr]]:
        """The attribute with the dim along which the function is causal, if it says so."""
        if not self.declared.causal:
            return []
        (dim,) = dims_by_name[self.declared.causal.name]
        return [("causal", dim)]


def _match(
    operand: syntax.UserOperand, type: Type, dims_by_name: dict[str, tuple[str, ...]]
) -> None:
    """Adds the dims that the names of `operand` mean in a call, where it is of `type`."""
    names = [dim.name for dim in operand.dims]
    cut = len(type.dims) - len(names) + names.count(LEAD)
    call_dims = [type.dims[:cut]] * names.count(LEAD) + [(dim,) for dim in type.dims[max(cut, 0) :]]
    fits = cut == 0 or (cut > 0 and LEAD in names)
    if not fits or not _agree(names, call_dims, dims_by_name):
        meanings: list[str] = []
        for name, dims in dims_by_name.items():
            meanings.append(f"{name} is {' '.join(dims) or 'no dim'}")
        message = f"`{operand.name}[{', '.join(names)}]` cannot be [{', '.join(type.dims)}]"
        if meanings:
            message += f" where {', '.join(meanings)}"
        raise TypingError(message)


def _agree(
    names: Sequence[str],
    call_dims: Sequence[tuple[str, ...]],
    dims_by_name: dict[str, tuple[str, ...]],
) -> bool:
    """Whether names mean the same dims as before; adds the names before the first that does not."""
    for name, dims in zip(names, call_dims, strict=True):
        if dims_by_name.setdefault(name, dims) != dims:
            return False
    return True


def _words(dims: Iterable[syntax.Name], dims_by_name: Mapping[str, tuple[str, ...]]) -> str:
    """Dims of a signature, with the dims of the call in their place."""
    words: list[str] = []
    for dim in dims:
        words += (LEAD,) if dim.name == LEAD else dims_by_name[dim.name]
    return " ".join(words)


def user_ops(
    declared: Iterable[syntax.UserOp], source: Source, diagnostics: Diagnostics
) -> dict[str, UserOp]:
    """The user ops of a plan by name, without ops whose signature is wrong."""
    ops: dict[str, UserOp] = {}
    modules: dict[str, Span] = {}
    for op in declared:
        with diagnostics.catch():
            _check_signature(op, ops)
            with diagnostics.catch():
                modules.setdefault(_check_function(op, source), op.function.span)
            ops[op.name.name] = UserOp(op, _entry(op))
            continue
        diagnostics.doubt(op.name.name)
    for module, span in modules.items():
        with diagnostics.catch():
            get_files(module, Path(source.path).parent, span)
    return ops


def _entry(op: syntax.UserOp) -> OpDef:
    """The arguments of a user op's calls: tensors are operands, numbers attributes."""
    operands: list[Operand] = []
    attributes: list[Attribute] = []
    for operand in op.operands:
        if operand.dims:
            operands.append(Operand(operand.name.name))
        else:
            attributes.append(Attribute(operand.name.name))
    return OpDef(op.name.name, "A user op.", operands=tuple(operands), attributes=tuple(attributes))


def _check_signature(op: syntax.UserOp, ops: Mapping[str, UserOp]) -> None:
    """Raises PlanError where the signature of `op` is wrong; `ops` are declared before it."""
    check_name(op.name)
    if op.name.name in OPS:
        raise wrong(
            "E0207", f"`{op.name}` is an op of the language", op.name.span, "redeclared here"
        )
    if first := ops.get(op.name.name):
        notes = [Note(first.declared.name.span, "declared here")]
        raise wrong(
            "E0207", f"op `{op.name}` is declared twice", op.name.span, "repeated", notes=notes
        )
    keywords = [position.keyword for position in op.positions]
    _check_no_duplicates([operand.name for operand in op.operands] + keywords)
    for operand in op.operands:
        _check_no_duplicates(operand.dims)
    for dims in (*op.gives, op.along):
        _check_no_duplicates(dims)
    _check_operands(op)
    _check_positions(op)
    _check_causal(op)
    for dims in op.gives:
        _check_among(dims, _operand_dims(op), "a dim of no operand")
        _check_among(
            op.along, dims, "a dim that the result lacks, so that it has no slices along it"
        )


def _operand_dims(op: syntax.UserOp) -> list[syntax.Name]:
    """The dims of all operands, one after the other."""
    dims: list[syntax.Name] = []
    for operand in op.operands:
        dims += operand.dims
    return dims


def _check_operands(op: syntax.UserOp) -> None:
    """Tensors first, one at least; numbers after them."""
    numbers = [operand for operand in op.operands if not operand.dims]
    last_operands = op.operands[len(op.operands) - len(numbers) :]
    if not op.operands[0].dims or any(operand.dims for operand in last_operands):
        help = "write `x[.., ffn]` for a tensor, and put numbers after all tensors"
        raise wrong(
            "E0217", "a user op takes tensors, then numbers", numbers[0].span, "a number", help
        )
    for operand in numbers:
        if operand.is_linear:
            help = "write `linear` only before tensors"
            message = f"`{operand.name}` is a number"
            raise wrong("E0217", message, operand.span, "linear in no dims", help)


def _check_positions(op: syntax.UserOp) -> None:
    """Positions are along dims of operands, and have keywords that Python allows."""
    dims = [dim for dim in _operand_dims(op) if dim.name != LEAD]
    for position in op.positions:
        _check_among([position.dim], dims, "a dim that no operand names")
        if iskeyword(position.keyword.name):
            help = "give it another name"
            raise wrong(
                "E0217",
                f"`{position.keyword}` is a word of Python",
                position.keyword.span,
                "no name there",
                help,
            )


def _check_causal(op: syntax.UserOp) -> None:
    """A causal dim is a dim of every result, and the function does not work slice by slice along
    it.
    """
    dim = op.causal
    if dim is None:
        return
    for dims in op.gives:
        _check_among([dim], dims, "no dim of each result")
    if dim.name in [name.name for name in op.along]:
        help = f"leave `causal {dim}` out: slices along a dim of `over` do not see each other"
        raise wrong("E0217", f"`{dim}` is in `over` too", dim.span, "slice by slice", help)


def _check_no_duplicates(names: Iterable[syntax.Name]) -> None:
    seen: set[str] = set()
    for name in names:
        if name.name in seen:
            raise wrong(
                "E0217", f"`{name}` is listed twice", name.span, "repeated", "give it another name"
            )
        seen.add(name.name)


def _check_among(dims: Iterable[syntax.Name], allowed: Iterable[syntax.Name], what: str) -> None:
    names = [name.name for name in allowed]
    for dim in dims:
        if dim.name not in names:
            raise wrong(
                "E0217",
                f"`{dim}` is {what}",
                dim.span,
                "not known here",
                did_you_mean(dim.name, names),
            )


# ---- the function


def _check_function(op: syntax.UserOp, source: Source) -> str:
    """The module of an op's function.

    Raises PlanError where the module has no such function, or one of other arguments.
    """
    text = op.function
    module, colon, name = text.value.partition(":")
    if not colon or not all(part.isidentifier() and not iskeyword(part) for part in (module, name)):
        help = 'a module beside the plan and its function, as in `from "my_ops:swiglu"`'
        raise wrong("E0217", f"`{text.value}` is not module:function", text.span, help=help)
    tree = parse_module(load(Path(source.path).parent / f"{module}.py", text.span), text.span)
    functions = {stmt.name: stmt for stmt in tree.body if isinstance(stmt, ast.FunctionDef)}
    if name not in functions:
        help = did_you_mean(name, functions)
        raise wrong(
            "E0218", f"`{module}.py` has no function `{name}`", text.span, "not defined there", help
        )
    args, count = functions[name].args, len(op.operands)
    keywords = [position.keyword.name for position in op.positions]
    if not _takes(args, count, keywords):
        label = f"line {functions[name].lineno} of `{module}.py` takes ({ast.unparse(args)})"
        named = f", and {', '.join(keywords)} by name" if keywords else ""
        raise wrong(
            "E0218", f"`{name}` is given {count} arguments by position{named}", text.span, label
        )
    return module


def _takes(args: ast.arguments, count: int, keywords: Sequence[str]) -> bool:
    """Whether a function can be called with `count` arguments by position, and some by these
    names.
    """
    by_position = [arg.arg for arg in (*args.posonlyargs, *args.args)]
    needed = {*by_position[: len(by_position) - len(args.defaults)]}
    for arg, default in zip(args.kwonlyargs, args.kw_defaults, strict=True):
        if default is None:
            needed.add(arg.arg)
    passed_by_position = by_position[:count]
    by_name = {arg.arg for arg in (*args.args, *args.kwonlyargs)} - {*passed_by_position}
    return (
        count <= len(by_position)
        and needed <= {*passed_by_position, *keywords}
        and (args.kwarg is not None or {*keywords} <= by_name)
    )


def parse_module(module: Source, span: Span) -> ast.Module:
    """The syntax tree of a module that an op needs; `span` is the op's place.  Raises PlanError."""
    try:
        return ast.parse(module.text)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        line = error.lineno if isinstance(error, SyntaxError) else 1
        raise wrong(
            "E0218", f"`{module.path}` is not Python", span, f"see its line {line}"
        ) from None


# ---- the files


def get_files(module: str, folder: Path, span: Span) -> dict[str, Source]:
    """A module's file, and the files of its folder that it imports; `span` is the place of the op
    that needs them.

    Raises PlanError where one cannot be copied.
    """
    if module in NOT_OURS:
        raise cannot_import(module, span)
    sources: dict[str, Source] = {}
    _gather(module, folder, span, sources)
    return sources


def _gather(module: str, folder: Path, span: Span, sources: dict[str, Source]) -> None:
    sources[f"{module}.py"] = file = load(folder / f"{module}.py", span)
    for name in _imports(file, span):
        if (folder / name / "__init__.py").is_file():
            raise _cannot_copy(
                f"`{module}.py` imports the package `{name}`",
                span,
                f"make it one file, `{name}.py`",
            )
        if f"{name}.py" in sources or not (folder / f"{name}.py").is_file():
            continue
        if name in NOT_OURS:
            raise cannot_import(name, span)
        _gather(name, folder, span, sources)


def _imports(file: Source, span: Span) -> Iterator[str]:
    """The first words of what a module imports, wherever in it."""
    for node in ast.walk(parse_module(file, span)):
        match node:
            case ast.Import(names=names):
                for alias in names:
                    yield alias.name.partition(".")[0]
            case ast.ImportFrom(module=str(name), level=0):
                yield name.partition(".")[0]
            case ast.ImportFrom():
                help = (
                    "write `import NAME` or `from NAME import …`: modules lie side by side, in"
                    " no package"
                )
                raise _cannot_copy(
                    f"`{PurePath(file.path).name}` has a relative import, on its line"
                    f" {node.lineno}",
                    span,
                    help,
                )
            case _:
                pass


def _cannot_copy(message: str, span: Span, help: str) -> PlanError:
    return wrong("E0221", message, span, "needs it", help=help)


def cannot_import(name: str, span: Span) -> PlanError:
    """The mistake of a module whose name a program has another use for."""
    return wrong(
        "E0215",
        f"a program cannot import `{name}`",
        span,
        "taken",
        help="give the file another name",
    )
