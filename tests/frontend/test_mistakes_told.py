"""Mistakes of settings and of sharding as they are told, whole: behind a `use`, and in the plan
itself.
"""

from collections.abc import Callable
from pathlib import Path

import pytest

from frontend.test_mistakes import PLAN
from helpers.programs import get_refusal
from scalec.compiler.reports.lints import advice
from scalec.compiler.syntax.diagnostics import PlanError
from scalec.compiler.syntax.source import Source
from scalec.compiler.tuning.lowering import compile_plan

PLANS = Path(__file__).parents[2] / "plans"

Golden = Callable[[str, str], None]

OVERRIDES = (
    # the order of axes
    "mesh { pp = 2 }",
    "mesh { pp = 2  tp = 2 }",
    # an axis over machines
    "cluster { gpus_per_node = 1  nodes = 4 }",
    "cluster { gpus_per_node = 2  nodes = 2 }  mesh { tp = 2  dp = 2 }  shard { batch over dp "
    " ffn over tp }",
    "cluster { nodes = 4 }  mesh { dp = 2  ep = 2  tp = 4 }  shard { batch over dp  vocab over"
    " ep  ffn over tp }",
    # GPUs
    "cluster { gpu = H100 }",
    "cluster { gpu = rtx4090 }",
    "cluster { gpu = mi300x }",
    "cluster { memory = 64GiB }",
    # settings that contradict
    "train { optimizer adamw { schedule = cosine(floor=3e-3) } }",
    "watch { spikes = skip(10) }",
    "watch { finite every 10  skips = 2 }",
    # settings by other names
    "train { learning_rate = 1e-3 }",
    "train { batch_size = 8  dtype = bf16  gradient_accumulation_steps = 4 }",
    "train { seq_length = 8  micro_batch = 2  max_grad_norm = 1  zero = 3 "
    " tensor_parallel_size = 8 }",
    "train { optimizer adamw { learning_rate = 1  min_lr = 0.1  warmup_ratio = 3% } }",
    "train { precision = bfloat16  compile = true }",
    "train { recompute_granularity = full  data text { eos_token = 3 } }",
    "cluster { nnodes = 2  nproc_per_node = 8 }",
    # whole numbers that are not in digits
    "train { steps = 1e3  seq = 4K  seed = 1.5M }",
    "mesh { dp = 1e1 }",
    "dims { hidden = 4K }",
    # rules that are written as settings
    "shard { batch = dp  ffn = [dp, tp] }",
    "state { zero = 3 }",
    "state { optimizer = dp }",
    # schedules by other names
    "pipeline { schedule = 1F1B }",
    "pipeline { schedule = Interleaved1F1B(chunks=2) }",
    # one dim over too much is one mistake
    "shard { batch over dp  vocab, heads, kv_heads, ffn over tp  hidden over tp }",
    "shard { batch over dp  hidden over tp  vocab, heads, kv_heads, ffn over tp }",
    "shard { batch over dp  vocab, hidden over tp }",
    # mistakes of settings and of sharding, all at once
    "train { steps = none }  mesh { dp = 2  tp = 3 }  state { zero 1 over tp  prefetch = no }",
    "train { steps = none  separator = 1 }  shard { bacth over dp  ffn over pt }",
    "mesh { dp = 1e1 }  shard { batch = dp  fnf over tp }  train { microbatch = none }",
    "train { global_batch = 6  data text { separator = 10 } }  mesh { dp = 2  tp = 3 }",
    "train { data tokens { dtype = uint32 } }",
    'train { data tokens { files = ["a"]  set b { files = ["b"]  weight = 1 } } }',
    'train { data text { set a { files = ["a"]  weight = 1 } set b { files = ["b"]  weight ='
' 10_000 } } }',
    'train { optimizer adamw { group a { params = ["nrm"] } } }  cluster { nodes = 3 }  shard'
' { layers over tp }',
)  # fmt: skip
"""What stands in the braces behind `use`."""

EDITS = (
    (
        "x = x + silu(x @ w_in[hidden -> ffn]) @ w_out[ffn -> hidden]",
        "x = x + silu(x @ w_in[hidden -> ffn])",
    ),
    ("rmsnorm(x, norm[hidden], 1e-5)", "layernorm(x, norm[hidden], b[ffn], 1e-5)"),
    ("mask=causal", "mask=causal, window=-1"),
    ("norm1[hidden], 1e-5", "norm1[hidden], -1e-5"),
    (
        "wq[hidden -> heads, head_dim], theta",
        "wq[hidden -> heads, head_dim], theta, 0, llama3, 8, 4, 1",
    ),
    ("silu(x @ w_in[hidden -> ffn])", "softcap(x @ w_in[hidden -> ffn], 0)"),
)

WARNINGS = (
    "train { optimizer adamw { schedule = cosine(warmup=3) } }",
    "train { optimizer adamw { schedule = constant(warmup=4) } }",
    "state { prefetch = 2  zero 1 over dp }",
)


def get_message(text: str) -> str:
    return str(get_refusal(text, "plan.scale"))


@pytest.fixture
def used(working_folder: Path) -> None:
    """The plan of `test_mistakes` as `base.scale`."""
    Path("base.scale").write_text(PLAN)


def _over(settings: str) -> str:
    return f'use "base.scale" {{ {settings} }}'


@pytest.mark.usefixtures("used")
def test_of_settings_and_sharding(golden: Golden) -> None:
    golden(
        "mistakes_of_settings.txt",
        "".join(f"{get_message(_over(settings))}\n\n\n" for settings in OVERRIDES),
    )


@pytest.mark.parametrize("plan", sorted(PLANS.glob("*.scale")), ids=lambda plan: plan.stem)
def test_settings_that_cannot_be_read_bring_no_other_mistakes(plan: Path) -> None:
    text = f'use "{plan.name}" {{ train {{ seq = none  global_batch = none }} }}'
    with pytest.raises(PlanError) as caught:
        compile_plan(Source(str(plan.with_name("other.scale")), text))
    assert [found.code for found in caught.value.diagnostics] == ["E0404"] * 2


def test_in_the_plan_itself(golden: Golden) -> None:
    for before, _ in EDITS:
        assert before in PLAN
    golden(
        "mistakes_of_dims.txt",
        "".join(f"{get_message(PLAN.replace(*edit, 1))}\n\n\n" for edit in EDITS),
    )


@pytest.mark.usefixtures("used")
def test_warnings(golden: Golden) -> None:
    ids = PLAN.replace("vocab = 64", "vocab = 70000").replace(
        "text { files = [python_stdlib]", 'tokens { files = ["a"]'
    )
    programs = (compile_plan(Source("plan.scale", text)) for text in (*map(_over, WARNINGS), ids))
    golden(
        "warnings_of_settings.txt",
        "".join(f"{found}\n\n" for program in programs for found in advice(program)),
    )


def test_a_name_that_is_not_known_is_told_once_with_its_places() -> None:
    with pytest.raises(PlanError) as caught:
        compile_plan(Source("plan.scale", PLAN.replace(" heads = 4", " hedas = 4")))
    (told,) = caught.value.diagnostics
    assert (told.code, told.span.line, told.help) == ("E0201", 2, "did you mean `hedas`?")
    assert [(note.text, note.span and note.span.line) for note in told.notes] == [
        ("and here", 8),
        ("and here", 10),
        ("and here", 17),
    ]
