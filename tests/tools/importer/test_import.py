"""`scalec import`: published configurations become plans of the published size; what no plan
expresses is said.
"""

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest

from scalec.compiler.cli import main
from scalec.tools.importer import import_config
from scalec.compiler.syntax.diagnostics import PlanError
from scalec.tools.formatter import format_plan
from scalec.compiler.syntax.source import Source

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
GEMMA_2_2B: dict[str, Any] = {
    "architectures": ["Gemma2ForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "attn_logit_softcapping": 50.0,
    "bos_token_id": 2,
    "cache_implementation": "hybrid",
    "eos_token_id": 1,
    "final_logit_softcapping": 30.0,
    "head_dim": 256,
    "hidden_act": "gelu_pytorch_tanh",
    "hidden_activation": "gelu_pytorch_tanh",
    "hidden_size": 2304,
    "initializer_range": 0.02,
    "intermediate_size": 9216,
    "max_position_embeddings": 8192,
    "model_type": "gemma2",
    "num_attention_heads": 8,
    "num_hidden_layers": 26,
    "num_key_value_heads": 4,
    "pad_token_id": 0,
    "query_pre_attn_scalar": 256,
    "rms_norm_eps": 1e-06,
    "rope_theta": 10000.0,
    "sliding_window": 4096,
    "torch_dtype": "float32",
    "transformers_version": "4.42.4",
    "use_cache": True,
    "vocab_size": 256000,
}
GEMMA_3_1B: dict[str, Any] = {
    "architectures": ["Gemma3ForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "attn_logit_softcapping": None,
    "bos_token_id": 2,
    "cache_implementation": "hybrid",
    "eos_token_id": [1, 106],
    "final_logit_softcapping": None,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "hidden_size": 1152,
    "initializer_range": 0.02,
    "intermediate_size": 6912,
    "max_position_embeddings": 32768,
    "model_type": "gemma3_text",
    "num_attention_heads": 4,
    "num_hidden_layers": 26,
    "num_key_value_heads": 1,
    "pad_token_id": 0,
    "query_pre_attn_scalar": 256,
    "rms_norm_eps": 1e-06,
    "rope_local_base_freq": 10000,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": 512,
    "sliding_window_pattern": 6,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.50.0.dev0",
    "use_cache": True,
    "vocab_size": 262144,
}
QWEN_3_8B: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 151643,
    "eos_token_id": 151645,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "initializer_range": 0.02,
    "intermediate_size": 12288,
    "max_position_embeddings": 40960,
    "max_window_layers": 36,
    "model_type": "qwen3",
    "num_attention_heads": 32,
    "num_hidden_layers": 36,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.51.0",
    "use_cache": True,
    "use_sliding_window": False,
    "vocab_size": 151936,
}
OLMO_2_7B: dict[str, Any] = {
    "architectures": ["Olmo2ForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "eos_token_id": 100257,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "initializer_range": 0.02,
    "intermediate_size": 11008,
    "max_position_embeddings": 4096,
    "model_type": "olmo2",
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 32,
    "pad_token_id": 100277,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 500000,
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
    "transformers_version": "4.47.0.dev0",
    "use_cache": True,
    "vocab_size": 100352,
}
MISTRAL_7B: dict[str, Any] = {
    "architectures": ["MistralForCausalLM"],
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "initializer_range": 0.02,
    "intermediate_size": 14336,
    "max_position_embeddings": 32768,
    "model_type": "mistral",
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-05,
    "rope_theta": 10000.0,
    "sliding_window": 4096,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.34.0.dev0",
    "use_cache": True,
    "vocab_size": 32000,
}
PHI_3_MINI: dict[str, Any] = {
    "_name_or_path": "Phi-3-mini-4k-instruct",
    "architectures": ["Phi3ForCausalLM"],
    "attention_dropout": 0.0,
    "auto_map": {"AutoConfig": "configuration_phi3.Phi3Config"},
    "bos_token_id": 1,
    "embd_pdrop": 0.0,
    "eos_token_id": 32000,
    "hidden_act": "silu",
    "hidden_size": 3072,
    "initializer_range": 0.02,
    "intermediate_size": 8192,
    "max_position_embeddings": 4096,
    "model_type": "phi3",
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 32,
    "original_max_position_embeddings": 4096,
    "pad_token_id": 32000,
    "resid_pdrop": 0.0,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "rope_theta": 10000.0,
    "sliding_window": 2047,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.40.2",
    "use_cache": True,
    "attention_bias": False,
    "vocab_size": 32064,
}
GPT_NEOX_20B: dict[str, Any] = {
    "architectures": ["GPTNeoXForCausalLM"],
    "attention_probs_dropout_prob": 0,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "hidden_act": "gelu_fast",
    "hidden_dropout_prob": 0,
    "hidden_size": 6144,
    "initializer_range": 0.02,
    "intermediate_size": 24576,
    "layer_norm_eps": 1e-05,
    "max_position_embeddings": 2048,
    "model_type": "gpt_neox",
    "num_attention_heads": 64,
    "num_hidden_layers": 44,
    "rotary_emb_base": 10000,
    "rotary_pct": 0.25,
    "tie_word_embeddings": False,
    "torch_dtype": "float16",
    "transformers_version": "4.19.0.dev0",
    "use_cache": True,
    "vocab_size": 50432,
}
STARCODER_2_3B: dict[str, Any] = {
    "activation_function": "gelu",
    "architectures": ["Starcoder2ForCausalLM"],
    "attention_dropout": 0.1,
    "attention_softmax_in_fp32": True,
    "bos_token_id": 0,
    "embedding_dropout": 0.1,
    "eos_token_id": 0,
    "hidden_act": "gelu_pytorch_tanh",
    "hidden_size": 3072,
    "initializer_range": 0.018042,
    "intermediate_size": 12288,
    "layer_norm_epsilon": 1e-05,
    "max_position_embeddings": 16384,
    "mlp_type": "default",
    "model_type": "starcoder2",
    "norm_epsilon": 1e-05,
    "norm_type": "layer_norm",
    "num_attention_heads": 24,
    "num_hidden_layers": 30,
    "num_key_value_heads": 2,
    "residual_dropout": 0.1,
    "rope_theta": 999999.4420358813,
    "scale_attention_softmax_in_fp32": True,
    "scale_attn_weights": True,
    "sliding_window": 4096,
    "torch_dtype": "float16",
    "transformers_version": "4.37.0.dev0",
    "use_bias": True,
    "use_cache": True,
    "vocab_size": 49152,
}
GEMMA_2B: dict[str, Any] = {
    "architectures": ["GemmaForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 2,
    "eos_token_id": 1,
    "head_dim": 256,
    "hidden_act": "gelu",
    "hidden_activation": None,
    "hidden_size": 2048,
    "initializer_range": 0.02,
    "intermediate_size": 16384,
    "max_position_embeddings": 8192,
    "model_type": "gemma",
    "num_attention_heads": 8,
    "num_hidden_layers": 18,
    "num_key_value_heads": 1,
    "pad_token_id": 0,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 10000.0,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.38.0.dev0",
    "use_cache": True,
    "vocab_size": 256000,
}
GPT_J_6B: dict[str, Any] = {
    "activation_function": "gelu_new",
    "architectures": ["GPTJForCausalLM"],
    "attn_pdrop": 0.0,
    "bos_token_id": 50256,
    "embd_pdrop": 0.0,
    "eos_token_id": 50256,
    "gradient_checkpointing": False,
    "initializer_range": 0.02,
    "layer_norm_epsilon": 1e-05,
    "model_type": "gptj",
    "n_embd": 4096,
    "n_head": 16,
    "n_inner": None,
    "n_layer": 28,
    "n_positions": 2048,
    "resid_pdrop": 0.0,
    "rotary": True,
    "rotary_dim": 64,
    "scale_attn_weights": True,
    "summary_activation": None,
    "summary_first_dropout": 0.1,
    "summary_proj_to_labels": True,
    "summary_type": "cls_index",
    "summary_use_proj": True,
    "task_specific_params": {
        "text-generation": {"do_sample": True, "max_length": 50, "temperature": 1.0}
    },
    "tie_word_embeddings": False,
    "tokenizer_class": "GPT2Tokenizer",
    "transformers_version": "4.18.0.dev0",
    "use_cache": True,
    "vocab_size": 50400,
}
DISTILBERT: dict[str, Any] = {
    "activation": "gelu",
    "architectures": ["DistilBertForMaskedLM"],
    "attention_dropout": 0.1,
    "dim": 768,
    "dropout": 0.1,
    "hidden_dim": 3072,
    "initializer_range": 0.02,
    "max_position_embeddings": 512,
    "model_type": "distilbert",
    "n_heads": 12,
    "n_layers": 6,
    "pad_token_id": 0,
    "qa_dropout": 0.1,
    "seq_classif_dropout": 0.2,
    "sinusoidal_pos_embds": False,
    "tie_weights_": True,
    "transformers_version": "4.10.0.dev0",
    "vocab_size": 30522,
}
MIXTRAL_8X7B: dict[str, Any] = {
    "architectures": ["MixtralForCausalLM"],
    "attention_dropout": 0.0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "initializer_range": 0.02,
    "intermediate_size": 14336,
    "max_position_embeddings": 32768,
    "model_type": "mixtral",
    "num_attention_heads": 32,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "num_local_experts": 8,
    "output_router_logits": False,
    "rms_norm_eps": 1e-05,
    "rope_theta": 1000000.0,
    "router_aux_loss_coef": 0.02,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.36.0.dev0",
    "use_cache": True,
    "vocab_size": 32000,
}
OLMOE_1B_7B: dict[str, Any] = {
    "architectures": ["OlmoeForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "clip_qkv": None,
    "eos_token_id": 50279,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "initializer_range": 0.02,
    "intermediate_size": 1024,
    "max_position_embeddings": 4096,
    "model_type": "olmoe",
    "norm_topk_prob": False,
    "num_attention_heads": 16,
    "num_experts": 64,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 16,
    "num_key_value_heads": 16,
    "output_router_logits": False,
    "pad_token_id": 1,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "rope_theta": 10000.0,
    "router_aux_loss_coef": 0.01,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.43.0.dev0",
    "use_cache": True,
    "vocab_size": 50304,
}
QWEN_3_30B_A3B: dict[str, Any] = QWEN_3_8B | {
    "architectures": ["Qwen3MoeForCausalLM"],
    "decoder_sparse_step": 1,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "max_window_layers": 48,
    "mlp_only_layers": [],
    "model_type": "qwen3_moe",
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 48,
    "num_key_value_heads": 4,
    "output_router_logits": False,
    "router_aux_loss_coef": 0.001,
}
# of pretraining: the release has scaled positions and weights of 8 bits
DEEPSEEK_V3: dict[str, Any] = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "aux_loss_alpha": 0.001,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "ep_size": 1,
    "first_k_dense_replace": 3,
    "hidden_act": "silu",
    "hidden_size": 7168,
    "initializer_range": 0.02,
    "intermediate_size": 18432,
    "kv_lora_rank": 512,
    "max_position_embeddings": 4096,
    "model_type": "deepseek_v3",
    "moe_intermediate_size": 2048,
    "moe_layer_freq": 1,
    "n_group": 8,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 61,
    "num_key_value_heads": 128,
    "num_nextn_predict_layers": 1,
    "pretraining_tp": 1,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "rms_norm_eps": 1e-06,
    "rope_theta": 10000,
    "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid",
    "seq_aux": True,
    "tie_word_embeddings": False,
    "topk_group": 4,
    "topk_method": "noaux_tc",
    "torch_dtype": "bfloat16",
    "transformers_version": "4.33.1",
    "use_cache": True,
    "v_head_dim": 128,
    "vocab_size": 129280,
}
PUBLISHED = [  # the models' releases: the sizes of their files of weights
    (GEMMA_2_2B, 2_614_341_888),
    (GEMMA_3_1B, 999_885_952),
    (OLMO_2_7B, 7_298_617_344),
    (QWEN_3_8B, 8_190_735_360),
    (GPT2, 124_439_808),
    (LLAMA_31_8B, 8_030_261_248),
    (QWEN_25_05B, 494_032_768),
    (MISTRAL_7B, 7_241_732_096),
    (PHI_3_MINI, 3_821_079_552),
    (GPT_NEOX_20B, 20_554_567_680),
    (STARCODER_2_3B, 3_030_371_328),
    (GEMMA_2B, 2_506_172_416),
    (GPT_J_6B, 6_050_882_784),
    (DISTILBERT, 66_985_530),
    (MIXTRAL_8X7B, 46_702_792_704),
    (OLMOE_1B_7B, 6_919_161_856),
    (QWEN_3_30B_A3B, 30_532_122_624),
    (DEEPSEEK_V3, 671_026_404_352),
]


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
