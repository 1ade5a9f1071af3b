"""The statements about a step's values that a proof has shown, in words, and no others.

Purpose: one text for the command line, `plan.json` and the header of `train.py`.
Non-goals: showing it (`verify`).
"""

from collections.abc import Mapping, Sequence

from attrs import frozen

from ..config.units import count_words
from ..ir import Program
from ..ops import OPS

Mesh = dict[str, int]


KEPT = "by an earlier command, from the same IR; --no-cache evaluates it anew"


@frozen
class Proof:
    """A proof that the sharded step equals the single device's: in all its results, on every rank
    of each of `meshes`.

    against  what the single-device step was made from, a plan or IR text: "the model before any
             placement", or what there is of it in IR text of a later stage
    bound    the logarithm to base 2 of the probability that a step that is not equal passes
    causality  the tokens that a loss does not depend on, in words
    gradients, parameters  how many of each were compared, beside loss, norm and count
    ops      the number of ops of the IR, of `kinds` kinds, each evaluated by its field meaning
    trusted  the user's own functions among the ops; their meaning is any function of the dims that
             they work along
    losses   2 where routers have a loss of their own
    stages   the axis of a pipeline's stages, whose rows were run
    elastic  the sizes of an elastic axis, for instance `dp 8, 6 or 4`; each was shown
    kept     whether an earlier command showed it, of the same IR by the same code, and kept it in
             the user's cache
    """

    against: str
    meshes: tuple[Mesh, ...]
    prime: int
    trials: int
    bound: int
    causality: str
    gradients: int
    parameters: int
    ops: int
    kinds: int
    trusted: tuple[str, ...] = ()
    losses: int = 1
    stages: str = ""
    elastic: str = ""
    kept: bool = False

    def results(self) -> str:
        """The results that were compared."""
        gradients = count_words(self.gradients, "gradient")
        parameters = count_words(self.parameters, "updated parameter")
        return f"{self._losses()}, gradient norm, count of labels, {gradients} and {parameters}"

    def _losses(self) -> str:
        return "loss, routers' loss" if self.losses > 1 else "loss"

    def where(self) -> str:
        """The meshes that it was evaluated on."""
        return " and ".join(mesh_words(mesh) for mesh in self.meshes)

    def rows(self) -> str:
        """How a pipeline was evaluated; "" without one."""
        if not self.stages:
            return ""
        ranks = " and ".join(dict.fromkeys(str(mesh[self.stages]) for mesh in self.meshes))
        return (
            f"the rows of {ranks} ranks of {self.stages} run action by action, their messages"
            " first in, first out"
        )

    def field(self) -> str:
        """How it was evaluated, and how sure that is."""
        return (
            f"integers modulo {self.prime}, {count_words(self.trials, 'trial')}, error below"
            f" 2^{self.bound}"
        )

    def summary(self) -> str:
        """One line."""
        gradients = count_words(self.gradients, "gradient")
        updates = count_words(self.parameters, "update")
        results = f"{self._losses()}, {gradients} and {updates}"
        equal = f"{results} equal on {self.where()}, error below 2^{self.bound}"
        summary = f"the step is that of a single device: {equal}"
        if self.elastic:
            summary += f"; so it is with {self.elastic}"
        if self.kept:
            summary += f" ({KEPT})"
        return summary

    def lines(self) -> str:
        """All of it, in a few lines."""
        rows = {
            "results": self.results(),
            "against": f"the step on one device of {self.against}",
            "meshes": f"{self.where()}, at small sizes",
            "field": self.field(),
            "ops": f"{self.ops} in the IR, of {self.kinds} kinds, each with a field meaning",
            "causality": self.causality,
        }
        if self.elastic:
            rows["sizes"] = f"{self.elastic}: at small sizes they are these meshes"
        if self.stages:
            rows["stages"] = self.rows()
        if self.kept:
            rows["evaluated"] = KEPT
        if self.trusted:
            rows["trusted"] = (
                f"{', '.join(self.trusted)}: each taken to be some function of its slices"
            )
        return "\n".join(f"{name:<9} {text}" for name, text in rows.items())


def mesh_words(mesh: Mesh) -> str:
    """For instance `dp 2 × tp 3`."""
    return " × ".join(f"{name} {size}" for name, size in mesh.items()) or "one rank"


def get_user_functions(program: Program) -> tuple[str, ...]:
    """The user's own functions that a program calls, each as module:function."""
    return tuple(sorted({str(op.get("function")) for op in program.ops if op.kind == "call"}))


@frozen
class Tried:
    """A function of the user's own that was run on random numbers, and the checks that it passed,
    in words.
    """

    function: str
    checks: tuple[str, ...]


def find_untried_functions(program: Program, tried: Sequence[Tried]) -> tuple[str, ...]:
    """The user's own functions that a program calls and nothing has tried."""
    names = {trial.function for trial in tried}
    return tuple(function for function in get_user_functions(program) if function not in names)


