"""Colours of actions: a hue for each chunk, a shade for each letter; black is legible on all of them."""

from ...schedules.actions import Work

HUES = (  # forward, backward or its input part, weight part
    ("87afff", "5f87d7", "d7d7ff"),
    ("ffaf5f", "d7875f", "ffd7af"),
    ("87d787", "5faf5f", "d7ffd7"),
    ("ff87d7", "d75faf", "ffd7ff"),
    ("5fd7d7", "5fafaf", "d7ffff"),
    ("ffd75f", "d7af5f", "ffffaf"),
)
"""All of the 216 colours that terminals have."""

_SHADES = {Work.FORWARD: 0, Work.BACKWARD: 1, Work.INPUT: 1, Work.WEIGHT: 2}


def colour(chunk: int, work: Work) -> str:
    """Six hexadecimal digits."""
    return HUES[chunk % len(HUES)][_SHADES[work]]


def terminal_colour(chunk: int, work: Work) -> int:
    """Its number in a terminal's palette of 256, whose cube begins at 16 with levels 00, 5f, 87, af, d7, ff."""
    red, green, blue = (max(0, (level - 35) // 40) for level in bytes.fromhex(colour(chunk, work)))
    return 16 + 36 * red + 6 * green + blue
