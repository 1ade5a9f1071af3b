"""All plans that tests of the frontend have refused, as texts; and the places in the code that
refuse them.
"""

import ast
import gc
import gzip
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any

import pytest
from attrs import frozen

import scalec.compiler
from frontend import (
    test_branches,
    test_hf_names,
    test_mistakes,
    test_mistakes_told,
    test_pipeline_language,
    test_routes,
    test_user_ops,
)
from helpers.edited_text import replace_once
from helpers.mistakes import MISTAKES, edited
from helpers.pipeline_plan import PLAN as PIPELINE
from reports import test_code_goldens
from scalec.compiler.syntax import diagnostics
from scalec.compiler.syntax.codes import get_codes
from scalec.compiler.syntax.diagnostics import Diagnostics, PlanError
from scalec.compiler.syntax.limits import load
from scalec.compiler.syntax.source import Source
from scalec.compiler.tuning.lowering import compile_plan

ROOT = Path(scalec.compiler.__path__[0])
FILES = [
    *sorted(ROOT.glob("frontend/*.py")),
    *sorted(ROOT.glob("config/*.py")),
    *(ROOT / name for name in ("passes/propagate.py", "syntax/limits.py", "syntax/parser.py")),
]


LAST = "x = x + silu(x @ w_in[hidden -> ffn]) @ w_out[ffn -> hidden]"
RULES_TP = "vocab, heads, kv_heads, ffn over tp  seq over tp"
MORE = (  # edits of the plan of `test_mistakes` for rules that no other table here reaches
    {"theta = 10000": "theta = sqrt(0 - 1)"},
    {"theta = 10000": f"theta = {'9' * 21}"},
    {"theta = 10000": "theta = 1e999"},
    {"theta = 10000": "theta = 1e-999"},
    {"mask=causal": "mask=causal, window=1.5"},
    {LAST: f"{LAST}  x = x + softmax(x, over=1)"},
    {LAST: f"{LAST}  x = x + softmax(x, over=ffn)"},
    {LAST: f"{LAST}  x = x + softmax(x, over=batch)"},
    {"head_dim], theta)": "head_dim], theta, 3)"},
    {"head_dim], theta)": "head_dim], theta, factor=2)"},
    {LAST: f"x = x{' + x' * 260}"},
    {LAST: f"{LAST}  x = 1 + 2"},
    {LAST: f"{LAST}  x = x + silu(3)"},
    {LAST: f"{LAST}  x = x * (1e300 * 1e300)"},
    {"steps = 3": "steps = 3 pad 2"},
    {"steps = 3": "steps every 3"},
    {"model llama": 'use "other.scale"\nmodel llama'},
    {"model llama": 'use "scalec:models/lama.scale"\nmodel llama'},
    {"model llama": 'use "none.scale"\nmodel llama'},
    {"model llama": 'use "."\nmodel llama'},
    {"steps = 3": "steps = 3  compile = on  recompute = selective(attention)"},
    {"steps = 3": "steps = 3  compile = on  gathered = regather"},
    {
        "seq over tp": "seq over tp via ulysses",
        "vocab, heads, kv_heads, ffn over tp": "vocab, ffn over tp",
        "heads = 4": "heads = 5",
    },
    {"vocab = 64": "vocab = 32 pad 64"},
    {
        "tp = 2": "cp = 2",
        RULES_TP: "seq over cp via ring",
        "mask=causal": "mask=causal, dropout=0.1",
    },
    {"tp = 2": "cp = 2", RULES_TP: "seq over cp via ring", "steps = 3": "steps = 3  compile = on"},
    {"dp = 2  tp = 2": "cp = 2  tp = 2", f"batch over dp  {RULES_TP}": "seq over cp, tp via ring"},
    {"lr = 1e-3": "lr = 1e-3  betas = [0.9]"},
    {"steps = 3": 'steps = "3"  seed = -1'},
    {"[python_stdlib]": "[]"},
    {"[python_stdlib]": '["python_stdlib"]'},
    {"[python_stdlib]": '[python_stdlib]  separator = "ab"'},
    {"steps = 3": "steps = 3  recompute = auto(3)"},
    {"steps = 3": "steps = 3  recompute = every(2)"},
    {"steps = 3": "steps = 3  recompute = selective"},
    {"gpus_per_node = 4  nodes = 1": 'hardware = ""'},
    {"cluster {": "cluster h100 {"},
    {"theta = 10000": f"theta = {'(' * 70}1{')' * 70}"},
    {"mesh  {": "mesh  { }\n}\n{"},
    {"[python_stdlib]": '["a\\q"]'},
    {"tp = 2 }": "tp = 2 ]"},
    {f"{RULES_TP} }}": f"{RULES_TP}\n"},
    {f"{RULES_TP} }}": f"{RULES_TP} }} }}"},
    {"train {": "tran {"},
    {LAST: f"{LAST}  p = extra[hidden]"},
    {"ffn = 48": "ffn = 40 pad 48"},
    {f"{RULES_TP} }}": "vocab, heads, kv_heads, ffn, seq over tp }"},
    {"gpus_per_node = 4  nodes = 1": "gpu = t4", "steps = 3": "steps = 3  kernels = triton"},
    {"model llama": 'use "latin.scale"\nmodel llama'},
    {"model llama": 'use "packed.scale"\nmodel llama'},
    {"model llama": f'use "{"a" * 300}.scale"\nmodel llama'},
    {"model llama": "\0model llama"},
    {"model llama": 'op f(x[.., d]) -> [.., d] over .. from "broken:f"\nmodel llama'},
)
NAMES = (  # of the plan of `test_hf_names`, for rules of `names hf`
    {"names hf": "names gguf"},
    {'bq   = "h.{i}.bias"': "bq over tp"},
    {'"h.{i}.bias"': 'interleaved("h.{i}.bias", 3)'},
    {'"h.{i}.bias"': 'interleaved("h.{i}.bias", 16)'},
    {'"h.{i}.bias"': 'interleaved("h.{i}.bias", many)'},
    {'"h.{i}.out.weight"': 'interleaved("h.{i}.out.weight", 2)'},
    {
        "x @ head": "rmsnorm(x, norm[hidden], 1e-5) @ head",
        "  head = ": '  norm = transposed("norm")\n  head = ',
    },
)