def but_for(functions: Sequence[str]) -> str:
    """The words after "verified": none, or the functions that were not tried."""
    if not functions:
        return ""
    return f", but for {', '.join(functions)}"


def trust_words(functions: Sequence[str], proved: bool) -> str:
    """The statement about functions that were not tried; "" where there are none.

    proved: whether the step was.
    """
    if not functions:
        return ""
    begins = f"Not tried: {', '.join(functions)}"
    if proved:
        begins = f"Verified{but_for(functions)}"
    return f"{begins}.  Nothing has shown that a function does what the plan's `op` says of it."


def get_trial_words(functions: Sequence[str]) -> str:
    """The statement about functions that were tried; "" where there are none."""
    if not functions:
        return ""
    return (
        f"Tried on random numbers: {', '.join(functions)}.  Each does what the plan's `op`"
        " says of it; plan.json lists"
        " what was tried.  What it computes is not shown."
    )


NOT_EVALUATED = "not evaluated: compiled with --no-verify"

RUN_TIME = (
    "not run by the compiler; scalec's tests run such programs on gloo against plain torch, and"
    " `SCALEC_RECORD=1` with `scalec verify --recorded` checks a run's collectives against"
    " this account"
)

RUN_TIME_OF_TORCH = (
    "not run by the compiler; scalec's tests run such programs on gloo against plain torch,"
    " and record what torch"
    " communicates beside this account"
)


def composite(program: Program) -> dict[str, str]:
    """The ops whose calls the proof takes for granted: that they do what the op means."""
    kinds = set[str]()
    for op in program.ops:
        if op.kind in OPS and OPS[op.kind].plan_name != op.kind:
            kinds.add(op.kind)
    statements: dict[str, str] = {}
    for kind in sorted(kinds):
        name = OPS[kind].plan_name
        statements[kind] = f"shown equal to {name}, hop by hop on 1 to 5 ranks, by scalec's tests"
    return statements


def certificate(
    proof: Proof | None,
    matched: int,
    program: Program,
    torch_alone: bool = False,
    tried: Sequence[Tried] = (),
    hashes: Mapping[str, str] | None = None,
) -> dict[str, object]:
    """The certificate of `plan.json`; `matched` ops were matched by the read-back.

    `tried` are the functions that were tried, `hashes` the hashes of their modules' files, by name.
    """
    fields: dict[str, object] = {
        "placements": "every op type-checked after every pass",
        "values": _values(proof) if proof else NOT_EVALUATED,
        "emission": f"train.py read back, {matched} ops matched to the IR",
        "run_time": RUN_TIME_OF_TORCH if torch_alone else RUN_TIME,
    }
    if composite_ops := composite(program):
        fields["composite_ops"] = composite_ops
    if tried:
        fields["tried"] = [_trial(trial, hashes or {}) for trial in tried]
    functions = find_untried_functions(program, tried)
    if functions and proof:
        fields["verified"] = f"verified{but_for(functions)}"
    if functions:
        fields["taken_at_their_word"] = list(functions)
    return fields


def _trial(tried: Tried, hashes: Mapping[str, str]) -> dict[str, object]:
    """A function that was tried, the hash of its module, and what was tried."""
    module = f"{tried.function.partition(':')[0]}.py"
    return {
        "function": tried.function,
        "module": hashes.get(module, ""),
        "tried": list(tried.checks),
    }


FULL_ROWS = "those of this plan are checked to be complete, in order and free of deadlock, not run"
"""The statement about rows at full size."""


def _values(proof: Proof) -> dict[str, object]:
    fields: dict[str, object] = {
        "claim": f"the IR's step evaluated equal to the single-device step of {proof.against},"
        " without tolerance",
    }
    if proof.stages:
        fields["stages"] = f"{proof.rows()}; {FULL_ROWS}"
    fields["results"] = proof.results()
    fields["meshes"] = list(proof.meshes)
    if proof.elastic:
        fields["each_of"] = proof.elastic
    fields |= {
        "prime": proof.prime,
        "trials": proof.trials,
        "error": f"below 2^{proof.bound}",
        "causality": proof.causality,
        "ops": proof.ops,
        "kinds_of_ops": proof.kinds,
        "not_covered": "rounding, kernels, the network, sizes other than those of the meshes",
    }
    if proof.kept:
        fields["evaluated"] = KEPT
    return fields


def header(proof: Proof | None) -> str:
    """The lines of `train.py`'s docstring."""
    if not proof:
        return (
            "Verified: this file matches the IR, op for op.\n"
            "Not verified: that the step's values are those of a single device, for it was"
            " compiled with --no-verify."
        )
    return (
        "Verified: the IR's step was evaluated equal to the single-device step of"
        f" {proof.against};\n"
        "this file matches the IR, op for op;\n"
        f"{proof.causality}.\n"
        "Not verified: rounding, kernels, the network.  plan.json holds the certificate;"
        " SCALEC_SANITIZE=1 checks a run."
    )
