"""`scalec import`: published configurations become plans of the published size; what no plan
expresses is said.
"""

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest

from helpers.published_configs import (
    DEEPSEEK_V3,
    GEMMA_2_2B,
    GEMMA_3_1B,
    GPT2,
    LLAMA_31_8B,
    MIXTRAL_8X7B,
    OLMO_2_7B,
    OLMOE_1B_7B,
    PHI_3_MINI,
    PUBLISHED,
    QWEN_3_8B,
    QWEN_3_30B_A3B,
    QWEN_25_05B,
)
from scalec.compiler.cli import main
from scalec.compiler.syntax.diagnostics import PlanError
from scalec.compiler.syntax.source import Source
from scalec.tools.formatter import format_plan
from scalec.tools.importer import import_config


def imported(fields: dict[str, Any]) -> str:
    """The plan of a configuration."""
    return import_config(Source("config.json", json.dumps(fields, indent=2)))


@pytest.mark.parametrize(("fields", "parameters"), PUBLISHED)
def test_published_configurations_have_their_size(fields: dict[str, Any], parameters: int) -> None:
    text = imported(fields)
    assert text.startswith(f"# A {fields['model_type']} of {parameters:,} parameters")
    assert format_plan(Source("plan.scale", text)) == text


def test_the_fields_of_positions_come_over() -> None:
    assert (
        imported(LLAMA_31_8B).count("scaling=llama3, factor=8, low=1, high=4, original=8192") == 2
    )


def test_what_is_of_training_alone_is_named_in_the_plan() -> None:
    assert "# Left out, as a setting of training: resid_pdrop = 0.1.\n" in imported(GPT2)


def test_experts_come_over() -> None:
    text = imported(
        QWEN_3_30B_A3B | {"num_experts": 16, "num_experts_per_tok": 4, "router_aux_loss_coef": 1}
    )
    assert text.startswith(
        "# A qwen3_moe of 5,153,961,984 parameters, 2,436,052,992 of them active, from its"
    )
    assert "# Left out, as a setting of training: router_aux_loss_coef = 1.\n" in text
    assert "by top(m @ router[hidden -> experts], chosen, normalise=on) {" in text
    assert "chosen = 4 }" in text
    assert "expert_ffn = 768" in text
    assert re.search(r"experts +over dp, tp\n +batch +over dp\n", text)
    later = {
        name: value
        for name, value in QWEN_3_30B_A3B.items()
        if name not in ("num_experts", "head_dim")
    }
    text = imported(later | {"num_local_experts": 32, "norm_topk_prob": False})
    assert "head_dim   = 64\n" in text
    assert "experts    = 32\n" in text
    assert "chosen) {" in text
    assert "chosen, normalise=on) {" in imported(OLMOE_1B_7B | {"norm_topk_prob": True})
    assert "mask=causal, window=4096)" in imported(MIXTRAL_8X7B | {"sliding_window": 4096})


@pytest.mark.parametrize(
    "fields", [MIXTRAL_8X7B, OLMOE_1B_7B, QWEN_3_30B_A3B], ids=lambda it: it["model_type"]
)
@pytest.mark.parametrize("normalised", [False, True])
def test_the_loss_that_balances_experts_comes_over(
    fields: dict[str, Any], normalised: bool
) -> None:
    """If transformers adds it: where the configuration asks for the routers' logits."""
    asked = fields | {"output_router_logits": True, "router_aux_loss_coef": 0.02}
    asked |= {} if fields is MIXTRAL_8X7B else {"norm_topk_prob": normalised}
    text = imported(asked)
    assert len(re.findall(r"chosen,\s+aux_loss=0\.02,\s+aux_batch=1[,)]", text)) == 1
    assert "Left out" not in text
    assert ("normalise=on" in text) == (normalised or fields is MIXTRAL_8X7B)
    for silent in (
        {"output_router_logits": False},
        {"router_aux_loss_coef": 0.0},
        {"output_router_logits": None},
    ):
        assert "aux_loss=" not in imported(asked | silent)


