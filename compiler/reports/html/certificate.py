"""The certificate of a plan in sentences: what is shown, how surely, and what is not."""

from ...analysis.certificate import FULL_ROWS, NOT_EVALUATED, RUN_TIME, Proof, trust_words
from .subject import Subject


def sentences(of: Subject) -> list[tuple[str, str]]:
    """A name and a sentence each."""
    found = [("placements", "Each op's placements are inferred from its operands' and compared, after every pass.")]
    proof = of.proof
    if proof is None:
        return [*found, ("values", f"The step's values are {NOT_EVALUATED}."), *_always()]
    found += _values(proof)
    if taken := trust_words(proof.trusted):
        found.append(("taken at their word", taken))
    found.append(("not covered", "Rounding, kernels, the network, and sizes other than those of the small meshes."))
    return [*found, *_always()]


def _values(proof: Proof) -> list[tuple[str, str]]:
    sure = f"Evaluated as {proof.field()}."
    rows = f"For stages, {proof.rows()}; {FULL_ROWS}." if proof.stages else ""
    each = f"So it is with each of {proof.elastic}." if proof.elastic else ""
    step = f"{proof.results()} equal those of one device, on {proof.where()}, at small sizes."
    said = {"values": f"{step[0].upper()}{step[1:]}", "sizes": each, "pipeline": rows, "certainty": sure}
    ops = f"All {proof.ops} ops of the step took part, of {proof.kinds} kinds."
    return [(name, text) for name, text in {**said, "ops": ops}.items() if text]


def _always() -> list[tuple[str, str]]:
    emitted = "`scalec compile` reads train.py back and matches it to the program shown here, op for op."
    return [("train.py", emitted), ("a run", f"{RUN_TIME[0].upper()}{RUN_TIME[1:]}.")]
