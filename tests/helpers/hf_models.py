"""Tiny models of transformers with random weights, and their plans, which `scalec import` writes.

Non-goals: anything from the network; each model is built from its configuration.
"""

import copy
import os
import re
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"  # read when transformers is imported

import torch
import transformers
from safetensors.torch import load_file
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

from scalec.compiler.syntax.limits import load
from scalec.tools.importer import import_config

SEQ, ROWS, VOCAB = 16, 8, 64

AXIS = r"\b(?!pp)(\w+) ="
"""An axis of a mesh over which experts may lie."""

SMALL: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
# original_max_position_embeddings so short that some angles are scaled, some are not, some in
# between
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {  # of four pairs one is scaled in part
    **{
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 8.0,
        "original_max_position_embeddings": 64,
    },
    **{"mscale": 0.7, "mscale_all_dim": 0.7},
}
YARN_FACTOR = {  # cosines and sines have a factor, 0.1 ln 8 + 1
    **{
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 8.0,
        "original_max_position_embeddings": 64,
    },
}
LINEAR = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}
PLAIN = {"rope_type": "default", "rope_theta": 10000.0}

NEOX: dict[str, Any] = {
    name: value for name, value in SMALL.items() if name != "num_key_value_heads"
}
# 8 rows layer at least: those of 4 are the same in either direction of reordering
GPTJ: dict[str, Any] = {
    **{
        "n_embd": 64,
        "n_head": 4,
        "n_inner": 48,
        "n_layer": 2,
        "vocab_size": 100,
        "bos_token_id": 0,
        "eos_token_id": 0,
    }
}

GEMMA: dict[str, Any] = {
    **SMALL,
    "head_dim": 16,
    "query_pre_attn_scalar": 12,
    "sliding_window": 5,
    "pad_token_id": None,  # else transformers gives the row of that token no gradient
}

LATENT: dict[str, Any] = {
    **{**SMALL, "num_hidden_layers": 3, "num_key_value_heads": 4},
    **{
        "first_k_dense_replace": 1,
        "n_routed_experts": 8,
        "n_group": 4,
        "topk_group": 2,
        "num_experts_per_tok": 3,
    },
    **{
        "moe_intermediate_size": 12,
        "kv_lora_rank": 10,
        "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 8,
        "v_head_dim": 6,
    },
}

