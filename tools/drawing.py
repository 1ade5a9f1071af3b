"""Shapes of pictures, as SVG: boxes, words, lines, arrows, bands.

Sizes are pixels, y grows downwards.  Styles are classes of `drawing.css.j2`; a picture that is a
file of its own has them inside.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from html import escape
from math import floor, log10

from ..compiler.syntax.package_data import fill_template

LETTER = 6.6
"""The width of a letter of words, which are 11 pixels high."""

SERIES = 8
"""The number of colours of series: the classes `s0` to `s7` fill, `t0` to `t7` write, `l0` to
`l7` draw lines.
"""


MARGIN = 12
"""The blank around a picture that is a file."""


def text_width(text: str) -> float:
    """The width of words in pixels."""
    return len(text) * LETTER


def fit(text: str, width: float) -> str:
    """A text, cut to the letters that `width` pixels have room for."""
    most = int(width / LETTER)
    if len(text) <= most:
        return text
    return f"{text[: most - 1]}…"


def pixels(value: float) -> str:
    """A length with at most one digit after the point."""
    return f"{value:.1f}".removesuffix(".0")


class Canvas:
    """Shapes in the order of their drawing: each later one is over the earlier ones."""

    def __init__(self, width: float) -> None:
        self.width, self.height = width, 0.0
        self._shapes: list[str] = []

    def box(
        self,
        x: float,
        y: float,
        width: float,
        height: float,
        style: str,
        note: str = "",
        round: int = 2,
    ) -> None:
        """A rectangle; `note` is shown where the pointer is over it."""
        size = f'width="{pixels(width)}" height="{pixels(height)}"'
        if round:
            size += f' rx="{round}"'
        end = "/>"
        if note:
            end = f"><title>{escape(note)}</title></rect>"
        self._add(f'<rect class="{style}" x="{pixels(x)}" y="{pixels(y)}" {size}{end}', y + height)

    def words(self, x: float, y: float, text: str, style: str = "") -> None:
        """Words whose baseline is at y; `style` has `mid` or `end` where x is not their
        beginning.
        """
        class_attribute = f' class="{style}"' if style else ""
        place = f'x="{pixels(x)}" y="{pixels(y)}"'
        self._add(f"<text{class_attribute} {place}>{escape(text, quote=False)}</text>", y + 4)

    def line(self, x: float, y: float, to_x: float, to_y: float, style: str = "grid") -> None:
        """A straight line."""
        ends = f'x1="{pixels(x)}" y1="{pixels(y)}" x2="{pixels(to_x)}" y2="{pixels(to_y)}"'
        self._add(f'<line class="{style}" {ends}/>', max(y, to_y))

    def arrow(self, x: float, y: float, to_x: float, to_y: float, style: str = "arrow") -> None:
        """A straight line with a head at its end."""
        far = max(((to_x - x) ** 2 + (to_y - y) ** 2) ** 0.5, 1e-9)
        along, across = (to_x - x) / far * 5, (to_y - y) / far * 5
        # the head's two ends lie behind its point, half as far to either side
        left = (to_x - along - across * 0.5, to_y - across + along * 0.5)
        right = (to_x - along - across * -0.5, to_y - across + along * -0.5)
        head = " ".join(f"{pixels(a)} {pixels(b)}" for a, b in (left, (to_x, to_y), right))
        self._add(
            f'<path class="{style}" d="M{pixels(x)} {pixels(y)}L{pixels(to_x)}'
            f' {pixels(to_y)}M{head}"/>',
            y,
        )

    def path(self, points: Iterable[tuple[float, float]], style: str) -> None:
        """A line through points."""
        drawn = " ".join(f"{pixels(x)} {pixels(y)}" for x, y in points)
        self._add(f'<path class="{style}" d="M{drawn}"/>')

    def stairs(
        self,
        xs: Sequence[float],
        low: Sequence[float],
        high: Sequence[float],
        style: str,
        note: str,
    ) -> None:
        """An area between two lines of steps: each y is kept from its x to the next; `xs` has
        the end too.
        """
        up = "".join(_steps(xs, high))
        down = "".join(_steps(xs[::-1], low[::-1]))
        inside = f"<title>{escape(note)}</title>"
        self._add(
            f'<path class="{style}" d="M{pixels(xs[0])}'
            f' {pixels(low[0])}{up}{down}Z">{inside}</path>'
        )

    def bars(
        self, bars: Iterable[tuple[float, float]], y: float, height: float, style: str
    ) -> None:
        """Boxes in a row, each from one x to another, around y, as one line of this height."""
        drawn = "".join(f"M{pixels(x)} {pixels(y)}H{pixels(to)}" for x, to in bars)
        self._add(
            f'<path class="{style}" stroke-width="{pixels(height)}" d="{drawn}"/>', y + height / 2
        )

    def cells(self, cells: Iterable[tuple[float, float, float]], height: float, style: str) -> None:
        """Boxes of one height as one shape, each by its left, its top and its right."""
        rectangles: list[str] = []
        for x, y, to in cells:
            rectangles.append(
                f"M{pixels(x)} {pixels(y)}H{pixels(to)}v{pixels(height)}H{pixels(x)}z"
            )
        self._add(f'<path class="{style}" d="{"".join(rectangles)}"/>')

    def dot(self, x: float, y: float, radius: float, style: str) -> None:
        """A filled circle."""
        self._add(
            f'<circle class="{style}" cx="{pixels(x)}" cy="{pixels(y)}" r="{pixels(radius)}"/>'
        )

    def _add(self, shape: str, foot: float = 0) -> None:
        self._shapes.append(shape)
        self.height = max(self.height, foot)

    def svg(self, label: str, note: str = "") -> str:
        """The picture as part of a page; `label` tells people who do not see it what it shows."""
        size = f'viewBox="0 0 {pixels(self.width)} {pixels(self.height + 6)}"'
        role = f'role="img" aria-label="{escape(label)}"'
        lines = [f'<svg xmlns="http://www.w3.org/2000/svg" class="drawing" {size} {role}>']
        if note:
            lines.append(note)
        return "\n".join((*lines, *self._shapes, "</svg>"))

    def file(self, label: str, mark: str = "", fills: Mapping[str, str] | None = None) -> str:
        """The picture as a file of its own, in light and dark; `fills` are the colours of
        classes that this picture alone has.
        """
        note = f"<!-- {mark} -->\n" if mark else ""
        width, height = self.width + 2 * MARGIN, self.height + 2 * MARGIN
        size = f'width="{pixels(width)}" height="{pixels(height)}"'
        page = f'<rect class="page" x="{-MARGIN}" y="{-MARGIN}" {size}/>'
        text = self.svg(label, f"{note}<style>\n{styles(fills or {})}</style>\n{page}")
        # the head of the picture in a page ends before its role; a file has another size there
        _, role, body = text.partition(' role="')
        head = f'<svg xmlns="http://www.w3.org/2000/svg" class="drawing" {size}'
        view = f'viewBox="{-MARGIN} {-MARGIN} {pixels(width)} {pixels(height)}"'
        return f"{head} {view}{role}{body}\n"


def _steps(xs: Sequence[float], ys: Sequence[float]) -> Iterator[str]:
    """Commands of a path: to each y, then along it to the next x; equal neighbours are one."""
    for position, y in enumerate(map(pixels, ys)):
        if position == len(ys) - 1 or pixels(ys[position + 1]) != y:
            yield f"V{y}H{pixels(xs[position + 1])}"


def styles(fills: Mapping[str, str]) -> str:
    """The styles of all shapes, and of classes that fill with colours; `fills` has the colour
    of each class.
    """
    return fill_template("drawing.css.j2", fills=fills)


def ticks(until: float, most: int = 6) -> Iterator[float]:
    """Round numbers from 0 to `until`, at most `most` steps of 1, 2 or 5 times a power of ten."""
    if until <= 0:
        return
    power = 10 ** floor(log10(until / most))
    step = next(factor * power for factor in (1, 2, 5, 10) if until / (factor * power) <= most)
    for number in range(int(until / step * (1 + 1e-9)) + 1):
        yield number * step


def columns(points: Sequence[tuple[float, float]], width: int) -> list[int]:
    """The indices of at most one point for each of `width` columns, the highest point in it.

    A point is an x from 0 to 1 and a y; `points` are in the order of x.
    """
    highest: dict[int, int] = {}
    for index, (x, y) in enumerate(points):
        column = min(int(x * width), width - 1)
        if column not in highest or y > points[highest[column]][1]:
            highest[column] = index
    return [*highest.values()]
