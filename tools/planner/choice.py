"""One point of the space: all that a plan says of how a model is trained on a number of GPUs."""

from collections.abc import Mapping

from attrs import evolve, fields, frozen

AXES = ("pp", "dp", "cp", "ep", "tp")
"""The axes of a mesh, outermost first."""

NONE, REGATHER, SELECTIVE, HALF, FULL = RECOMPUTE = (
    "none",
    "regather",
    "selective",
    "half",
    "full",
)
"""Parts that backward recomputes: nothing, gathers, cheap ops, all of every second layer, all
layers.
"""

WORDS = {True: "on", False: "off"}


@frozen
class Choice:
    """Degrees of all axes, and settings; a setting that a plan does not need has its default.

    sp        whether `seq` lies over tp too, where nothing else does
    via       how attention gets the keys of other ranks of cp; "" without cp
    fold      whether experts lie over tp too
    zero      ZeRO's stage, over all axes of data
    schedule  of a pipeline; "" without one
    chunks    stages of a rank
    """

    pp: int = 1
    dp: int = 1
    cp: int = 1
    ep: int = 1
    tp: int = 1
    sp: bool = False
    via: str = ""
    fold: bool = False
    zero: int = 0
    microbatch: int = 1
    recompute: str = NONE
    schedule: str = ""
    chunks: int = 1
    prefetch: int = 1

    @property
    def degrees(self) -> dict[str, int]:
        """The axes with several ranks, outermost first."""
        return {axis: size for axis in AXES if (size := getattr(self, axis)) > 1}

    @property
    def gpus(self) -> int:
        """All ranks of the mesh."""
        return self.pp * self.dp * self.cp * self.ep * self.tp

    @property
    def replicas(self) -> int:
        """How many ranks have different sequences."""
        return self.dp * self.ep

    @property
    def data_axes(self) -> tuple[str, ...]:
        """The axes whose ranks have different tokens: state is shared over them."""
        return tuple(axis for axis in ("dp", "cp", "ep") if axis in self.degrees)

    @property
    def mesh(self) -> str:
        """For instance `pp 4 × dp 8 × tp 8`."""
        return " × ".join(f"{axis} {size}" for axis, size in self.degrees.items()) or "one rank"

    @property
    def settings(self) -> dict[str, str]:
        """The choices besides the mesh, by the names that `--keep` takes."""
        settings = {"microbatch": str(self.microbatch)}
        if self.data_axes:
            settings["zero"] = str(self.zero)
        if self.pp > 1:
            settings["schedule"] = self.schedule
            if self.schedule in CHUNKED:
                settings["schedule"] += f"({self.chunks})"
        if self.recompute != NONE:
            settings["recompute"] = self.recompute
        if self.tp > 1:
            settings["sp"] = WORDS[self.sp]
        if self.cp > 1:
            settings["via"] = self.via
        if self.ep > 1 and self.tp > 1:
            settings["fold"] = WORDS[self.fold]
        if self.prefetch != 1:
            settings["prefetch"] = str(self.prefetch)
        return settings

    def __str__(self) -> str:
        settings = [f"{name} {value}" for name, value in self.settings.items()]
        return ", ".join((self.mesh, *settings))

    def differs(self, other: "Choice") -> dict[str, tuple[object, object]]:
        """The names of fields that differ, with the values of both choices."""
        differences = dict[str, tuple[object, object]]()
        for field in fields(Choice):
            value, other_value = getattr(self, field.name), getattr(other, field.name)
            if value != other_value:
                differences[field.name] = (value, other_value)
        return differences

    def matches(self, kept: Mapping[str, object]) -> bool:
        """Whether it has all of these values."""
        return all(getattr(self, name) == value for name, value in kept.items())

    def on(self, **values: object) -> "Choice":
        """The same with other values."""
        return evolve(self, **values)


CHUNKED = ("interleaved_1f1b", "interleaved_zero_bubble")
"""Schedules that need a number of stages of a rank."""
