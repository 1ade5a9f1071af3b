"""No wait is too many: without any one of them, what the ranks compute is wrong, or memory is freed
under a collective.

Purpose: what would go wrong on a network that is slow goes unseen on one that is quick.  The
communicator of `late` makes it seen, and here each wait that the source has is taken out, one at a
time.
"""

import ast
import inspect
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import reduce
from types import ModuleType
from typing import Any

import pytest
import torch.distributed as dist

from helpers.forked_ranks import run_ranks
from helpers.late_process_group import Link
from helpers.layered_model import F64, LAYERS, ZERO, Way, data, furthest, plain, shared
from scalec.runtime import AdamW, Mesh
from scalec.runtime.state import engine, flat_param, flat_param_group, grad_reduction

MODULES = (flat_param, grad_reduction, flat_param_group, engine)
MEMORY = "Reductions.make_room"
"""Waits for the sake of memory, not of numbers: `test_flow_order` counts what is there."""
WAITS = {"wait", "wait_for_unshard", "finish", "abandon", "_abandon", "_scattered"}


@dataclass(frozen=True)
class Site:
    """A statement that waits: the one of this number in its function."""

    module: ModuleType
    function: str
    number: int
    text: str

    def __str__(self) -> str:
        return f"{self.function}: {self.text}"

    def take_out(self) -> None:
        """From here on the function does without.  For this process' life."""
        found = [node for name, node in _functions(self.module) if name == self.function]
        tree = ast.Module([_Without(self.number).visit(found[0])], [])
        code = compile(ast.fix_missing_locations(tree), "<without a wait>", "exec")
        scope: dict[str, Any] = {}
        exec(code, vars(self.module), scope)
        own: Any = reduce(getattr, self.function.split("."), self.module)
        own.__code__ = scope[found[0].name].__code__


class _Without(ast.NodeTransformer):
    """Takes the call out of a statement that waits."""

    def __init__(self, number: int) -> None:
        self.left = number

    def visit_Expr(self, node: ast.Expr) -> ast.stmt:
        """One statement."""
        if not _waits(node):
            return node
        self.left -= 1
        return ast.Pass() if self.left == -1 else node


def _waits(node: ast.AST) -> bool:
    match node:
        case ast.Expr(ast.Call(func=ast.Attribute(attr=name) | ast.Name(id=name))):
            return name in WAITS
        case _:
            return False


def _functions(module: ModuleType) -> Iterator[tuple[str, ast.FunctionDef]]:
    """The functions and methods of a module, by their names in it, without decorators."""
    for node in ast.parse(inspect.getsource(module)).body:
        inside = (
            [(f"{node.name}.", each) for each in node.body]
            if isinstance(node, ast.ClassDef)
            else [("", node)]
        )
        for prefix, each in inside:
            if isinstance(each, ast.FunctionDef):
                each.decorator_list = []
                yield prefix + each.name, each


def _sites() -> list[Site]:
    """All of them."""
    return [
        Site(module, name, number, ast.unparse(wait))
        for module in MODULES
        for name, function in _functions(module)
        if name != MEMORY
        for number, wait in enumerate(filter(_waits, ast.walk(function)))
    ]


class _BadDay(Exception):
    pass


def _right(
    sites: list[Site], way: Way, axes: dict[str, int], bad_call: int, evaluates: bool
) -> bool:
    """Whether a step is the plain model's, after one, or an evaluation, that raised in call
    `bad_call` of a layer.
    """
    for site in sites:
        site.take_out()
    link, calls = Link(), [0]
    link.poison()

    def computes() -> None:
        calls[0] += 1
        if calls[0] == bad_call:
            raise _BadDay

    ours, theirs = (
        shared(way, Mesh(axes), AdamW(), F64, link.late, computes),
        plain(way, AdamW(), F64),
    )
    ours.state.initialise(seed=2 if evaluates else 1)
    theirs.state.initialise(seed=2)
    batches = [data(0, rank, 2) for rank in range(dist.get_world_size())]
    own = batches[dist.get_rank()]
    try:
        with suppress(_BadDay):
            ours.eval_step(own[0][0]) if evaluates else ours.train_step(own)
        if not evaluates:
            ours.state.zero()
            ours.state.initialise(seed=2)
        ours.train_step(own)
    except (AssertionError, RuntimeError):
        return False
    theirs.train_step([microbatch for batch in batches for microbatch in batch])
    return not link.under_way and furthest(ours, theirs) < 1e-12


CASES = [
    *(
        (way, {"dp": 2, "replica": 1}, bad_call, False)
        for way in ZERO[1:]
        for bad_call in (2, LAYERS + 3)
    ),
    *((way, {"dp": 2, "replica": 1}, 2, True) for way in ZERO[1:]),
    (ZERO[3], {"replica": 2, "dp": 2}, 2, False),
]


def _all_right(sites: list[Site]) -> bool:
    cases = ((4 if axes["replica"] > 1 else 2, way, axes, *rest) for way, axes, *rest in CASES)
    return all(all(run_ranks(world, _right, sites, *case)) for world, *case in cases)


@pytest.mark.long
def test_with_all_waits_every_case_is_right() -> None:
    # taken apart, put together as they were
    assert _all_right([replace(site, number=-1) for site in _sites()])


@pytest.mark.sample(1)
@pytest.mark.parametrize("site", _sites(), ids=str)
def test_without_a_wait_some_case_is_wrong(site: Site) -> None:
    assert not _all_right([site])


def test_all_waits_of_the_engine_are_found() -> None:
    """A wait that stands in an expression would not be taken out."""
    calls = [
        node
        for module in MODULES
        for name, function in _functions(module)
        if name != MEMORY
        for node in ast.walk(function)
        if isinstance(node, ast.Call) and _waits(ast.Expr(node))
    ]
    assert len(calls) == len(_sites()) > 8
