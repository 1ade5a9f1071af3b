"""The section `pipeline`, and the rules of `shard` that lay repeats over an axis: what is to be cut into stages.

Non-goals: where it is cut (`passes.cut_stages`).
"""

from attrs import evolve

from ... import syntax
from ...diagnostics import Diagnostics, Note, listing
from ...ir import Claim, Pipeline, Program, Region
from ...settings import Pipelining, read


def pipelined(program: Program, section: syntax.Section, given: bool) -> Program:
    """The program with the claims of repeats taken for its pipeline.  Raises PlanError."""
    found = Diagnostics()
    settings = read(Pipelining, section, found)
    found.check()
    assert settings, "resolve: settings that failed to read were not reported"
    outermost = [stmt.dim for stmt in program.region.body if isinstance(stmt, Region)]
    inner = {dim for stmt in program.region.body if isinstance(stmt, Region) for dim in _inside(stmt)}
    cuts = [claim for claim in program.claims if claim.dim in outermost or claim.dim in inner]
    if not cuts:
        if given:
            help = "lay a repeat over an axis in `shard`, as in `layers over pp`"
            found.error("E0517", "there is nothing to cut into stages", section.head, help=help)
        found.check()
        return program
    _check(program, cuts, inner, found)
    found.check()
    dims = tuple(dim for dim in outermost if dim in {claim.dim for claim in cuts})
    claims = tuple(claim for claim in program.claims if claim not in cuts)
    return evolve(program, claims=claims, pipeline=Pipeline(cuts[0].axis, dims, settings))


def _inside(region: Region) -> list[str]:
    inner = [stmt for stmt in region.body if isinstance(stmt, Region)]
    return [dim for stmt in inner for dim in (stmt.dim, *_inside(stmt))]


def _check(program: Program, cuts: list[Claim], inner: set[str], found: Diagnostics) -> None:
    """Repeats that stand in no other, each over the one axis that nothing else lies over."""
    axis, reported = cuts[0].axis, set[object]()
    for claim in cuts:
        if claim.span in reported:
            continue
        reported.add(claim.span)
        if claim.dim in inner:
            help = "cut the repeat around it"
            found.error("E0513", f"`{claim.dim}` stands in another repeat", claim.span, "cannot be cut", help=help)
        elif claim.axis != axis:
            note = Note(cuts[0].span, "the first one")
            help = f"write `{listing({each.dim: None for each in cuts}, word='and')} over {axis}`"
            found.error("E0513", f"repeats are cut over one axis, not over {listing([axis, claim.axis])}", claim.span, notes=[note], help=help)
    for claim in program.claims:
        if claim.axis == axis and claim not in cuts:
            note = Note(cuts[0].span, "cut into stages here")
            help = "give the stages an axis of their own in `mesh`"
            found.error("E0513", f"`{claim.dim}` lies over the stages' axis", claim.span, notes=[note], help=help)