def refused(folder: Path) -> Iterator[Source]:
    """The plans, beside the files that they use, which are written to a folder."""
    (folder / "own.py").write_text("def gate(x, y, by):\n    return x * y * by\n")
    (folder / "base.scale").write_text(test_mistakes.PLAN)
    (folder / "plan.scale").write_text(test_mistakes.PLAN)
    (folder / "latin.scale").write_bytes(b"# caf\xe9\n")
    (folder / "packed.scale").write_bytes(gzip.compress(b"model other { }", mtime=0))
    (folder / "tokens.npy").write_bytes(b"\x93NUMPY\x01\x00" + bytes(40))
    (folder / "broken.py").write_text("def f(x)\n")
    (folder / "user").mkdir()
    own = test_user_ops.write_plan(folder / "user")
    plan = str(folder / "other.scale")
    for text in (*(edited([mistake])[0] for mistake in MISTAKES), *_edited(), *test_routes.REFUSED):
        yield Source(plan, text)
    for edits in MORE:
        yield Source(plan, replace_once(test_mistakes.PLAN, edits))
    for edits in NAMES:
        yield Source(plan, replace_once(test_hf_names.PLAN % test_hf_names.NAMES, edits))
    for schedule in ("auto", "dualpipev"):
        edits = {"pp = 4  dp = 2": "pp = 2  dp = 1..2", "= 1f1b": f"= {schedule}", "= 24": "= 12"}
        yield Source(plan, replace_once(PIPELINE, edits))
    parts = "".join(f"    if i < {part} {{ y = y * 2 }}\n" for part in range(1, 100))
    branches = test_branches.BRANCHES.replace("layers = 5", "layers = 100").replace(
        "    x = x + y\n", f"{parts}    x = x + y\n"
    )
    yield Source(plan, branches + test_branches.trained("one rank"))
    yield Source(plan, test_routes.PLAN.replace("experts], 2)", "experts], 2, groups=1.5)"))
    yield Source(plan, "mesh { }")
    yield Source(plan, '{"model_type": "llama"}')
    array = {"[python_stdlib]": f'["{folder / "tokens.npy"}"]'}
    yield Source(plan, replace_once(test_mistakes.PLAN, array))
    yield Source(plan, test_routes.aux_plan("aux_loss=0.5, aux_batch=4"))
    yield Source(plan, test_routes.two_routes("aux_loss=0.5", "aux_loss=0.25"))
    routed = (
        "n = alone[hidden]\n    route n to experts by top(n @ other[hidden -> experts], 2) { n"
        " = silu(n) }"
    )
    yield Source(
        plan, test_routes.PLAN.replace(test_routes.ROUTE, f"{routed}\n    {test_routes.ROUTE}")
    )
    for settings in test_mistakes_told.OVERRIDES:
        yield Source(plan, f'use "base.scale" {{ {settings} }}')
    for before, after, *_ in test_user_ops.MISTAKES:
        yield Source(str(own), load(own).text.replace(before, after, 1))
    for edits, *_ in test_pipeline_language.MISTAKES.values():
        yield Source(plan, replace_once(PIPELINE, edits))


