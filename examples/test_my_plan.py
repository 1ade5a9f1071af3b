""".venv/bin/pytest examples/test_my_plan.py

How to hold a plan of your own to the single-device step: copy this file beside it and run `pytest`.

Each check compiles a plan and proves its step, forward, backward and update, equal to that of one
device: exactly, on small sizes, in about a second and without a GPU.  Needs `pip install
"scalec[testing]"`.
"""

from pathlib import Path

import pytest
from hypothesis import given, settings

from scalec.testing import assert_equal_step, plans

PLAN = Path(__file__).parents[1] / "plans" / "tiny_llama.scale"


def test_my_plan() -> None:
    assert_equal_step(PLAN)


MESHES = {
    "data parallel": ("dp = 4", "batch over dp"),
    "tensor parallel": ("tp = 4", "vocab, heads, kv_heads, ffn over tp"),
    "with sequence parallelism": (
        "dp = 2  tp = 2",
        "batch over dp  vocab, heads, kv_heads, ffn over tp  seq over tp",
    ),
    "replicas": (
        "replica = 2  dp = 2  tp = 2",
        "batch over replica, dp  vocab, heads, kv_heads, ffn over tp",
    ),
}


@pytest.mark.parametrize("kv_heads", [1, 8])
@pytest.mark.parametrize("mesh", MESHES)
def test_my_model_on_other_meshes(
    mesh: str, kv_heads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The model of a file, its dims overridden behind `use`, whose path begins at the working
    directory.
    """
    monkeypatch.chdir(PLAN.parent)
    axes, rules = MESHES[mesh]
    assert_equal_step(f"""
        use "models/llama.scale" {{
          dims {{ hidden = 64  heads = 8  kv_heads = {kv_heads}  ffn = 192  layers = 2 }}
        }}
        mesh {{ {axes} }}
        shard {{ {rules} }}
        train {{
          seq = 128  global_batch = 32  microbatch = 4  steps = 100  precision = bf16
          optimizer adamw {{ lr = 3e-4  clip = 1.0 }}
          data text {{ files = [python_stdlib] }}
        }}
    """)


@settings(max_examples=5, deadline=None)
@given(plans())
def test_random_plans(plan: str) -> None:
    """Whatever the compiler takes; a counterexample would print as a plan, as small as can be."""
    assert_equal_step(plan)
