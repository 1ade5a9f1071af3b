"""Memory of a rank over one microbatch, moment by moment, for drawings: the walk that finds the peak, written down.

Layers that the walk does not visit are like the nearest that it does, but for what the layers before them keep.
Non-goals: seconds; pipelines (`pipeline_peak.over_row`).
"""

from collections.abc import Iterator
from itertools import groupby

from attrs import evolve

from ...ir import Program
from ...ops.saved_tensors import Device
from ..expert_loads import with_room
from .aliasing import Storages
from .peak import PeakSnapshot, Walk
from .pipeline_peak import device_of
from .saved_activations import Keeper

Noted = tuple[PeakSnapshot, int]
"""A moment, and the bytes that the other layers of its outermost repeat keep."""


class _Recorder(Walk):
    def __init__(self, storages: Storages, keeper: Keeper, device: Device) -> None:
        self.moments: list[Noted] = []
        super().__init__(storages, keeper, device)

    def _note(self, moment: PeakSnapshot) -> None:
        super()._note(moment)
        self.moments.append((moment, self._of_others()))


def over_microbatch(program: Program) -> list[PeakSnapshot]:
    """The moments of a microbatch in all layers, forward's before backward's, and that of the update."""
    storages = Storages(with_room(program))
    device = device_of(program)
    recorder = _Recorder(storages, Keeper(storages, device), device)
    runs = groupby(recorder.moments, key=lambda it: (it[0].where, it[0].layers[:1] and it[0].layers[0][0]))
    moments = [moment for (_, dim), run in runs for moment in (_layers([*run]) if dim else (it for it, _ in run))]
    return [*moments, recorder.peaks["update"]]


def _layers(run: list[Noted]) -> Iterator[PeakSnapshot]:
    """The moments of all layers of a repeat."""
    visited: dict[int, list[Noted]] = {}
    for noted in run:
        visited.setdefault(noted[0].layers[0][1], []).append(noted)
    first, _ = run[0]
    count = first.layers[0][2]
    for at in range(1, count + 1) if first.where == "forward" else range(count, 0, -1):
        nearest = min(visited, key=lambda other: abs(other - at))
        for moment, others in visited[nearest]:
            yield moment if at == nearest else _moved(moment, others, at)


def _moved(moment: PeakSnapshot, others: int, to: int) -> PeakSnapshot:
    """The same moment in another layer: the layers before it keep a part of what those before the visited one keep."""
    (dim, at, count), *inner = moment.layers
    kept = moment.kept - others + others * (to - 1) // max(at - 1, 1)
    return evolve(moment, layers=((dim, to, count), *inner), kept=max(kept, 0))
