"""The sections of settings, each by itself and all together; what stands in for those that cannot be read.

Non-goals: what settings have to do with the model (`inputs`, `logits`), and with its dims.
"""

from collections.abc import Mapping, Sequence
from math import prod

from attrs import evolve, frozen

from ..config.fields import fields_of
from ..config.gpus import check_gpu, kernels_for
from ..config.settings import STDLIB, Cluster, Data, Flow, Optimizer, Pipelining, Train, read
from ..ir import Axis
from ..syntax import tree
from ..syntax.diagnostics import Diagnostics
from .compile_checks import check_compiled
from .pipeline import read_pipelining
from .precision import element_types
from .rates import check_rates
from .state import read_flow


@frozen
class Sections:
    """What the plan says in them; `train` is None where that cannot be read, others are as if they were not there."""

    train: Train | None
    cluster: Cluster
    flow: Flow
    pipeline: Pipelining | None


def read_settings(
    given: Mapping[str, tree.Section], sections: Mapping[str, tree.Section], found: Diagnostics
) -> Sections:
    """The settings; `sections` has an empty one in the place of each that is not `given`."""
    cluster = read(Cluster, sections["cluster"], found) if "cluster" in given else None
    train = _train(sections["train"], cluster or Cluster(), found)
    if cluster:
        check_gpu(cluster, found)
    pipeline = read_pipelining(given["pipeline"], found) if "pipeline" in given else None
    flow = read_flow(sections["state"], found)
    return Sections(train, cluster or Cluster(), flow or Flow(), pipeline if train else None)


def _train(section: tree.Section, cluster: Cluster, found: Diagnostics) -> Train | None:
    mistakes = Diagnostics()
    train = read(Train, section, mistakes)
    if train:
        for check in (element_types, check_compiled, check_rates):
            with mistakes.catch():
                check(train)
    with found.catch():
        mistakes.check()
        assert train, "resolve: settings that failed to read were not reported"
        return evolve(train, kernels=kernels_for(train, cluster))
    return None


def standing_in(section: tree.Section, axes: Sequence[Axis]) -> Train:
    """Settings by which to look for mistakes of sharding where the section cannot be read: axes divide their dims."""
    ranks, spans = prod(axis.size for axis in axes), {field.name: section.head for field in fields_of(Train)}
    return Train(ranks, ranks, 1, 1, Optimizer("sgd", 1.0), Data("text", (STDLIB,)), spans=spans)