def test_latent_attention_comes_over() -> None:
    text = imported(DEEPSEEK_V3)
    assert "# Left out, as a setting of training: num_nextn_predict_layers = 1.\n" in text
    assert "from=among, normalise=on, scale=factor\n" in text, "no loss that balances"
    assert re.search(
        r"experts +over dp, tp\n +batch +over dp\n +vocab, heads, ffn, shared_ffn over tp\n", text
    )
    text = imported(
        DEEPSEEK_V3 | {"q_lora_rank": None, "n_shared_experts": 2, "rms_norm_eps": 1e-5}
    )
    assert "q, qp = split(a @ wq[hidden -> heads, qk], [nope, pe])\n" in text
    assert not re.search("q_a|q_rank|wq_b", text)
    assert "rmsnorm(c, norm_kv[kv_rank], 1e-06)" in text
    assert "shared_ffn = 4096" in text
    released = YARN | {"beta_fast": 32, "beta_slow": 1, "mscale": 1.0, "mscale_all_dim": 1.0}
    text = imported(DEEPSEEK_V3 | {"rope_scaling": released})
    assert (
        text.count("rope(qp, theta, scaling=yarn, factor=40, low=1, high=32, original=4096)") == 1
    )
    assert text.count("attention(q, k, v, mask=causal, scale=0.1352337788608801)") == 1, (
        "192^-0.5 · (0.1 ln 40 + 1)^2"
    )
    assert "interleaved" not in imported(DEEPSEEK_V3 | {"rope_interleave": False})
    assert "normalise" not in imported(DEEPSEEK_V3 | {"norm_topk_prob": False})


def test_layers_that_are_left_behind_gemmas_blocks() -> None:
    text = imported(GEMMA_3_1B | {"num_hidden_layers": 14})
    assert "blocks   = 2\n" in text
    assert '"model.layers.{12+i}.mlp.up_proj.weight"' in text
    assert "repeat rest" not in imported(GEMMA_3_1B | {"num_hidden_layers": 12})