def _edited() -> Iterator[str]:
    """Plans of which each edit makes another one."""
    for before, after, *_ in (
        *test_mistakes.CASES,
        *test_mistakes.ELSEWHERE,
        *test_mistakes_told.EDITS,
    ):
        yield test_mistakes.PLAN.replace(before, after, 1)
    for before, after, *_ in test_branches.WRONG:
        divided = test_branches.BRANCHES.replace("dense = 2", "dense = 2  half = 4").replace(
            before, after, 1
        )
        yield divided + test_branches.trained("one rank")
    for before, after, *_ in test_hf_names.CASES:
        yield test_hf_names.PLAN % test_hf_names.NAMES.replace(before, after)
    of_codes, shown = test_code_goldens, test_code_goldens.PLAN
    for entry in of_codes.TEXTS.values():
        if "wrong" in entry:
            yield shown.replace(entry.get("at", entry["right"]), entry["wrong"])
    for before, after in of_codes.EDITS.values():
        yield shown.replace(before, after, 1)


def outcome(source: Source) -> object:
    """The message on a plan, or its other outcome."""
    try:
        compile_plan(source, "insert_collectives")
    except PlanError as error:
        return sorted(str(each) for each in error.diagnostics)
    except Exception as error:  # a rule that is switched off lets through what breaks later
        return repr(error)
    return "compiled"


# ---- rules


@frozen
class Rule:
    """A statement that refuses a plan: `found.error(…)` or `raise wrong(…)`."""

    path: Path
    code: str
    first: int
    last: int

    def __str__(self) -> str:
        return f"{self.path.parent.name}/{self.path.name}:{self.first} {self.code}"

    def is_at(self, place: tuple[str, int]) -> bool:
        """Whether a file and a line are of it."""
        return place[0] == str(self.path) and self.first <= place[1] <= self.last


def rules() -> Iterator[Rule]:
    """All, in the order of files."""
    for path in FILES:
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            call = (
                node.value
                if isinstance(node, ast.Expr)
                else node.exc
                if isinstance(node, ast.Raise)
                else None
            )
            code = call.args[0] if isinstance(call, ast.Call) and call.args else None
            if (
                isinstance(node, ast.stmt)
                and isinstance(code, ast.Constant)
                and code.value in get_codes()
            ):
                yield Rule(path, str(code.value), node.lineno, node.end_lineno or node.lineno)


@contextmanager
def noted() -> Iterator[set[tuple[str, int]]]:
    """The files and lines that make mistakes while it is entered."""
    seen: set[tuple[str, int]] = set()
    error, raised = Diagnostics.error, diagnostics.wrong

    def note() -> None:
        frame = sys._getframe(2)
        while frame:  # a module may have a function around `wrong`
            seen.add((frame.f_code.co_filename, frame.f_lineno))
            frame = frame.f_back

    def erring(*args: Any, **options: Any) -> None:
        note()
        error(*args, **options)

    def wrong(*args: Any, **options: Any) -> PlanError:
        note()
        return raised(*args, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Diagnostics, "error", erring)
        for module in [
            each for each in sys.modules.values() if getattr(each, "wrong", None) is raised
        ]:
            patch.setattr(module, "wrong", wrong)
        yield seen


class _Without(ast.NodeTransformer):
    def __init__(self, rule: Rule) -> None:
        self._rule = rule

    def generic_visit(self, node: ast.AST) -> ast.AST:
        if isinstance(node, ast.Expr | ast.Raise) and (node.lineno, node.end_lineno) == (
            self._rule.first,
            self._rule.last,
        ):
            return ast.copy_location(ast.Pass(), node)
        return super().generic_visit(node)


@contextmanager
def switched_off(rule: Rule) -> Iterator[None]:
    """The rule's statement does nothing while it is entered."""
    tree = _Without(rule).visit(ast.parse(rule.path.read_text("utf-8")))
    codes = dict(_codes(compile(tree, str(rule.path), "exec")))
    gc.unfreeze()  # what is frozen is not found
    functions = [each for each in gc.get_objects() if type(each) is FunctionType]
    gc.freeze()  # as `conftest` does, for ranks that later tests fork
    with pytest.MonkeyPatch.context() as patch:
        for function in functions:
            new = codes.get(function.__code__.co_qualname)
            own = function.__code__
            if own.co_filename == str(rule.path) and new and new.co_freevars == own.co_freevars:
                patch.setattr(function, "__code__", new)
        yield


def _codes(code: CodeType) -> Iterator[tuple[str, CodeType]]:
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield inner.co_qualname, inner
            yield from _codes(inner)
