"""Every mutant of a kind of a program's text: the read-back refuses it, or it is the same program
in other words.

Non-goals: defects written by hand (`test_readback`, `test_readback_loops`, `test_readback_stages`).
"""

import ast
from collections.abc import Callable, Iterable, Iterator
from itertools import islice, pairwise

import pytest

from helpers.readback_plans import compiled, demand_accepted
from scalec.compiler.emit.readback import check

PLANS = ("zero 3, nested", "stages, two repeats", "experts")
PARTS = 3
"""A case tries every third mutant."""


def _code(tree: ast.Module) -> Iterator[ast.AST]:
    """All nodes but annotations of arguments."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.arg | ast.alias):
            yield node


def _without_an_argument(tree: ast.Module) -> Iterator[str]:
    for node in [node for node in _code(tree) if isinstance(node, ast.Call)]:
        for given in (node.args, node.keywords):
            for i, argument in enumerate([*given]):
                is_hash = isinstance(argument, ast.keyword) and argument.arg == "model"
                is_start = ast.unparse(node.func) == "range" and ast.unparse(argument) == "0"
                if not (is_hash or is_start):  # without these it is the same program
                    del given[i]
                    yield f"`{ast.unparse(argument)}` left out of `{ast.unparse(node)[:60]}`"
                    given.insert(i, argument)  # type: ignore[arg-type]


def _with_an_argument_twice(tree: ast.Module) -> Iterator[str]:
    for node in [node for node in _code(tree) if isinstance(node, ast.Call)]:
        if ast.unparse(node.func) == "range":
            continue  # range(1, 2, 2) is range(1, 2)
        for i, argument in enumerate([*node.args]):
            node.args.insert(i, argument)
            yield f"`{ast.unparse(argument)}` twice in `{ast.unparse(node)[:60]}`"
            del node.args[i]


def _with_another_keyword(tree: ast.Module) -> Iterator[str]:
    for node in [
        node for node in _code(tree) if isinstance(node, ast.keyword) and node.arg != "model"
    ]:
        name, node.arg = node.arg, f"{node.arg}s"
        yield f"{node.arg} for {name}"
        node.arg = name


AS_LARGE = {"HIDDEN", "HEADS * HEAD_DIM"}
"""Two sizes of these plans: with them swapped it is the same program."""


def _with_neighbours_swapped(tree: ast.Module) -> Iterator[str]:
    for node in [
        node
        for node in _code(tree)
        if isinstance(node, ast.Call) and ast.unparse(node.func) != "ParamGroup"
    ]:
        for i, (a, b) in enumerate(pairwise([*node.args])):
            if ast.dump(a) != ast.dump(b) and {ast.unparse(a), ast.unparse(b)} != AS_LARGE:
                node.args[i : i + 2] = [b, a]
                yield f"swapped in `{ast.unparse(node)[:80]}`"
                node.args[i : i + 2] = [a, b]


OPERATORS = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Div,
    ast.Div: ast.Mult,
    ast.Mod: ast.FloorDiv,
}


def _with_another_operator(tree: ast.Module) -> Iterator[str]:
    for node in [
        node for node in _code(tree) if isinstance(node, ast.BinOp) and type(node.op) in OPERATORS
    ]:
        node.op, before = OPERATORS[type(node.op)](), node.op
        yield f"another operator in `{ast.unparse(node)}`"
        node.op = before


def _with_another_function(tree: ast.Module) -> Iterator[str]:
    """Each call of a function that a name says, of the one that is called next."""
    calls = [
        node
        for node in _code(tree)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
    ]
    for node, other in pairwise(calls):
        if ast.dump(node.func) != ast.dump(other.func):
            before, node.func = node.func, other.func
            yield f"`{ast.unparse(node)[:80]}` for {ast.unparse(before)}"
            node.func = before


def _with_another_attribute(tree: ast.Module) -> Iterator[str]:
    for node in [
        node
        for node in _code(tree)
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load)
    ]:
        before, node.attr = node.attr, f"{node.attr}_"
        yield f"`{ast.unparse(node)}` for `.{before}`"
        node.attr = before


def _with_code_that_nothing_runs(tree: ast.Module) -> Iterator[str]:
    never = ast.parse("if 1 == 2:\n    raise SystemExit").body[0]
    dead = ast.parse("if 1 == 2:\n    x = 1").body[0]
    for function in [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]:
        for i in range(1, len(function.body) + 1):
            for more in (never, dead):
                function.body.insert(i, more)
                yield f"`{ast.unparse(more)}` in {function.name}"
                del function.body[i]


EVIL = (
    *(
        "__import__('os')",
        "open('x')",
        "eval('1')",
        "exec('1')",
        "print(1)",
        "mesh.__class__",
        "getattr(mesh, 'x')",
    ),
    *(
        "globals()",
        "(lambda: 1)()",
        "[x for x in (1, 2) if x]",
        "(yield)",
        "{**{}}",
        "torch.load('x')",
        "f'{mesh}'",
    ),
    *(
        "10 ** 10 ** 10",
        "'x' * 10 ** 10",
        "(x := 1)",
        "1 if mesh else 2",
        "mesh or None",
        "mesh[1:2]",
        "type(mesh)",
    ),
    *(
        "[0] * 1000000000",
        "list(range(1000000000))",
        "sum(i for i in range(1000000000))",
        "1 << 100000",
        "str(mesh)",
    ),
)


def _with_what_no_program_does(tree: ast.Module) -> Iterator[str]:
    for function in [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]:
        for text in EVIL:
            function.body.insert(1, ast.parse(text).body[0])
            yield text
            function.body[1] = ast.Assign(
                [ast.Name("evil", ast.Store())], ast.parse(text, mode="eval").body, lineno=1
            )
            yield f"evil = {text}"
            del function.body[1]


KINDS = [
    _without_an_argument,
    _with_an_argument_twice,
    _with_another_keyword,
    _with_neighbours_swapped,
    _with_another_operator,
    _with_another_function,
    _with_another_attribute,
    _with_code_that_nothing_runs,
    _with_what_no_program_does,
]


def survivors(mutants: Iterable[str], tree: ast.Module, read: Callable[[str], int]) -> list[str]:
    """The mutants of a text that are read back, and those whose refusal names no line."""
    found: list[str] = []
    for what in mutants:
        try:
            read(ast.unparse(tree))
            found.append(what)
        except AssertionError as error:
            found += [] if str(error).startswith("emit: line") else [f"{what}: {error}"]
    return found


@pytest.mark.sample(1)
@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("mutants", KINDS)
def test_every_mutant_is_refused_at_a_line(
    mutants: Callable[[ast.Module], Iterator[str]], plan: str, part: int
) -> None:
    text, program = compiled(plan)
    tree = ast.parse(text)
    assert not survivors(
        islice(mutants(tree), part, None, PARTS), tree, lambda edited: check(edited, program)
    )


# ---- the same in other words

SAME = {
    "a name for a part of an expression": (
        "y = linear(silu(linear(m, self.w_gate)) * linear(m, self.w_up), self.w_down)",
        "gate = linear(m, self.w_gate)\n        up = linear(m, self.w_up)\n"
        "        y = linear(silu(gate) * up, self.w_down)",
    ),
    "another name": (" logits", " scores", "(logits", "(scores"),
    "two lines for one": (
        "x = x + reduce_scatter(y, self.tp, dim=0)\n        m",
        "y = reduce_scatter(y, self.tp, dim=0)\n        x = x + y\n        m",
    ),
    "one line for two": (
        "n = all_gather(n, self.tp, dim=0)\n        logits = linear(n, self.head)",
        "logits = linear(all_gather(n, self.tp, dim=0), self.head)",
    ),
    "independent lines in another order": (
        "k = rope(linear(a, self.wk).unflatten(-1, (-1, HEAD_DIM)), rotary)\n"
        "        v = linear(a, self.wv).unflatten(-1, (-1, HEAD_DIM))",
        "v = linear(a, self.wv).unflatten(-1, (-1, HEAD_DIM))\n"
        "        k = rope(linear(a, self.wk).unflatten(-1, (-1, HEAD_DIM)), rotary)",
    ),
    "sizes by number": ("weight(mesh, HIDDEN, ", "weight(mesh, 64, ", "(-1, HEAD_DIM)", "(-1, 16)"),
    "sizes by name in a line of their own": (
        *("VOCAB, HIDDEN, LAYERS,", "VOCAB, LAYERS,", "= (256, 64, 2,", "= (256, 2,"),
        *("class Layer(", "HIDDEN = 64\n\n\nclass Layer("),
    ),
    "another size that is as large": (
        "weight(mesh, HIDDEN, HEADS * HEAD_DIM,",
        "weight(mesh, HEADS * HEAD_DIM, HIDDEN,",
    ),
    "a base as a float": ("theta=500000", "theta=500000.0"),
    "keywords in another order": ("betas=(0.9, 0.95), eps=1e-08", "eps=1e-08, betas=(0.9, 0.95)"),
    "a name for the update's arguments": (
        "state.update(lr, scale=clip_scale(grad_norm, 1.0), skip=num_tokens == 0, finite=finite)",
        "scale = clip_scale(grad_norm, 1.0)\n    skip = num_tokens == 0\n"
        "    state.update(lr, skip=skip, finite=finite, scale=scale)",
    ),
    "the mesh where it is asked": (
        "mesh = state.mesh\n    dp = mesh.axis('dp')\n    dp_tp",
        "dp = state.mesh.axis('dp')\n    mesh = state.mesh\n    dp_tp",
    ),
}
"""Of tiny_llama: code as `ast.unparse` writes it, what stands there instead, and more such
pairs.
"""


@pytest.mark.parametrize("what", SAME)
def test_the_same_program_in_other_words_is_accepted(what: str) -> None:
    demand_accepted("tiny_llama", *SAME[what])
