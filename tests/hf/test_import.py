"""`scalec import`: published configurations become plans of the published size; what no plan expresses is said."""

import json
from pathlib import Path
from typing import Any

import pytest

from scalec.compiler.cli import main
from scalec.compiler.diagnostics import PlanError
from scalec.compiler.importer import import_config
from scalec.compiler.source import Source

LLAMA_31_8B: dict[str, Any] = {  # as published with the model
    "architectures": ["LlamaForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 128000,
    "eos_token_id": 128001,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "initializer_range": 0.02,
    "intermediate_size": 14336,
    "max_position_embeddings": 131072,
    "mlp_bias": False,
    "model_type": "llama",
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.43.0.dev0",
    "use_cache": True,
    "vocab_size": 128256,
}
QWEN_25_05B: dict[str, Any] = {
    "architectures": ["Qwen2ForCausalLM"],
    "attention_dropout": 0.0,
    "bos_token_id": 151643,
    "eos_token_id": 151643,
    "hidden_act": "silu",
    "hidden_size": 896,
    "initializer_range": 0.02,
    "intermediate_size": 4864,
    "max_position_embeddings": 32768,
    "max_window_layers": 24,
    "model_type": "qwen2",
    "num_attention_heads": 14,
    "num_hidden_layers": 24,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0,
    "sliding_window": 32768,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.40.1",
    "use_cache": True,
    "use_mrope": False,
    "use_sliding_window": False,
    "vocab_size": 151936,
}
GPT2: dict[str, Any] = {
    "activation_function": "gelu_new",
    "architectures": ["GPT2LMHeadModel"],
    "attn_pdrop": 0.1,
    "bos_token_id": 50256,
    "embd_pdrop": 0.1,
    "eos_token_id": 50256,
    "initializer_range": 0.02,
    "layer_norm_epsilon": 1e-05,
    "model_type": "gpt2",
    "n_ctx": 1024,
    "n_embd": 768,
    "n_head": 12,
    "n_layer": 12,
    "n_positions": 1024,
    "resid_pdrop": 0.1,
    "summary_activation": None,
    "summary_first_dropout": 0.1,
    "summary_proj_to_labels": True,
    "summary_type": "cls_index",
    "summary_use_proj": True,
    "task_specific_params": {"text-generation": {"do_sample": True, "max_length": 50}},
    "vocab_size": 50257,
}
PUBLISHED = [(GPT2, 124_439_808), (LLAMA_31_8B, 8_030_261_248), (QWEN_25_05B, 494_032_768)]


def imported(fields: dict[str, Any]) -> str:
    """The plan of a configuration."""
    return import_config(Source("config.json", json.dumps(fields, indent=2)))


@pytest.mark.parametrize(("fields", "parameters"), PUBLISHED)
def test_published_configurations_have_their_size(fields: dict[str, Any], parameters: int) -> None:
    assert imported(fields).startswith(f"# A {fields['model_type']} of {parameters:,} parameters")


def test_the_fields_of_positions_come_over() -> None:
    assert imported(LLAMA_31_8B).count("scaling=llama3, factor=8, low=1, high=4, original=8192") == 2


CHANGES = [
    ({"hidden_act": "gelu"}, '`hidden_act` is `"gelu"`'),
    ({"attention_bias": True}, "`attention_bias` is `true`"),
    ({"new_thing": 1}, "no plan expresses `new_thing`"),
    ({"rope_scaling": {"type": "yarn", "factor": 4.0}}, "rotary positions of type `yarn`"),
    ({"hidden_size": "big"}, "`hidden_size` is "),
    ({"vocab_size": None}, "`vocab_size` is missing"),
    ({"model_type": "lama"}, "there is no model for `lama`"),
]


@pytest.mark.parametrize(("change", "message"), CHANGES)
def test_what_no_plan_expresses_is_an_error_at_its_line(change: dict[str, Any], message: str) -> None:
    with pytest.raises(PlanError) as caught:
        imported(LLAMA_31_8B | change)
    (found,) = caught.value.diagnostics
    assert found.code == "E0801"
    assert message in found.message
    assert f'"{next(iter(change))}"' in found.span.text.split("\n")[found.span.line - 1]


@pytest.mark.parametrize("text", ["", "[]", "{", '{"a": }', "[" * 100])
def test_what_is_no_configuration(text: str) -> None:
    with pytest.raises(PlanError):
        import_config(Source("config.json", text))


def test_the_command_writes_a_plan_that_checks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config, plan = tmp_path / "config.json", tmp_path / "plan.scale"
    config.write_text(json.dumps(QWEN_25_05B))
    assert main(["import", str(config), "-o", str(plan)]) == 0
    assert main(["check", str(plan)]) == 0
    assert "494,032,768 parameters on one rank" in capsys.readouterr().out
    assert main(["import", str(config), "-o", str(plan)]) == 2, "an existing file is not overwritten"
