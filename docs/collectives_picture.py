"""The picture of the coercions: local tensors of four ranks before and after, forward and
backward.
"""

from scalec.compiler.ir import Kind, Placement
from scalec.compiler.ir.placements import coercion, conjugate
from scalec.tools.drawing import Canvas

WIDTH = 760
RANKS = 4
BLOCK = 6
"""The side of a block of the tensor; it has `RANKS` rows and `RANKS` columns of them."""

TENSOR = RANKS * BLOCK + 8
"""The width of a local tensor with the blank beside it."""

SIDE = RANKS * TENSOR
ARROW = 24
LEFT = 12
FORWARD = 154
BACKWARD = FORWARD + 2 * SIDE + ARROW + 28
TOP = 84
ROW = 56

ROWS, COLUMNS = Placement(Kind.SHARDED, "rows"), Placement(Kind.SHARDED, "columns")
INVARIANT, REPLICATED = Placement(Kind.INVARIANT), Placement(Kind.REPLICATED)
PARTIAL = Placement(Kind.PARTIAL)

SHOWN = (
    (PARTIAL, INVARIANT),
    (INVARIANT, REPLICATED),
    (ROWS, REPLICATED),
    (PARTIAL, ROWS),
    (ROWS, COLUMNS),
    (INVARIANT, ROWS),
    (ROWS, INVARIANT),
)
"""The coercions in the picture: each but the shards of two dims stands with its conjugate."""


def draw_collectives() -> Canvas:
    """What four ranks hold before and after each coercion, forward and backward."""
    canvas = Canvas(WIDTH)
    canvas.words(LEFT, 18, "Coercions on four ranks, forward and backward", "head")
    canvas.words(
        LEFT,
        34,
        "a square is a rank's local tensor; solid: values, pale: a summand of them",
        "muted",
    )
    canvas.words(FORWARD, TOP - 22, "forward: values")
    canvas.words(BACKWARD, TOP - 22, "backward: gradients")
    for number, (source, target) in enumerate(SHOWN):
        y = TOP + number * ROW
        canvas.words(LEFT, y + 18, coercion(source, target).function)
        _draw_change(canvas, FORWARD, y, source, target)
        _draw_change(canvas, BACKWARD, y, *conjugate(source, target))
    return canvas


def _draw_change(canvas: Canvas, x: float, y: float, source: Placement, target: Placement) -> None:
    """What all ranks hold before and after one coercion, with what it communicates."""
    change = coercion(source, target)
    effect = change.collective or change.local or "nothing"
    canvas.words(x, y - 5, f"{source.kind.value} → {target.kind.value}: {effect}", "small muted")
    after = x + SIDE + ARROW
    middle = y + RANKS * BLOCK / 2
    canvas.arrow(x + SIDE, middle, after - 8, middle)
    for rank in range(RANKS):
        _draw_local(canvas, x + rank * TENSOR, y, source, rank)
        _draw_local(canvas, after + rank * TENSOR, y, target, rank)


def _draw_local(canvas: Canvas, x: float, y: float, place: Placement, rank: int) -> None:
    """The blocks that a rank holds, each in the colour of its row."""
    canvas.box(x - 1, y - 1, RANKS * BLOCK + 2, RANKS * BLOCK + 2, "blank", round=0)
    for row in range(RANKS):
        for column in range(RANKS):
            if _is_held(place, rank, row, column):
                style = f"p{row}" if place == PARTIAL else f"s{row}"
                left, top = x + column * BLOCK, y + row * BLOCK
                canvas.box(left, top, BLOCK - 1, BLOCK - 1, style, round=0)


def _is_held(place: Placement, rank: int, row: int, column: int) -> bool:
    """Whether a rank holds a block of a tensor placed so."""
    if place == ROWS:
        return row == rank
    if place == COLUMNS:
        return column == rank
    return True
