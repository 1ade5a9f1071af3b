"""Sections of settings: every mistake is reported where it stands, and what is shown reads back."""

from inspect import cleandoc
from typing import TypeVar

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scalec.compiler.config import schema
from scalec.compiler.config.fields import Settings
from scalec.compiler.config.settings import (
    AUTO,
    FILE,
    STDLIB,
    Cluster,
    Data,
    DataSet,
    Flow,
    Optimizer,
    Order,
    ParamGroup,
    Pipelining,
    Schedule,
    Train,
    Watch,
)
from scalec.compiler.config.values import Skip
from scalec.compiler.frontend.load_plan import merge
from scalec.compiler.schedules.registry import SCHEDULES
from scalec.compiler.syntax.diagnostics import Diagnostics, PlanError
from scalec.compiler.syntax.parser import parse_plan
from scalec.compiler.syntax.source import Source
from scalec.compiler.syntax.tree import Section

S = TypeVar("S", bound=Settings)

OPTIMIZER = "optimizer sgd { lr = 0.1 }"
GROUP = 'group norms { params = ["norm*"] }'
DATA = "data text { files = [python_stdlib] }"
SIZES = "seq = 8  global_batch = 4  microbatch = 2  steps = 3"


def section_of(text: str) -> Section:
    return next(parse_plan(Source("p.scale", text)).sections())


def read(cls: type[S], text: str) -> S:
    found = Diagnostics()
    instance = schema.parse_section(cls, section_of(text), found)
    found.check()
    assert instance
    return instance


def get_message(cls: type[Settings], text: str) -> str:
    with pytest.raises(PlanError) as error:
        read(cls, text)
    return str(error.value)


# ---- reading


def test_values_and_defaults() -> None:
    train = read(Train, f"train {{ {SIZES}  {OPTIMIZER}  {DATA} }}")
    assert (train.seq, train.global_batch, train.microbatch, train.steps) == (8, 4, 2, 3)
    assert (train.seed, train.precision, train.gathered) == (0, "fp32", "save")
    assert str(train.recompute) == "none"
    assert train.optimizer == Optimizer("sgd", 0.1)
    assert train.data == Data("text", (STDLIB,))
    assert train.optimizer.schedule == Schedule("constant", 0, 0.0)


@pytest.mark.parametrize(
    "said", ["none", "full", "selective(silu, dispatch)", "every(2, layers)", "every(3, a, b)"]
)
def test_what_is_recomputed_reads_back(said: str) -> None:
    """The dim of a repeat with branches is several after `resolve`."""
    assert (
        str(read(Train, f"train {{ {SIZES}  {OPTIMIZER}  {DATA}  recompute = {said} }}").recompute)
        == said
    )


def test_percent_is_a_share() -> None:
    assert read(Data, 'data tokens { files = ["a.bin"]  holdout = 5% }').holdout == 0.05


def test_a_token_is_its_id_or_a_byte() -> None:
    given = read(Data, f'{DATA[:-1]} separator = "\\n"  mask_token = 103 }}')
    assert (given.separator, given.separator_id, given.mask_token, given.mask_id) == (
        "\n",
        10,
        103,
        103,
    )
    assert read(Data, DATA).separator_id is None


def test_spans_lead_to_the_setting_or_else_to_the_section() -> None:
    cluster = read(Cluster, "cluster {\n  nodes = 2\n}")
    assert str(cluster.spans["nodes"]) == "p.scale:2"
    assert str(cluster.spans["gpu"]) == "p.scale:1"


def test_spans_do_not_count_in_comparisons() -> None:
    assert read(Cluster, "cluster { nodes = 2 }") == Cluster(nodes=2)


# ---- mistakes


def test_all_mistakes_of_a_section_at_once() -> None:
    text = """
    train {
      sed = 1
      seq = 0
      steps = many
      seq = 8
      precision = fp8
      optimizer adam { lr = 0.1 }
      data text { files = [] }
    }
    """
    with pytest.raises(PlanError) as error:
        read(Train, text)
    assert [(d.code, d.message, d.help) for d in error.value.diagnostics] == [
        ("E0402", "`train` needs `global_batch`", "it is: sequences in a step, over all ranks"),
        (
            "E0402",
            "`train` needs `microbatch`",
            "it is: sequences in a microbatch, on one data-parallel rank",
        ),
        ("E0401", "`train` has no setting `sed`", "did you mean `seed`?"),
        ("E0405", "`seq` must be at least 1", ""),
        ("E0404", "`steps` takes an integer, not a name", ""),
        ("E0403", "`seq` is given twice", ""),
        ("E0404", "`precision` cannot be `fp8`", "it is one of `fp32`, `bf16`, `fp16`, `fp64`"),
        ("E0404", "there is no optimizer `adam`", "did you mean `adamw`?"),
        ("E0405", "`files` is empty", ""),
    ]