YARN = {"type": "yarn", "factor": 40, "original_max_position_embeddings": 4096}
SCALED = LLAMA_31_8B["rope_scaling"]
CHANGES = [  # the field at which it is said, the code, a part of what is said
    ({"hidden_act": "gelu"}, "hidden_act", "E0801", '`hidden_act` is `"gelu"`'),
    ({"hidden_act": None}, "hidden_act", "E0801", "`hidden_act` is `null`"),
    ({"attention_bias": True}, "attention_bias", "E0801", "`attention_bias` is `true`"),
    ({"attention_bias": 0}, "attention_bias", "E0801", "`attention_bias` is `0`"),
    (
        {"is_causal": False},
        "is_causal",
        "E0801",
        "`is_causal` is `false`, which this model does not have",
    ),
    (
        {"quantization_config": {"bits": 4}},
        "quantization_config",
        "E0801",
        '`quantization_config` is `{"bits": 4}`',
    ),
    (
        {"partial_rotary_factor": 0.5},
        "partial_rotary_factor",
        "E0801",
        "`partial_rotary_factor` is `0.5`",
    ),
    (
        {"transformers_version": "6.0.0", "new_thing": {"hidden_act": [1, {"hidden_size": 1}]}},
        "new_thing",
        "E0801",
        "what `new_thing` does is not known",
    ),
    (
        {"auto_map": {"AutoConfig": "own.Config"}, "new_thing": 1},
        "new_thing",
        "E0801",
        "what `new_thing` does is not known",
    ),
    (
        {"architectures": ["LlamaForSequenceClassification"]},
        "architectures",
        "E0801",
        "this is not a language model",
    ),
    (
        {"architectures": ["LlamaModel"]},
        "architectures",
        "E0801",
        '`["LlamaModel"]`: this is not a language model',
    ),
    (
        {"architectures": "LlamaForCausalLM"},
        "architectures",
        "E0801",
        "this is not a language model",
    ),
    (
        {"architectures": ["LlamaForCausalLM", "LlamaModel"]},
        "architectures",
        "E0801",
        "this is not a language model",
    ),
    (
        {"tie_word_embeddings": "yes"},
        "tie_word_embeddings",
        "E0803",
        '`"yes"`, not `true` or `false`',
    ),
    (
        {"tie_word_embeddings": None},
        "tie_word_embeddings",
        "E0803",
        "`null`, not `true` or `false`",
    ),
    (
        {"attention_dropout": "0.1"},
        "attention_dropout",
        "E0803",
        '`"0.1"`, not a number, at least 0 and below 1',
    ),
    (
        {"torch_dtype": "float8_e4m3fn"},
        "torch_dtype",
        "E0803",
        "not one of `float32`, `float64`, `bfloat16`, `float16`",
    ),
    ({"initializer_range": -1}, "initializer_range", "E0803", "`-1`, not a number, at least 0"),
    ({"num_key_value_heads": 5}, "num_key_value_heads", "E0804", "^^^ 32 / 5 = 6.4"),
    ({"num_attention_heads": 24}, "num_attention_heads", "E0804", "^^^ 4096 / 24 = 170.667"),
    (
        {"hidden_size": 96},
        "num_attention_heads",
        "E0804",
        "heads of 3 dims cannot be rotated in pairs",
    ),
    ({"head_dim": 33}, "head_dim", "E0804", "heads of 33 dims cannot be rotated in pairs"),
    (
        {"rope_scaling": {"type": "dynamic", "factor": 4.0}},
        "type",
        "E0801",
        "rotary positions of type `dynamic`",
    ),
    (
        {"rope_scaling": YARN | {"attention_factor": 1, "truncate": False}},
        "truncate",
        "E0801",
        "`truncate` is `false`",
    ),
    (
        {"rope_scaling": YARN | {"attention_factor": 1, "beta_slow": 40}},
        "beta_slow",
        "E0804",
        "^^^ 40 is not below 32",
    ),
    (
        {"rope_scaling": {"type": "linear", "factor": "a"}},
        "factor",
        "E0803",
        '`factor` is `"a"`, not a positive number',
    ),
    (
        {"rope_scaling": SCALED | {"high_freq_factor": 1}},
        "low_freq_factor",
        "E0804",
        "^^^ 1 is not below 1",
    ),
    ({"rope_scaling": 3}, "rope_scaling", "E0803", "`rope_scaling` is `3`, not a table of fields"),
    (
        {"rope_parameters": {"rope_type": "default"}},
        "rope_parameters",
        "E0804",
        "positions are given twice",
    ),
    (
        {"hidden_size": "big"},
        "hidden_size",
        "E0803",
        '`hidden_size` is `"big"`, not a whole number',
    ),
    (
        {"hidden_size": 4096.0},
        "hidden_size",
        "E0803",
        "`hidden_size` is `4096.0`, not a whole number",
    ),
    (
        {"num_attention_heads": 0},
        "num_attention_heads",
        "E0803",
        "`num_attention_heads` is `0`, not a whole number",
    ),
    (
        {"num_hidden_layers": True},
        "num_hidden_layers",
        "E0803",
        "`num_hidden_layers` is `true`, not a whole number",
    ),
    (
        {"rms_norm_eps": float("nan")},
        "rms_norm_eps",
        "E0803",
        "`rms_norm_eps` is `NaN`, not a positive number",
    ),
    ({"vocab_size": None}, "vocab_size", "E0803", "`vocab_size` is `null`, not a whole number"),
    ({"model_type": "lama"}, "model_type", "E0801", "there is no model for `lama`"),
    ({"model_type": ["llama"]}, "model_type", "E0803", '`model_type` is `["llama"]`, not a string'),
]


@pytest.mark.parametrize(("change", "field", "code", "message"), CHANGES)
def test_what_no_plan_expresses_is_an_error_at_its_line(
    change: dict[str, Any], field: str, code: str, message: str
) -> None:
    with pytest.raises(PlanError) as caught:
        imported(LLAMA_31_8B | change)
    found = next(each for each in caught.value.diagnostics if message in str(each))
    assert found.code == code
    assert len(caught.value.diagnostics) == 1
    assert f'"{field}"' in found.span.text.split("\n")[found.span.line - 1]


UNREAD = [  # a field, and how the plan names it
    (GEMMA_2_2B, {"sliding_window_size": 4096}, '"sliding_window_size" = 4096'),
    (LLAMA_31_8B, {"is_encoder_decoder": False}, '"is_encoder_decoder" = false'),
    (LLAMA_31_8B, {"quantization_config": None}, '"quantization_config" = null'),
    (LLAMA_31_8B, {"new_thing": [1, {"hidden_size": 1}]}, '"new_thing" = [1, {"hidden_size": 1}]'),
    (LLAMA_31_8B, {"a\n# b": 1}, r'"a\n# b" = 1'),
    (
        OLMO_2_7B,
        {"rope_scaling": {"type": "linear", "factor": 2, "beta": 1}},
        '"rope_scaling.beta" = 1',
    ),
    (GPT2, {"hidden_size": 768}, '"hidden_size" = 768'),
    (GPT2, {"rope_theta": 5000.0}, '"rope_theta" = 5000.0'),
    (MIXTRAL_8X7B, {"num_experts": 8}, '"num_experts" = 8'),
]


