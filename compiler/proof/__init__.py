"""Shows, before anything runs, that a sharded step computes the single-device step."""

from attrs import evolve

from ..analysis.certificate import Proof
from ..analysis.elastic import elastic_words, every_size
from ..ir import Program
from ..syntax.diagnostics import PlanError, wrong
from .proof import FIRST, Case, HiddenTokensError, UnequalError, cases, prove

DEFECT = "the plan is not at fault: this is a bug in scalec; please report it with the plan"


def verify_alike(program: Program, model: Program, proved: list[list[Case]]) -> Proof | None:
    """As `verify`, but None for cases that are `proved` already; the cases of `program` are added.

    Raises PlanError.
    """
    new_cases = cases(program, model)
    if new_cases in proved:
        return None
    proof = _proof(program, model)
    proved.append(new_cases)
    return proof


def verify(program: Program, model: Program) -> Proof:
    """The proof for `program`, after the last pass: its step is the step of `model`, the plan
    before any placement.

    It holds at each size of an elastic axis; small meshes that are the same for several sizes are
    evaluated once.  Raises PlanError with the first value that is wrong.
    """
    proved: list[list[Case]] = []
    proofs = list[Proof]()
    for sized_program, sized_model in zip(every_size(program), every_size(model), strict=True):
        if proof := verify_alike(sized_program, sized_model, proved):
            proofs.append(proof)
    meshes = dict.fromkeys(tuple(mesh.items()) for proof in proofs for mesh in proof.meshes)
    return evolve(
        proofs[0],
        meshes=tuple(map(dict, meshes)),
        trials=min(proof.trials for proof in proofs),
        bound=max(proof.bound for proof in proofs),
        elastic=elastic_words(program),
    )


def _proof(program: Program, model: Program) -> Proof:
    try:
        return prove(program, model)
    except UnequalError as error:
        from .locate import locate

        diagnostic = locate(error, program, model)
        if model.after == FIRST:
            diagnostic = evolve(diagnostic, help=DEFECT)
        raise PlanError([diagnostic]) from None
    except HiddenTokensError:
        message = "a loss depends on a later token, another document or another sequence"
        help = "if that is on purpose, write `bidirectional` or `cross_document` after the pass"
        if model.after == FIRST:
            help = DEFECT
        raise wrong("E0224", message, model.region.span, help=help) from None