def test_what_a_call_takes_first_needs_no_name() -> None:
    """By its name it is the same; twice, or a second without a name, it is a mistake."""
    plain = read(Pipelining, 'pipeline { schedule = file("a.csv") }')
    assert plain == read(Pipelining, 'pipeline { schedule = file(path="a.csv") }')
    assert plain.schedule == Order(FILE, "a.csv")
    assert schema.print_section(plain) == 'pipeline {\n  schedule = file("a.csv")\n}'
    assert "E0403" in get_message(Pipelining, 'pipeline { schedule = file("a.csv", path="b.csv") }')
    assert "E0404" in get_message(Pipelining, 'pipeline { schedule = file("a.csv", "b.csv") }')
    assert "E0405" in get_message(Pipelining, 'pipeline { schedule = file("") }')


def test_a_setting_given_twice_shows_both_places() -> None:
    assert get_message(
        Cluster, "cluster {\n  nodes = 2\n  gpu = h100_sxm\n  nodes = 3\n}"
    ) == cleandoc(
        """
        error[E0403]: `nodes` is given twice
         --> p.scale:4:3
          |
        2 |   nodes = 2
          |   --------- first here
        ...
        4 |   nodes = 3
          |   ^^^^^^^^^
        """
    )


@pytest.mark.parametrize(
    ("cls", "text", "message", "help"),
    [
        (Optimizer, "optimizer { lr = 1 }", "`optimizer` needs a name", "write `optimizer adamw { … }`"),
        (Optimizer, "optimizer sgd { lr = 1 betas = [0, 0] }", "`betas` is a setting of `optimizer adamw`", ""),
        (Optimizer, "optimizer sgd { lr = 1% }", "`lr` takes a number, not `1%`", ""),
        (Optimizer, "optimizer sgd { lr = -1 }", "`lr` must be above 0", ""),
        (Optimizer, "optimizer adamw { lr = 1 betas = [0.9] }", "`betas` takes two numbers", ""),
        (Optimizer, "optimizer sgd { lr = 1 schedule = cosine(20) }", "arguments are given by name", "write `key="),
        (Optimizer, "optimizer sgd { lr = 1 schedule = linear() }", "there is no schedule `linear`", "it is one of"),
        (Optimizer, "optimizer sgd { lr = 1 schedule = 3 }", "`schedule` takes a name or a call, not `3`", ""),
        (Optimizer, "optimizer sgd { lr { } }", "`lr` is a setting", "write `lr = …`"),
        (Optimizer, f"optimizer sgd {{ lr = 1 {GROUP} {GROUP} }}", "`group norms` is given twice", ""),
        (Cluster, "cluster { nodes = 9223372036854775808 }", "`nodes` must be below 2^63", ""),
        (Train, f"train {{ {SIZES} optimizer = adamw {DATA} }}", "`optimizer` is a section", "write `optimizer a"),
        (Train, f"train {{ {SIZES} {DATA} }}", "`train` needs `optimizer`", "write `optimizer adamw { … }`"),
        (Train, f"train run {{ {SIZES} {OPTIMIZER} {DATA} }}", "`train` takes no name", ""),
        (Cluster, "cluster { batch over dp }", "`cluster` has settings, not rules", "a setting is `key = value`"),
        (Data, 'data text { files = "x" }', "`files` takes a list", ""),
        (Data, 'data text { files = ["python_stdlib"] }', "write `python_stdlib` without quotes", "write `py"),
        (Data, f'{DATA[:-1]} separator = "é" }}', "`separator` is one byte, not 2", ""),
        (Data, f"{DATA[:-1]} separator = newline }}", "`separator` takes a token", ""),
        (Data, f"{DATA[:-1]} separator = 1.5 }}", "`separator` must be an id from 0", ""),
        (Data, f"{DATA[:-1]} mask_token = 4294967296 }}", "`mask_token` must be an id from 0", ""),
        (Data, f"{DATA[:-1]} masked = 0% }}", "`masked` must be above 0 and below 1", ""),
        (Watch, "watch { skips every 2 }", "`skips` is not done every few steps", "write `skips = …`"),
        (Watch, "watch { copies every 0 }", "`copies` must be at least 1", ""),
        (Watch, "watch { spikes = tell(3) }", "`spikes` takes a number or a rule, as in `skip(10)`, not a call", ""),
        (Watch, "watch { spikes = skip(0) }", "`spikes` must be above 0", ""),
        (Watch, "watch { copies every 9 copies = 9 }", "`copies` is given twice", ""),
        (Data, "data text { files = [stdlib] }", "`files` takes strings or `python_stdlib`, not a name", ""),
    ],
)  # fmt: skip
def test_mistakes(cls: type[Settings], text: str, message: str, help: str) -> None:
    text = get_message(cls, text)
    assert f": {message}" in text.splitlines()[0]
    assert f"= help: {help}" in text or not help