CONFIGS: dict[str, Callable[[], Any]] = {
    "deepseek_v3": lambda: transformers.DeepseekV3Config(
        **LATENT, q_lora_rank=12, rope_parameters=YARN
    ),
    "deepseek_v3_whole_queries": lambda: transformers.DeepseekV3Config(
        **{**LATENT, "n_group": 1, "topk_group": 1},
        q_lora_rank=None,
        n_shared_experts=2,
        norm_topk_prob=False,
        rms_norm_eps=1e-5,
        rope_interleave=False,
        rope_parameters=LINEAR,
    ),
    "distilbert": lambda: transformers.DistilBertConfig(
        dim=32,
        hidden_dim=48,
        n_heads=4,
        n_layers=2,
        max_position_embeddings=SEQ,
        vocab_size=100,
        pad_token_id=None,
    ),
    "gemma": lambda: transformers.GemmaConfig(**{**SMALL, "head_dim": 16, "pad_token_id": None}),
    "gemma2": lambda: transformers.Gemma2Config(**{**GEMMA, "num_hidden_layers": 4}),
    "gemma3": lambda: transformers.Gemma3TextConfig(**{**GEMMA, "num_hidden_layers": 8}),
    "gemma3_blocks": lambda: transformers.Gemma3TextConfig(**{**GEMMA, "num_hidden_layers": 6}),
    "gemma2_yarn": lambda: transformers.Gemma2Config(**GEMMA, rope_parameters=YARN_FACTOR),
    "gemma3_yarn": lambda: transformers.Gemma3TextConfig(
        **{**GEMMA, "num_hidden_layers": 6},
        rope_parameters={"full_attention": YARN_FACTOR, "sliding_attention": PLAIN},
    ),
    "gpt2": lambda: transformers.GPT2Config(
        n_embd=32,
        n_head=4,
        n_layer=2,
        n_positions=SEQ,
        vocab_size=100,
        bos_token_id=0,
        eos_token_id=0,
    ),
    "gpt_neox": lambda: transformers.GPTNeoXConfig(**NEOX),
    "gpt_neox_serial": lambda: transformers.GPTNeoXConfig(  # heads that turn whole
        **NEOX,
        rope_parameters={**PLAIN, "partial_rotary_factor": 1.0},
        hidden_act="gelu_fast",
        use_parallel_residual=False,
        tie_word_embeddings=True,
    ),
    "gpt_neox_yarn": lambda: transformers.GPTNeoXConfig(
        **NEOX, rope_parameters={**YARN_FACTOR, "partial_rotary_factor": 1.0}
    ),
    "gptj": lambda: transformers.GPTJConfig(**GPTJ, rotary_dim=8),
    "gptj_whole": lambda: transformers.GPTJConfig(**GPTJ, rotary_dim=16, tie_word_embeddings=True),
    "llama": lambda: transformers.LlamaConfig(**SMALL),
    "llama_tied": lambda: transformers.LlamaConfig(**SMALL, tie_word_embeddings=True, head_dim=16),
    "llama31": lambda: transformers.LlamaConfig(**SMALL, rope_parameters=LLAMA3),
    "mistral": lambda: transformers.MistralConfig(**SMALL, sliding_window=5, head_dim=16),
    "mistral_yarn": lambda: transformers.MistralConfig(
        **SMALL, sliding_window=5, rope_parameters=YARN_FACTOR
    ),
    "mistral_full": lambda: transformers.MistralConfig(
        **SMALL, sliding_window=None, rope_parameters=LINEAR
    ),
    "phi3": lambda: transformers.Phi3Config(**SMALL, pad_token_id=None, sliding_window=5),
    "phi3_part": lambda: transformers.Phi3Config(
        **{**SMALL, "hidden_size": 64},
        pad_token_id=None,
        rope_parameters={"partial_rotary_factor": 0.75, **PLAIN},
    ),
    "mixtral": lambda: transformers.MixtralConfig(**SMALL, num_local_experts=4, sliding_window=5),
    "mixtral_aux": lambda: transformers.MixtralConfig(
        **SMALL,
        num_local_experts=4,
        sliding_window=None,
        output_router_logits=True,
        router_aux_loss_coef=0.5,
    ),
    "olmo2": lambda: transformers.Olmo2Config(**SMALL, pad_token_id=None),
    "olmoe": lambda: transformers.OlmoeConfig(
        **SMALL, pad_token_id=None, num_experts=8, num_experts_per_tok=3
    ),
    "qwen2": lambda: transformers.Qwen2Config(**SMALL),
    "qwen2_yarn": lambda: transformers.Qwen2Config(**SMALL, rope_parameters=YARN_FACTOR),
    "qwen3_yarn": lambda: transformers.Qwen3Config(
        **SMALL, head_dim=16, rope_parameters={**YARN_FACTOR, "attention_factor": 1.5}
    ),
    "qwen3": lambda: transformers.Qwen3Config(**SMALL, head_dim=16, tie_word_embeddings=True),
    "olmoe_aux": lambda: transformers.OlmoeConfig(
        **SMALL,
        pad_token_id=None,
        num_experts=8,
        num_experts_per_tok=3,
        output_router_logits=True,
        router_aux_loss_coef=0.5,
    ),
    "qwen3_moe_aux": lambda: transformers.Qwen3MoeConfig(
        **{**SMALL, "head_dim": 16},
        moe_intermediate_size=12,
        num_experts=8,
        num_experts_per_tok=3,
        norm_topk_prob=True,
        output_router_logits=True,
        router_aux_loss_coef=0.5,
    ),
    "qwen3_moe": lambda: transformers.Qwen3MoeConfig(
        **{**SMALL, "head_dim": 16},
        moe_intermediate_size=12,
        num_experts=8,
        num_experts_per_tok=3,
        norm_topk_prob=True,
    ),
    "starcoder2": lambda: transformers.Starcoder2Config(
        **SMALL, sliding_window=5, bos_token_id=0, eos_token_id=0
    ),
    "starcoder2_head": lambda: transformers.Starcoder2Config(
        **SMALL, tie_word_embeddings=False, bos_token_id=0, eos_token_id=0
    ),
}


