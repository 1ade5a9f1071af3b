"""A variant is lowered when somebody asks, and once; so is the variant that a decision takes."""

from attrs import evolve

from scalec.compiler.frontend import resolve
from scalec.compiler.ir import Program
from scalec.compiler.syntax.source import Source
from scalec.compiler.tuning.lowering import PASS_NAMES, lower, make_variant
from scalec.compiler.tuning.variant import Decision, Variant

TEXT = """model mlp(tokens[batch, seq], labels[batch, seq]) {
  dims { vocab = 64  hidden = 16 }
  init ~ normal(0.02)
  x = embedding(tokens, wte[vocab, hidden])
  loss = cross_entropy(x @ head[hidden -> vocab], labels)
}
mesh  { dp = 2 }
shard { batch over dp }
train { seq = 8  global_batch = 4  microbatch = 1  steps = 1  optimizer sgd { lr = 1 }
        data text { files = [python_stdlib] } }
"""


def _model() -> Program:
    return resolve(Source("plan.scale", TEXT))


class _Pass:
    """A pass that changes nothing and counts its calls."""

    def __init__(self, name: str) -> None:
        self.__name__ = name
        self.calls = 0

    def __call__(self, program: Program) -> Program:
        self.calls += 1
        return program


def test_a_variant_is_lowered_when_somebody_asks_and_once() -> None:
    first, second = _Pass("first"), _Pass("second")
    variant = Variant(_model(), (first, second))
    assert first.calls == 0
    assert variant.get_program_after("first").after == "first"
    assert (first.calls, second.calls) == (1, 0)
    assert variant.last.after == "second"
    assert variant.last is variant.next.next.program
    assert (first.calls, second.calls) == (1, 1)


def test_the_variant_that_a_decision_takes_is_not_lowered_once_more() -> None:
    later = _Pass("later")

    def choose(undecided: Variant) -> Variant:
        cheap = undecided.with_program(evolve(undecided.program, name="cheap"))
        dear = undecided.with_program(evolve(undecided.program, name="dear"))
        assert cheap.last.name == "cheap"
        assert dear.last.name == "dear"
        return cheap

    variant = Variant(_model(), (Decision("decided", choose), later))
    assert variant.get_program_after("decided").name == "cheap"
    assert variant.last.name == "cheap"
    assert later.calls == 2, "one call for each variant"


def test_a_decision_that_takes_what_there_is_changes_nothing() -> None:
    variant = Variant(_model(), (Decision("decided", lambda undecided: undecided),))
    assert variant.last == evolve(_model(), after="decided")


def test_a_variant_goes_on_where_its_program_stopped() -> None:
    model = _model()
    for name in PASS_NAMES:
        assert make_variant(lower(model, name)).last == lower(model)


def test_a_variant_with_another_program_is_lowered_anew() -> None:
    variant = make_variant(_model())
    assert variant.is_plan
    renamed = variant.with_program(evolve(variant.program, name="other"))
    assert renamed.last.name == "other"