# ---- overrides


def test_merge_replaces_by_key_and_adds() -> None:
    base = section_of("dims { a = 1  b = 2 }")
    assert merge(base, section_of("dims { c = 4  a = 3 }")) == section_of(
        "dims { a = 3  b = 2  c = 4 }"
    )


def test_merge_goes_into_sections() -> None:
    base = section_of("train { seq = 1  optimizer adamw { lr = 1  clip = 2 } }")
    over = section_of("train { optimizer { lr = 3 } }")
    assert merge(base, over) == section_of(
        "train { seq = 1  optimizer adamw { lr = 3  clip = 2 } }"
    )


def test_merge_keeps_a_key_given_twice_visible() -> None:
    merged = merge(section_of("dims { a = 1 }"), section_of("dims { a = 2  a = 3 }"))
    assert merged == section_of("dims { a = 2  a = 3 }")


def test_merge_replaces_rules_as_a_whole() -> None:
    merged = merge(section_of("shard { a over x  b over y }"), section_of("shard { c over x }"))
    assert merged == section_of("shard { c over x }")


# ---- what is shown reads back


def numbers(low: float, high: float, open: bool = False) -> st.SearchStrategy[float]:
    return st.floats(low, high, exclude_min=open, exclude_max=high == 1, allow_subnormal=False)


counts = st.integers(1, 2**63 - 1)
words = st.from_regex(r"[A-Za-z_][A-Za-z0-9_]{0,9}", fullmatch=True)
strings = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=12)
paths = strings.filter(lambda text: text != STDLIB)
schedules = st.builds(Schedule, st.just("constant"), counts) | st.builds(
    Schedule, st.just("cosine"), counts, numbers(0, 1e9)
)
groups = st.builds(
    ParamGroup,
    words,
    st.lists(strings, min_size=1, max_size=3).map(tuple),
    numbers(0, 1),
    numbers(0, 10),
)
common = {
    "lr": numbers(0, 1e9, open=True),
    "weight_decay": numbers(0, 10),
    "clip": numbers(0, 1e30),
    "schedule": schedules,
    "groups": st.lists(groups, max_size=3, unique_by=lambda group: group.name).map(tuple),
}
betas = st.tuples(numbers(0, 1), numbers(0, 1))
optimizers = st.builds(
    Optimizer, kind=st.just("adamw"), betas=betas, eps=numbers(0, 1, open=True), **common
) | st.builds(Optimizer, kind=st.just("sgd"), momentum=numbers(0, 1), **common)
files = st.lists(st.just(STDLIB) | paths, min_size=1, max_size=3).map(tuple)
tokens = (
    st.none()
    | st.integers(0, 2**32 - 1)
    | st.characters(max_codepoint=127, exclude_characters="\0")
)
of_data = {
    "holdout": numbers(0, 1),
    "separator": tokens,
    "masked": st.none() | numbers(0, 1, open=True),
    "mask_token": tokens,
}
sets = st.lists(
    st.builds(DataSet, words, files, numbers(0, 1e9, open=True), st.none() | numbers(0, 1)),
    max_size=3,
    unique_by=lambda each: each.name,
).map(tuple)
data = st.builds(Data, st.just("text"), st.none() | files, sets=sets, **of_data) | st.builds(
    Data, st.just("tokens"), files, dtype=st.sampled_from(["uint16", "uint32"]), **of_data
)
trains = st.builds(
    Train,
    counts,
    counts,
    counts,
    counts,
    optimizers,
    data,
    st.integers(0, 2**63 - 1),
    st.sampled_from(["fp32", "bf16", "fp16", "fp64"]),
    st.sampled_from([None, "fp32", "bf16"]),
    st.sampled_from([None, "fp32", "bf16", "fp16"]),
    st.sampled_from(["auto", "torch", "triton"]),
    st.sampled_from(["auto", "save", "chunk"]),
    st.sampled_from(["off", "on"]),
    st.sampled_from(["save", "regather"]),
)
clusters = st.builds(Cluster, strings, counts, counts)
chunks = st.none() | st.integers(1, 2**63 - 1)
orders = (
    st.builds(Order, st.sampled_from([*SCHEDULES]), chunks=chunks)
    | st.builds(Order, st.just(AUTO), chunks=chunks, memory=chunks)
    | st.builds(Order, st.just(FILE), paths.filter(bool))
)
layers = st.none() | st.lists(st.integers(0, 2**63 - 1), min_size=1, max_size=4).map(tuple)
pipelines = st.builds(Pipelining, orders, layers)


