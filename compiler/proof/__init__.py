"""Shows, before anything runs, that a sharded step computes the single-device step."""

from attrs import evolve

from ..analysis.certificate import Proof
from ..analysis.elastic import elastic_words, every_size
from ..ir import Program
from ..syntax.diagnostics import PlanError, wrong
from .proof import FIRST, Case, HiddenTokensError, UnequalError, cases, prove

DEFECT = "the plan is not at fault: this is a bug in scalec; please report it with the plan"


def verify_alike(program: Program, model: Program, known: list[list[Case]]) -> Proof | None:
    """As `verify`, but for cases that are `known` to be equal; those of `program` are added.

    Raises PlanError.
    """
    if (own := cases(program, model)) in known:
        return None
    proof = _proof(program, model)
    known.append(own)
    return proof


def verify(program: Program, model: Program) -> Proof:
    """The result for `program`, after the last pass: its step is that of `model`, the plan before
    any placement.

    So it is at each size of an elastic axis; small meshes that are the same for several are
    evaluated once.  Raises PlanError with the first value that is wrong.
    """
    known: list[list[Case]] = []
    each = zip(every_size(program), every_size(model), strict=True)
    first, *others = (proof for pair in each if (proof := verify_alike(*pair, known)))
    meshes = dict.fromkeys(
        tuple(mesh.items()) for proof in (first, *others) for mesh in proof.meshes
    )
    return evolve(
        first,
        meshes=tuple(map(dict, meshes)),
        trials=min(proof.trials for proof in (first, *others)),
        bound=max(proof.bound for proof in (first, *others)),
        elastic=elastic_words(program),
    )


def _proof(program: Program, model: Program) -> Proof:
    try:
        return prove(program, model)
    except UnequalError as error:
        from .locate import locate

        found = locate(error, program, model)
        raise PlanError([evolve(found, help=DEFECT) if model.after == FIRST else found]) from None
    except HiddenTokensError:
        message = "a loss depends on a later token, another document or another sequence"
        help = (
            DEFECT
            if model.after == FIRST
            else "if that is on purpose, write `bidirectional` or `cross_document` after the pass"
        )
        raise wrong("E0224", message, model.region.span, help=help) from None