@pytest.mark.parametrize(("fields", "change", "named"), UNREAD)
def test_fields_that_change_nothing_are_named_in_the_plan(
    fields: dict[str, Any], change: dict[str, Any], named: str
) -> None:
    text = imported(fields | change)
    assert text.count("# Without effect") == 1
    assert f"# Without effect, for transformers does not read it: {named}.\n" in text


@pytest.mark.parametrize("value", [4096, 2048])
def test_a_field_given_twice(value: int) -> None:
    """JSON's readers take the last one."""
    text = json.dumps(LLAMA_31_8B, indent=2).replace(
        '"hidden_size"', f'"hidden_size": {value},\n  "hidden_size"', 1
    )
    if value == LLAMA_31_8B["hidden_size"]:
        assert '"hidden_size, once more" = 4096.\n' in import_config(Source("config.json", text))
        return
    with pytest.raises(PlanError) as caught:
        import_config(Source("config.json", text))
    (found,) = caught.value.diagnostics
    assert found.message == "`hidden_size` is given twice, as `2048` and as `4096`"
    before = found.notes[0].span
    assert before
    assert (found.code, found.span.line - before.line) == ("E0804", 1)


def test_yarns_factor_of_cosines_and_sines_is_a_scale_of_attention() -> None:
    yarn = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
    text = imported(QWEN_25_05B | {"rope_scaling": yarn})
    scaled = r"theta,\s+scaling=yarn,\s+factor=4,\s+low=1,\s+high=32,\s+original=32768"
    assert len(re.findall(scaled, text)) == 2
    scale = (0.1 * math.log(4) + 1) ** 2 / 8
    assert f"attention(q, k, v, mask=causal, scale={scale!r})" in text
    assert "scale=" not in imported(
        QWEN_25_05B | {"rope_scaling": yarn | {"attention_factor": 1.0}}
    )


def test_the_length_before_scaling_may_stand_outside_of_the_table() -> None:
    inside = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
    outside = {name: value for name, value in inside.items() if not name.startswith("original")}
    given = {"original_max_position_embeddings": 32768, "rope_scaling": outside}
    assert imported(QWEN_25_05B | given) == imported(QWEN_25_05B | {"rope_scaling": inside})
    with pytest.raises(
        PlanError,
        match=r"is `32768`, and `rope_scaling\.original_max_position_embeddings` is `4096`",
    ):
        imported(QWEN_25_05B | given | {"rope_scaling": YARN})


def test_scaled_positions_without_their_factors() -> None:
    """Each factor that is missing, at the table that should have it."""
    with pytest.raises(PlanError) as caught:
        imported(LLAMA_31_8B | {"rope_scaling": {"rope_type": "llama3", "factor": 8.0}})
    missing = ["low_freq_factor", "high_freq_factor", "original_max_position_embeddings"]
    assert [found.message for found in caught.value.diagnostics] == [
        f"`{name}` is missing" for name in missing
    ]
    assert all(
        '"rope_scaling"' in found.span.text.split("\n")[found.span.line - 1]
        for found in caught.value.diagnostics
    )


def test_fields_that_training_does_not_ask_for_change_nothing() -> None:
    harmless = {
        "_name_or_path": "a/b",
        "attn_implementation": "sdpa",
        "dtype": "bfloat16",
        "eos_token_id": [1, 2],
        "id2label": {"0": "a"},
        "output_attentions": False,
        "pad_token_id": None,
        "problem_type": None,
        "temperature": 0.6,
        "transformers_version": "4.57.1",
        "use_cache": False,
    }
    assert imported(LLAMA_31_8B | harmless) == imported(LLAMA_31_8B)
    no_class = {name: value for name, value in LLAMA_31_8B.items() if name != "architectures"}
    assert imported(no_class) == imported(LLAMA_31_8B)


