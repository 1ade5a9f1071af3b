"""The statements about a step's values that a proof has shown, in words: no more than that.

Purpose: one text for the command line, `plan.json` and the header of `train.py`.
Non-goals: showing it (`verify`).
"""

from collections.abc import Mapping, Sequence

from attrs import frozen

from ..config.units import counted
from ..ir import Program
from ..ops import OPS

Mesh = dict[str, int]


KEPT = "by an earlier command, from the same IR; --no-cache evaluates it anew"


@frozen
class Proof:
    """The sharded step equals the single device's on each of `meshes`: all its results, on every
    rank.

    against  what the single-device step was made from, a plan or IR text: "the model before any
             placement", or what there is of it in IR text of a later stage
    bound    the logarithm to base 2 of the probability that a step that is not equal passes
    causality  the tokens on which a loss does not depend, in words
    gradients, parameters  how many of each were compared, beside loss, norm and count
    ops      the number of ops of the IR, of `kinds` kinds, each evaluated by its field meaning
    trusted  the user's own functions among them, whose meaning is any function of the dims that
             they work along
    losses   2 where routers have one of their own
    stages   the axis of a pipeline's stages, whose rows were run
    elastic  the sizes of an elastic axis, each of which was shown, for instance `dp 8, 6 or 4`
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
        both = (
            f"{counted(self.gradients, 'gradient')} and"
            f" {counted(self.parameters, 'updated parameter')}"
        )
        return f"{self._losses()}, gradient norm, count of labels, {both}"

    def _losses(self) -> str:
        return "loss, routers' loss" if self.losses > 1 else "loss"

    def where(self) -> str:
        """The meshes on which it was evaluated."""
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
            f"integers modulo {self.prime}, {counted(self.trials, 'trial')}, error below"
            f" 2^{self.bound}"
        )

    def summary(self) -> str:
        """One line."""
        both = (
            f"{self._losses()}, {counted(self.gradients, 'gradient')} and"
            f" {counted(self.parameters, 'update')}"
        )
        each = f"; so it is with {self.elastic}" if self.elastic else ""
        kept = f" ({KEPT})" if self.kept else ""
        equal = f"{both} equal on {self.where()}, error below 2^{self.bound}"
        return f"the step is that of a single device: {equal}{each}{kept}"

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


def trusted(program: Program) -> tuple[str, ...]:
    """The user's own functions that a program calls, each as module:function."""
    return tuple(sorted({str(op.get("function")) for op in program.ops if op.kind == "call"}))


@frozen
class Tried:
    """A function of the user's own that was run on random numbers, and what was seen to hold,
    in words.
    """

    function: str
    checks: tuple[str, ...]


def untried(program: Program, tried: Sequence[Tried]) -> tuple[str, ...]:
    """The user's own functions that a program calls and nothing has tried."""
    done = {each.function for each in tried}
    return tuple(function for function in trusted(program) if function not in done)


def but_for(functions: Sequence[str]) -> str:
    """The words after "verified": none, or the functions that were not tried."""
    return f", but for {', '.join(functions)}" if functions else ""


def trust_words(functions: Sequence[str], proved: bool) -> str:
    """The statement about functions that were not tried; "" where there are none.

    proved: whether the step was.
    """
    if not functions:
        return ""
    begins = f"Verified{but_for(functions)}" if proved else f"Not tried: {', '.join(functions)}"
    return f"{begins}.  Nothing has shown that a function does what the plan's `op` says of it."


def tried_words(functions: Sequence[str]) -> str:
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
    """The ops of which the proof takes for granted that the calls that they make are what they
    mean.
    """
    kinds = sorted(
        {op.kind for op in program.ops if op.kind in OPS and OPS[op.kind].plan_name != op.kind}
    )
    return {
        kind: f"shown equal to {OPS[kind].plan_name}, hop by hop on 1 to 5 ranks, by scalec's tests"
        for kind in kinds
    }


def certificate(
    proof: Proof | None,
    matched: int,
    program: Program,
    torch_alone: bool = False,
    tried: Sequence[Tried] = (),
    hashes: Mapping[str, str] | None = None,
) -> dict[str, object]:
    """The certificate of `plan.json`; `matched` ops were matched by the read-back.

    `tried` are the functions that were tried, `hashes` those of their modules' files, by name.
    """
    functions, made_of_calls = untried(program, tried), composite(program)
    trials = [_trial(each, hashes or {}) for each in tried]
    return {
        "placements": "every op type-checked after every pass",
        "values": _values(proof) if proof else NOT_EVALUATED,
        "emission": f"train.py read back, {matched} ops matched to the IR",
        "run_time": RUN_TIME_OF_TORCH if torch_alone else RUN_TIME,
        **({"composite_ops": made_of_calls} if made_of_calls else {}),
        **({"tried": trials} if trials else {}),
        **({"verified": f"verified{but_for(functions)}"} if functions and proof else {}),
        **({"taken_at_their_word": list(functions)} if functions else {}),
    }


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
    return {
        "claim": f"the IR's step evaluated equal to the single-device step of {proof.against},"
        " without tolerance",
        **({"stages": f"{proof.rows()}; {FULL_ROWS}"} if proof.stages else {}),
        "results": proof.results(),
        "meshes": list(proof.meshes),
        **({"each_of": proof.elastic} if proof.elastic else {}),
        "prime": proof.prime,
        "trials": proof.trials,
        "error": f"below 2^{proof.bound}",
        "causality": proof.causality,
        "ops": proof.ops,
        "kinds_of_ops": proof.kinds,
        "not_covered": "rounding, kernels, the network, sizes other than those of the meshes",
        **({"evaluated": KEPT} if proof.kept else {}),
    }


def header(proof: Proof | None) -> str:
    """The lines of `train.py`'s docstring."""
    if not proof:
        return (
            "Shown: this file matches the IR, op for op.\n"
            "Not shown: that the step's values are those of a single device, for it was"
            " compiled with --no-verify."
        )
    return (
        f"Shown: the IR's step evaluated equal to the single-device step of {proof.against},\n"
        "and this file matches the IR, op for op;\n"
        f"{proof.causality}.\n"
        "Not shown: rounding, kernels, the network.  The certificate is in plan.json;"
        " SCALEC_SANITIZE=1 checks a run."
    )
