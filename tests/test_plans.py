"""The plans that scalec ships: they compile, and have the published numbers of parameters."""

import re
from collections import Counter
from math import prod
from pathlib import Path

import pytest

from helpers.plan_schema import mistakes
from scalec.compiler.analysis.communication import active_count, collectives, parameter_count
from scalec.compiler.analysis.kernel_tiles import tiles_file
from scalec.compiler.emit import emit
from scalec.compiler.ir import Program
from scalec.compiler.syntax.limits import load
from scalec.compiler.syntax.source import Source
from scalec.compiler.tuning.lowering import compile_plan

PLANS = Path(__file__).parents[1] / "plans"

# GPT-J's card counts what each of the 8 cores of a replica stored (mesh_transformer/layers.py of
# mesh-transformer-jax): 7 more copies of 3 vectors a layer and of the last norm's 2, and 8 of a
# bias that the release has added to its table.
GPTJ_COPIES = (7 * (28 * 3 + 2) + 8) * 4096
# parameters (Llama Team 2024, table 3, from the models' configurations), ranks of the plan
PUBLISHED = {
    "llama3_8b": (8_030_261_248, 128),
    "llama3_70b": (70_553_706_496, 512),
    "llama3_405b": (405_853_388_800, 16_384),
    "llama3_1_8b": (8_030_261_248, 128),  # the same table
    "llama3_2_1b": (1_235_814_400, 16),  # Meta 2024: 1.23B; from the configuration of the release
    # Yang et al. 2024 (Qwen2.5): 7.6B; safetensors metadata of the release
    "qwen2_5_7b": (7_615_616_512, 64),
    "qwen3_8b": (8_190_735_360, 128),  # Qwen Team 2025: 8.2B; safetensors metadata of the release
    # Gemma Team 2024, table 2: 8,324,201,984 and the embedding, of 256,000 rows
    "gemma2_9b": (9_241_705_984, 128),
    "gemma3_1b": (999_885_952, 16),  # Gemma Team 2025, table 1: 698M and an embedding of 302M
    "gptj_6b": (6_053_381_344 - GPTJ_COPIES, 64),  # the model card of the release
    # Sanh et al. 2019: 66M, and the head: transformers' DistilBertForMaskedLM
    "distilbert_base": (66_985_530, 8),
    "gpt2_124m": (124_439_808, 8),  # Radford et al. 2019; safetensors metadata of the release
    "olmo2_7b": (7_298_617_344, 128),  # OLMo Team 2024: 7B; from the configuration of the release
    # Jiang et al. 2024: 47B; safetensors metadata of the release
    "mixtral_8x7b": (46_702_792_704, 64),
    # DeepSeek-AI 2024: 671B; without the module of the second token
    "deepseek_v3": (671_026_404_352, 2_048),
    # Qwen Team 2025: 30.5B; safetensors metadata of the release
    "qwen3_30b_a3b": (30_532_122_624, 32),
}
ACTIVE = {  # parameters that compute for a token, and all of them
    "deepseek_v3": (37_552_282_624, 671_026_404_352),  # DeepSeek-AI 2024: 37B
    "mixtral": (12_879_925_248, 46_702_792_704),  # Jiang et al. 2024: 13B
    "qwen3_moe": (3_353_032_704, 30_532_122_624),  # Qwen Team 2025: 3.3B
    "olmoe": (1_282_017_280, 6_919_161_856),  # Muennighoff et al. 2024: 1.3B of 6.9B
}


def program(name: str) -> Program:
    """The compiled plan."""
    return compile_plan(load(PLANS / f"{name}.scale"))


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameter_counts_are_the_published_ones(name: str) -> None:
    compiled = program(name)
    assert (parameter_count(compiled), compiled.ranks) == PUBLISHED[name]


@pytest.mark.parametrize("name", ACTIVE)
def test_a_token_uses_as_many_parameters_as_published(name: str) -> None:
    plan = f"""use "scalec:models/{name}.scale"
mesh {{ dp = 1 }}
shard {{ batch over dp }}
train {{
  seq = 4096  global_batch = 1  microbatch = 1  steps = 1
  optimizer sgd {{ lr = 1 }}
  data text {{ files = ["a"] }}
}}"""
    compiled = compile_plan(Source("plan.scale", plan), "resolve")
    assert (active_count(compiled), parameter_count(compiled)) == ACTIVE[name]


def test_each_expert_has_a_bias() -> None:
    """256 in each of the 58 layers with experts."""
    compiled = program("deepseek_v3")
    assert sum(prod(map(compiled.size, buffer.type.dims)) for buffer in compiled.buffers) == 14_848


@pytest.mark.parametrize("path", sorted(PLANS.glob("*.scale")), ids=lambda path: path.stem)
def test_every_plan_compiles(path: Path) -> None:
    source = load(path)
    program = compile_plan(source)
    beside = ({"schedule.csv", "message_groups.csv"} if program.pipeline else set[str]()) | (
        {"tiles.json"} & {*tiles_file(program)}
    )
    files = emit(program, source)
    assert set(files) == {"train.py", "plan.json", "hf_names.json", "predictions.json"} | beside
    assert not mistakes(files["plan.json"])


def test_the_size_of_the_ir_does_not_depend_on_the_number_of_layers_or_ranks() -> None:
    small = load(PLANS / "llama3_8b.scale")
    texts = [
        emit(compile_plan(small), small)["train.py"],
        emit(program("llama3_405b"), small)["train.py"],
    ]
    lines = [
        [line for line in text.splitlines() if not line.lstrip().startswith("#")] for text in texts
    ]
    assert len({*map(len, lines)}) == 1  # a comment too long for its line has one of its own


@pytest.mark.parametrize(
    ("name", "split", "times"),
    [("gptj_6b", "heads, ffn", 1), ("llama3_8b", "heads, kv_heads, ffn", 2)],
)
def test_attention_beside_the_mlp_halves_the_collectives_of_a_layer(
    name: str, split: str, times: int
) -> None:
    """On 8 ranks of tp, with `seq` over them after heads and MLP, and without."""
    shipped = load(PLANS / f"{name}.scale")
    nodes = re.sub(r"nodes = \d+", "nodes = 8", shipped.text)
    meshed = re.sub(r"mesh +{[^}]*}", "mesh { dp = 8  tp = 8 }", nodes)
    rules = f"shard {{\n  batch over dp\n  vocab, {split} over tp\n  seq over tp\n}}"
    plan = Source(shipped.path, re.sub(r"shard +{[^}]*}", rules, meshed))
    text = re.sub(r"\n  seq +over tp", "", plan.text)
    each = [("all_gather", "forward"), ("reduce_scatter", "forward"), ("all_gather", "backward")]
    assert _of_a_layer(plan) == dict.fromkeys([*each, ("reduce_scatter", "backward")], times)
    without = dict.fromkeys([("all_reduce", "forward"), ("all_reduce", "backward")], times)
    assert _of_a_layer(Source(plan.path, text)) == without


def _of_a_layer(plan: Source) -> dict[tuple[str, str], int]:
    """How often a layer communicates in each direction of a microbatch."""
    found = collectives(compile_plan(plan))
    inside = (
        c for c in found if c.use == "activations" and c.loops and c.loops[-1].startswith("layers")
    )
    return Counter((c.op, c.where) for c in inside)