OTHERS = [
    (
        GEMMA_2_2B,
        {"attn_logit_softcapping": None},
        "`attn_logit_softcapping` is `null`, not a positive number",
    ),
    (GEMMA_2_2B, {"num_hidden_layers": 25}, "25 / 2 = 12.5"),
    (GEMMA_2_2B, {"layer_types": ["full_attention"] * 26}, "the layers alternate differently"),
    (GEMMA_2_2B, {"layer_types": 5}, "the layers alternate differently"),
    (GEMMA_3_1B, {"final_logit_softcapping": 30.0}, "`final_logit_softcapping` is `30.0`"),
    (GEMMA_3_1B, {"num_hidden_layers": 5}, "5 is fewer than 6"),
    (GEMMA_3_1B, {"rope_parameters": {"rope_theta": 1.0}}, "no plan expresses `rope_theta`"),
    (
        GEMMA_3_1B,
        {"rope_parameters": {"full_attention": 1}},
        "`full_attention` is `1`, not a table of fields",
    ),
    (OLMO_2_7B, {"attention_bias": True}, "`attention_bias` is `true`"),
    (QWEN_3_8B, {"use_sliding_window": True}, "`use_sliding_window` is `true`"),
    (MIXTRAL_8X7B, {"router_jitter_noise": 0.1}, "`router_jitter_noise` is `0.1`"),
    (MIXTRAL_8X7B, {"num_experts_per_tok": 9}, "9 of 8 experts cannot be chosen"),
    (OLMOE_1B_7B, {"clip_qkv": 8.0}, "`clip_qkv` is `8.0`"),
    (OLMOE_1B_7B, {"num_experts": 0}, "`num_experts` is `0`, not a whole number"),
    (QWEN_3_30B_A3B, {"decoder_sparse_step": 2}, "`decoder_sparse_step` is `2`"),
    (DEEPSEEK_V3, {"scoring_func": "softmax"}, '`scoring_func` is `"softmax"`'),
    (DEEPSEEK_V3, {"num_key_value_heads": 64}, "`num_key_value_heads` is `64`"),
    (
        DEEPSEEK_V3,
        {"rope_scaling": {"type": "longrope", "factor": 40}},
        "rotary positions of type `longrope`",
    ),
    (
        DEEPSEEK_V3,
        {"quantization_config": {"fmt": "e4m3"}},
        '`quantization_config` is `{"fmt": "e4m3"}`',
    ),
    (DEEPSEEK_V3, {"rope_scaling": YARN}, "cosines and sines are scaled by 1.36889"),
    (
        DEEPSEEK_V3,
        {"rope_scaling": YARN | {"mscale": 1, "mscale_all_dim": 0.5}},
        "scaled by 1.15572",
    ),
    (
        GEMMA_2_2B,
        {"sliding_window_size": 2048},
        "`sliding_window_size` is `2048`, and `sliding_window` is `4096`",
    ),
    (GPT2, {"hidden_size": 1024}, "`hidden_size` is `1024`, and `n_embd` is `768`"),
    (PHI_3_MINI, {"rope_scaling": YARN}, "rotary positions of type `yarn`"),
    (
        DEEPSEEK_V3,
        {"first_k_dense_replace": 0},
        "`first_k_dense_replace` is `0`, not a whole number",
    ),
    (DEEPSEEK_V3, {"first_k_dense_replace": 61}, "of 61 layers, 61 are to have no experts"),
    (DEEPSEEK_V3, {"n_group": 7}, "256 / 7 = 36.5714"),
    (DEEPSEEK_V3, {"n_group": 256}, "a group has one expert"),
    (DEEPSEEK_V3, {"topk_group": 9}, "9 of 8 groups cannot be chosen"),
    (DEEPSEEK_V3, {"num_experts_per_tok": 129}, "129 of 128 experts cannot be chosen"),
    (QWEN_3_30B_A3B, {"mlp_only_layers": [0]}, "`mlp_only_layers` is `[0]`"),
]


@pytest.mark.parametrize(("fields", "change", "message"), OTHERS)
def test_what_other_models_cannot_be(
    fields: dict[str, Any], change: dict[str, Any], message: str
) -> None:
    with pytest.raises(PlanError, match=re.escape(message)):
        imported(fields | change)


@pytest.mark.parametrize("text", ["", "[]", "{", '{"a": }', "[" * 100])
def test_what_is_no_configuration(text: str) -> None:
    with pytest.raises(PlanError):
        import_config(Source("config.json", text))


def test_the_command_writes_a_plan_that_checks(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config, plan = tmp_path / "config.json", tmp_path / "plan.scale"
    config.write_text(json.dumps(QWEN_25_05B))
    assert main(["import", str(config), "-o", str(plan)]) == 0
    assert main(["check", str(plan)]) == 0
    assert "494,032,768 parameters on one rank" in capsys.readouterr().out
    assert main(["import", str(config), "-o", str(plan)]) == 2, (
        "an existing file is not overwritten"
    )
