"""Memory that a model keeps of a microbatch, by scalec's account of a plan without stages and
sharded state.
"""

from functools import lru_cache

from attrs import frozen

from scalec.compiler.analysis.memory import account
from scalec.compiler.ir import Program
from scalec.compiler.syntax.source import Source
from scalec.compiler.tuning.lowering import compile_plan

PRODUCTS = ("contract", "contracts")


@frozen
class Part:
    """Bytes of a microbatch, and parameters, of a model that is not cut into stages or sharded.

    layer    kept of a layer, but for the normed inputs of its products
    inputs   these inputs, whole on each rank of tp
    outside  kept of embedding, head and loss, but for logits
    inner    parameters of a layer
    first    parameters before the layers: the embedding, positions
    last     after them: the norm and the head; of a tied one its own copy
    shared   of these, those of a tied head
    """

    layer: float
    inputs: float
    outside: float
    inner: float
    first: float
    last: float
    shared: float

    def outside_layers(self, is_first: bool, is_last: bool) -> float:
        """Parameters that a stage has besides its layers; one with both ends has tied ones once."""
        return self.first * is_first + self.last * is_last - self.shared * (is_first and is_last)


@lru_cache(maxsize=256)
def part_of(text: str) -> Part:
    """The account of a plan on GPUs.  Raises PlanError."""
    program = compile_plan(Source("row.scale", text + "cluster { gpu = h100_sxm }\n"))
    layers, kept = program.size("layers"), account(program).kept
    inputs = {
        it.what for it in kept if it.op.kind in PRODUCTS and "hidden" in _dims(program, it.what)
    }
    inner = [program.elements(it.type) for it in program.params if "layers" in it.type.dims]
    outer = [it for it in program.params if "layers" not in it.type.dims]
    tables = [program.elements(it.type) for it in outer if "vocab" in it.type.dims]
    positions = sum(program.elements(it.type) for it in outer if "seq" in it.type.dims)
    norms = sum(map(program.elements, (it.type for it in outer))) - sum(tables) - positions
    return Part(
        sum(it.total for it in kept if it.layers > 1 and it.what not in inputs) / layers,
        sum(it.total for it in kept if it.layers > 1 and it.what in inputs) / layers,
        sum(it.total for it in kept if it.layers == 1 and "vocab" not in _dims(program, it.what)),
        sum(inner) / layers,
        tables[0] + positions,
        tables[-1] + norms,
        tables[0] * (len(tables) == 1),
    )


def _dims(program: Program, name: str) -> tuple[str, ...]:
    type = program.types.get(name)
    return type.dims if type else ()