class Wide(TorchFunctionMode):
    """float64 wherever float32 is asked for: transformers computes norms, positions and softmax
    so in any model.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Calls `func` with wider types."""
        func = Tensor.double if func is Tensor.float else func
        return func(*tree_map(_wider, args), **tree_map(_wider, kwargs or {}))


def _wider(value: Any) -> Any:
    return torch.float64 if value is torch.float32 else value


def model(name: str, dtype: torch.dtype) -> Any:
    """A model of transformers whose every weight matters: norms and biases are random too."""
    config = CONFIGS[name]()
    config._attn_implementation = config._experts_implementation = "eager"
    torch.manual_seed(3)
    kind = (
        transformers.AutoModelForMaskedLM
        if name == "distilbert"
        else transformers.AutoModelForCausalLM
    )
    with Wide():
        made = kind.from_config(config, dtype=torch.float64)
    for parameter in made.parameters():
        noise = torch.randn(parameter.shape, dtype=torch.float64)
        parameter.data = (
            parameter.data + 0.2 * noise
            if parameter.dim() == 1
            else noise / parameter.shape[-1] ** 0.5
        )
    for module in made.modules():
        if hasattr(module, "e_score_correction_bias"):
            module.e_score_correction_bias.data = 0.2 * torch.randn(8, dtype=torch.float64)
    made.tie_weights()
    return made.to(dtype).eval()


def plan(saved: Path, mesh: str, dp: int, precision: str = "fp64") -> str:
    """The plan of a saved model on a mesh, with sequence parallelism wherever tp is more than
    1, and a ring over cp.
    """
    config = load(saved / "config.json")
    text = import_config(config).split("\nmesh {")[0]
    kv = "kv_heads, " if "kv_heads" in text else ""
    ffn = "" if "expert_ffn" in text else ", ffn"
    experts = f"experts over {', '.join(re.findall(AXIS, mesh))}  " if "experts" in text else ""
    ring = "seq over cp as zigzag via ring  " if "cp =" in mesh else ""
    return f"""{text}
mesh {{ {mesh} }}
shard {{ {experts}batch over dp  {ring}vocab, {kv}heads{ffn} over tp  seq over tp }}
train {{
  seq = {SEQ}  global_batch = {ROWS}  microbatch = {ROWS // dp // 2}  steps = 2  precision = {precision}
  optimizer sgd {{ lr = 0.1 }}
  data text {{ files = ["unused"] }}
}}
"""


def batch() -> tuple[Tensor, Tensor]:
    """Tokens and labels, [rows, seq]; some labels do not count."""
    generator = torch.Generator().manual_seed(1)
    tokens, labels = (torch.randint(VOCAB, (ROWS, SEQ), generator=generator) for _ in range(2))
    return tokens, labels.masked_fill(torch.rand(ROWS, SEQ, generator=generator) < 0.3, -100)


def loss_and_gradients(
    made: Any, tokens: Tensor, labels: Tensor, rows_of_forward: int = 0
) -> tuple[float, dict[str, Tensor]]:
    """The mean loss over labels that count, and the gradients by the names in files, of a float64
    model.

    With `rows_of_forward` gradients are also those of the routers' loss, the mean over forwards of
    so many rows.
    """
    with Wide():
        logits = made(input_ids=tokens).logits
        loss = torch.nn.functional.cross_entropy(
            logits.flatten(0, 1), labels.flatten(), ignore_index=-100
        )
        whole = loss
        if rows_of_forward:
            forwards = [
                made(input_ids=rows, output_router_logits=True)
                for rows in tokens.split(rows_of_forward)
            ]
            balance = torch.stack([forward.aux_loss for forward in forwards]).mean()
            whole = loss + made.config.router_aux_loss_coef * balance
        whole.backward()
    gradients = copy.deepcopy(made)
    for parameter, each in zip(gradients.parameters(), made.parameters(), strict=True):
        parameter.data = each.grad
    with tempfile.TemporaryDirectory() as folder:
        gradients.save_pretrained(folder)
        return loss.item(), load_file(Path(folder) / "model.safetensors")
