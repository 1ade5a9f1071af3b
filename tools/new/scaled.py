"""A model that comes with scalec at another number of parameters, for `scalec new --from`.

All widths shrink alike, layers by the root of that, and heads keep their groups.  Experts, and
whatever else counts parts of a layer, stay as they are.  The vocabulary is the 256 bytes.
"""

from collections.abc import Iterator, Mapping
from math import lcm, sqrt
from pathlib import Path

from attrs import frozen

from ...compiler.analysis.communication import parameter_count
from ...compiler.cli.plans import run_of
from ...compiler.frontend import resolve
from ...compiler.frontend.load_plan import gather
from ...compiler.ir import Program
from ...compiler.syntax import tree
from ...compiler.syntax.diagnostics import Diagnostics, PlanError
from ...compiler.syntax.limits import load
from ...compiler.syntax.source import Source
from ...compiler.tuning.lowering import lower
from ..planner.plan_text import get_path_from

BYTES = 256
"""The size of the vocabulary."""

DEPTHS = ("layers", "pairs", "blocks")
"""The dims of repeats that become shorter."""

KEPT = ("experts", "locals", "rest", "dense")
"""The dims that stay as they are."""

HEADS, GROUPS, HEAD_DIM = "heads", "kv_heads", "head_dim"
BIDIRECTIONAL = "bidirectional"

CHECKED = "validate"
"""The pass that finds heads that `rope` cannot rotate."""

NARROWEST = 16
"""All widths, except the widths of heads, are multiples of this."""

WIDEST_HEAD = 64
"""A head of a smaller model is no wider."""

MOST_STEPS = 512
"""How many widths are looked at."""

MOST_TIMES = 4
"""How many times as many layers there may be as a width has by itself."""


@frozen
class Scaled:
    """Sizes of a model's dims, and the parameters that it then has."""

    dims: Mapping[str, int]
    parameters: int


@frozen
class ModelOfPlan:
    """The model that a plan has: its name for `use`, whether it sees all tokens, and its dims
    that are numbers.
    """

    used: str
    is_bidirectional: bool
    dims: Mapping[str, int]
    seq: int
    rotary: int
    """How many dims of a head `rope` rotates, where the model says it by a constant."""

    def program(self, dims: Mapping[str, int]) -> Program:
        """The model with these sizes as a program.  Raises PlanError."""
        sizes = "  ".join(f"{name} = {size}" for name, size in dims.items())
        text = f'use "{self.used}" {{ dims {{ {sizes} }} }}  {run_of(self.seq)}'
        return lower(resolve(Source("scaled.scale", text)), CHECKED)

    def find_sizes(self, target: int) -> Scaled | None:
        """The sizes with about as many parameters as `target`; None where no sizes make a model."""
        below, above = None, None
        for dims in self._widths():
            candidate = self._to_scaled(dims)
            if candidate and candidate.parameters > target:
                above = candidate
                break
            below = candidate or below
        near = [self._with_layers(scaled, target) for scaled in (below, above) if scaled]
        return min(near, key=lambda scaled: abs(scaled.parameters - target), default=None)

    def _widths(self) -> Iterator[dict[str, int]]:
        """The sizes at growing widths."""
        heads, groups = self.dims[HEADS], self.dims.get(GROUPS, self.dims[HEADS])
        shared = heads // groups
        unit = lcm(shared, 8) * 8
        for step in range(1, MOST_STEPS):
            yield self._dims(unit * step, shared, groups)

    def _dims(self, hidden: int, shared: int, groups: int) -> dict[str, int]:
        scale = hidden / self.dims["hidden"]
        widest = max(WIDEST_HEAD, 2 * self.rotary)
        head_dim = min(self.dims.get(HEAD_DIM, self.dims["hidden"] // self.dims[HEADS]), widest)
        few_groups = _groups(hidden, shared, groups, head_dim)
        sizes = {"vocab": BYTES, "hidden": hidden, HEADS: shared * few_groups}
        if GROUPS in self.dims:
            sizes[GROUPS] = few_groups
        for name, size in self.dims.items():
            if name in DEPTHS:
                sizes[name] = max(2, round(size * sqrt(scale)))
            elif name == HEAD_DIM:
                sizes[name] = head_dim
            elif name not in (*sizes, *KEPT):
                sizes[name] = max(NARROWEST, round(size * scale / NARROWEST) * NARROWEST)
        return {name: sizes.get(name, size) for name, size in self.dims.items()}

    def _to_scaled(self, dims: Mapping[str, int]) -> Scaled | None:
        try:
            return Scaled(dims, parameter_count(self.program(dims)))
        except PlanError:
            return None

    def _with_layers(self, scaled: Scaled, target: int) -> Scaled:
        """The same widths, with more or fewer layers where that is nearer."""
        depth = next((name for name in DEPTHS if name in self.dims), "")
        layers = scaled.dims.get(depth, 0)
        deeper = self._to_scaled({**scaled.dims, depth: layers + 1}) if layers else None
        if deeper is None:
            return scaled
        target_layers = layers + round(
            (target - scaled.parameters) / (deeper.parameters - scaled.parameters)
        )
        within = max(1, layers // MOST_TIMES, min(target_layers, MOST_TIMES * layers))
        other = self._to_scaled({**scaled.dims, depth: within}) or scaled
        if abs(other.parameters - target) < abs(scaled.parameters - target):
            return other
        return scaled


def _groups(hidden: int, shared: int, groups: int, head_dim: int) -> int:
    """The most groups of heads, a power of two, with heads of at least `head_dim`."""
    count = 1
    while 2 * count <= min(groups, 8) and hidden // (shared * 2 * count) >= head_dim:
        count *= 2
    return count


def model_of(path: Path, seq: int) -> ModelOfPlan:
    """The model of a plan that comes with scalec, for sequences of `seq` tokens.

    Raises PlanError.
    """
    model = gather(load(path), Diagnostics()).model
    used = get_path_from(Path(model.name.span.path), path.parent)
    rotary = _numbers(model, "const").get("rotary", 0)
    return ModelOfPlan(used, BIDIRECTIONAL in model.sees, _numbers(model, "dims"), seq, rotary)


def _numbers(model: tree.Model, kind: str) -> dict[str, int]:
    """The settings of a section of a model that are whole numbers."""
    numbers = dict[str, int]()
    for section in model.body:
        if not isinstance(section, tree.Section) or section.kind.name != kind:
            continue
        for entry in section.entries:
            match entry:
                case tree.Setting(
                    key=tree.Name(name=name), value=tree.Number(value=int() as number, unit="")
                ):
                    numbers[name] = number
                case _:
                    pass
    return numbers