flows = st.builds(Flow, st.none() | st.just(AUTO) | counts, st.integers(0, 2**63 - 1))
watches = st.builds(
    Watch,
    counts,
    st.integers(0, 9),
    st.sampled_from(["off", "on"]),
    st.none() | counts,
    st.none() | counts,
    st.none() | st.floats(1e-9, 1e9) | st.builds(Skip, st.floats(1e-9, 1e9)),
)


@given(trains | clusters | pipelines | flows | watches)
def test_shown_settings_read_back(instance: Settings) -> None:
    assert read(type(instance), schema.print_section(instance)) == instance


def test_show() -> None:
    train = Train(
        8,
        4,
        2,
        3,
        Optimizer("sgd", 0.1, groups=(ParamGroup("norms", ("norm*",)),)),
        Data("text", (STDLIB,)),
    )
    assert schema.print_section(train) == cleandoc(
        """
        train {
          seq = 8
          global_batch = 4
          microbatch = 2
          steps = 3
          optimizer sgd {
            lr = 0.1
            momentum = 0.0
            weight_decay = 0.0
            clip = 0.0
            schedule = constant(warmup=0)
            group norms {
              params = ["norm*"]
              lr_scale = 1.0
            }
          }
          data text {
            files = [python_stdlib]
            tokenizer = bytes
            holdout = 0.0
          }
          seed = 0
          precision = fp32
          kernels = auto
          logits = auto
          compile = off
          gathered = save
          recompute = none
          experts = dropless
        }
        """
    )


def test_sets_of_data_replace_its_files_and_files_its_sets() -> None:
    files, sets = 'files = ["a"]', 'set wiki { files = ["w"] }'
    for base, over in ((files, sets), (sets, files)):
        merged = merge(
            section_of(f"data text {{ {base}  holdout = 5% }}"),
            section_of(f"data text {{ {over} }}"),
        )
        assert merged == section_of(f"data text {{ holdout = 5%  {over} }}")
    merged = merge(
        section_of(f"data text {{ {sets} }}"), section_of("data text { set wiki { weight = 2 } }")
    )
    assert merged == section_of('data text { set wiki { files = ["w"]  weight = 2 } }')


def test_merge_keeps_the_order_of_axes() -> None:
    """Or takes that of an override with all of them."""
    base = section_of("mesh { dp = 2  cp = 1  tp = 4 }")
    assert merge(base, section_of("mesh { dp = 8  tp = 1 }")) == section_of(
        "mesh { dp = 8  cp = 1  tp = 1 }"
    )
    for text in ("mesh { tp = 4  dp = 2  cp = 1 }", "mesh { pp = 2  dp = 2  cp = 1  tp = 4 }"):
        assert merge(base, section_of(text)) == section_of(text)
    assert merge(section_of("mesh { }"), base) == base


@pytest.mark.parametrize(
    ("text", "message", "help"),
    [
        (
            "mesh { pp = 2 }",
            "the mesh does not say where `pp` goes",
            "name `dp`, `cp`, `tp` here too",
        ),
        (
            "mesh { pp = 2  ep = 2  dp = 2 }",
            "the mesh does not say where `pp` or `ep` goes",
            "name `cp`, `tp` here too",
        ),
        ("mesh { tp = 2  dp = 2 }", "the axes go in two orders", "name `cp` here too"),
    ],
)
def test_an_override_that_leaves_the_order_of_axes_open(text: str, message: str, help: str) -> None:
    base = section_of("mesh { dp = 2  cp = 1  tp = 4 }")
    with pytest.raises(PlanError) as caught:
        merge(base, section_of(text))
    (found,) = caught.value.diagnostics
    assert (found.code, found.message) == ("E0519", message)
    assert help in found.help
    assert [note.span for note in found.notes] == [base.head]


def test_a_group_has_the_optimizers_weight_decay_unless_it_gives_one() -> None:
    groups = (
        ParamGroup("slow", ("wte",), lr_scale=0.5),
        ParamGroup("plain", ("norm*",), weight_decay=0.0),
    )
    optimizer = Optimizer("sgd", 0.1, weight_decay=0.3, groups=groups)
    found = {name: optimizer.group_of(name) for name in ("wte", "norm1", "head")}
    assert {name: (it.weight_decay, it.lr_scale) for name, it in found.items()} == {
        "wte": (0.3, 0.5),
        "norm1": (0.0, 1.0),
        "head": (0.3, 1.0),
    }


def test_sections_of_several_differ_by_their_own_settings() -> None:
    """A mixture's weights, not its sets' names alone."""
    sets = (
        'set code { files = ["a"]  weight = 3 }',
        'set code { files = ["a"] }',
        'set wiki { files = ["b"] }',
    )
    first, second = (
        read(Data, f"data text {{ {' '.join(each)} }}") for each in (sets[::2], sets[1:2])
    )
    assert [*schema.find_differences(first, second)] == [
        ("set code weight", "3.0", "1.0"),
        ("set wiki", "set", "unset"),
    ]
