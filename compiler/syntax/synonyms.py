"""Sections and settings by the names that other programs give them, and how a plan says the same.

The programs are Hugging Face, Megatron-LM, DeepSpeed, torchtitan, Lightning and nanoGPT.  A row is
one wish: the names it goes by, and the help.
"""

_SETTINGS = {
    # train
    "seq": "seq_len seq_length sequence_length max_seq_len max_seq_length max_length block_size "
        "context_length context_size max_position_embeddings n_positions n_ctx",
    "global_batch": "batch batch_size global_batch_size train_batch_size total_batch_size",
    "microbatch": "micro_batch micro_batch_size microbatch_size local_batch_size "
        "per_device_train_batch_size per_device_batch_size train_micro_batch_size_per_gpu "
        "device_batch_size mbs",
    "steps": "max_steps num_steps total_steps training_steps train_steps max_iters iters "
        "iterations train_iters num_train_steps num_iterations",
    "seed": "random_seed manual_seed seed_everything",
    "precision": "dtype torch_dtype mixed_precision mixed_precision_param param_dtype "
        "compute_dtype bf16 fp16 amp autocast",
    "master": "master_dtype master_weights main_params_dtype",
    "reduce": "reduce_dtype mixed_precision_reduce grad_reduce_dtype",
    "kernels": "liger use_liger_kernel fused_kernels triton use_triton apex use_fused_ops",
    "compile": "torch_compile cudagraphs cuda_graphs",
    "recompute": "activation_checkpoint activation_checkpointing gradient_checkpointing "
        "checkpoint_activations recompute_activations recompute_granularity remat ac",
    # the optimizer
    "optimizer": "optim opt optimizer_type",
    "lr": "learning_rate max_lr peak_lr base_lr lr_max max_learning_rate",
    "betas": "beta beta1 beta2 adam_beta1 adam_beta2",
    "eps": "epsilon adam_eps adam_epsilon",
    "weight_decay": "wd decay l2",
    "clip": "grad_clip clip_grad clip_norm clip_grad_norm max_grad_norm max_norm gradient_clipping "
        "gradient_clip_val grad_norm_clip",
    "schedule": "lr_schedule lr_scheduler scheduler lr_scheduler_type lr_decay_style",
    "warmup": "warmup_steps num_warmup_steps warmup_iters lr_warmup_steps lr_warmup_iters "
        "warmup_ratio warmup_fraction",
    "floor": "min_lr lr_min eta_min min_learning_rate lr_end min_lr_ratio min_lr_factor",
    "lr_scale": "lr_mult lr_multiplier lr_factor",
    "params": "parameters modules pattern patterns",
    # data
    "data": "dataset datasets",
    "files": "file path paths data_path train_data train_files data_files glob",
    "holdout": "validation_split val_split eval_split val_fraction validation split",
    "separator": "eos eos_token eos_token_id eos_id eod eot end_of_text",
    "masked": "mlm_probability mask_prob masked_share",
    "mask_token": "mask_token_id mask_id",
    # state, machines
    "save_every": "save_steps save_interval save_freq checkpoint_every checkpoint_interval",
    "keep": "save_total_limit save_top_k keep_last max_checkpoints",
    "bucket": "bucket_size bucket_cap bucket_cap_mb reduce_bucket_size",
    "gpus_per_node": "nproc_per_node gpus num_gpus ngpus devices local_world_size gpus_per_machine",
    "nodes": "nnodes num_nodes machines hosts",
    "gpu": "gpu_type gpu_name device accelerator",
    "memory": "gpu_memory vram hbm",
    "finite": "nan detect_anomaly check_nan nan_check",
    "spikes": "loss_spikes skip_spikes spike",
}  # fmt: skip
"""Names of settings in a plan, and elsewhere."""

_ELSEWHERE = {
    "axes and their sizes are given in `mesh`, as in `mesh { dp = 2  tp = 4 }`":
        "mesh dp tp pp ep tensor_parallel data_parallel pipeline_parallel tensor_parallel_size "
        "data_parallel_size pipeline_parallel_size tp_size dp_size pp_size "
        "tensor_model_parallel_size pipeline_model_parallel_size tensor_parallel_degree "
        "pipeline_parallel_degree data_parallel_replicate_degree data_parallel_shard_degree "
        "device_mesh parallel parallelism parallel_dims strategy world_size num_gpus gpus "
        "devices num_processes",
    "write the axis in `mesh` and the rule in `shard`: `mesh { dp = 2  cp = 2 }  shard { batch "
    "over dp  seq over cp as zigzag via ring }`":
        "cp context_parallel context_parallel_size context_parallel_degree ring_attention "
        "ulysses ulysses_degree",
    "write a last rule in `shard`: `seq over tp`":
        "sp sequence_parallel use_sequence_parallel enable_async_tp",
    "write the axis in `mesh` and the rule in `shard`: `experts over dp`":
        "expert_parallel expert_parallel_size expert_model_parallel_size expert_parallel_degree "
        "ep_size",
    "write the rule `batch over dp` in `shard`": "ddp ddp_config distributed_data_parallel",
    "write `state { zero 3 over dp }`: parameters, gradients and optimizer state are sharded "
    "over dp":
        "fsdp fsdp2 fsdp_config fully_shard full_shard zero3",
    "write `mesh { dp_out = 2  dp_in = 4 }  shard { batch over dp_out, dp_in }  state { zero 3 "
    "over dp_in }`":
        "hsdp hybrid_shard",
    "state is sharded in a section of its own, as in `state { zero 1 over dp }`":
        "zero zero_stage zero1 zero2 deepspeed zero_optimization sharding_strategy state "
        "distributed_optimizer use_distributed_optimizer",
    "state stays on the GPUs: shard more of it, as in `state { zero 3 over dp }`, or write "
    "`recompute = full`":
        "offload cpu_offload offload_optimizer offload_param offload_params optimizer_offload "
        "activation_offload cpu_checkpointing",
    "set it by `prefetch` and `bucket` in `state { … }`; communication runs beside computation "
    "without more":
        "overlap_comm overlap_grad_reduce overlap_param_gather forward_prefetch "
        "backward_prefetch limit_all_gathers",
    "leave it out: parameters without a gradient are a mistake in the plan (E0212)":
        "find_unused_parameters static_graph",
    "dims of the model are given in `dims { … }`":
        "vocab vocab_size hidden hidden_size n_embd d_model dim layers num_layers "
        "num_hidden_layers n_layer heads num_heads num_attention_heads n_head ffn "
        "intermediate_size ffn_hidden_size num_key_value_heads",
    "the model has it, as in `rope(q, theta)` or `+ wpe[seq, hidden]`":
        "position_embedding position_embedding_type positional_embedding rope_theta rope_scaling",
    "use a parameter twice: `embedding(tokens, wte[vocab, hidden])`, and `x @ wte` for the logits":
        "weight_tying tie_weights tie_word_embeddings tie_embeddings "
        "share_embeddings_and_output_weights",
    "the loss has it: `cross_entropy(logits, labels, z=1e-4)`": "z_loss z_loss_weight",
    "the loss has it: `cross_entropy(logits, labels, smoothing=0.1)`":
        "label_smoothing label_smoothing_factor",
    "the model has it: `loss = cross_entropy(logits, labels)`": "loss loss_fn criterion objective",
    "the route has it: `route y to experts by top(…, 2, balance=0.01) { … }`":
        "moe_aux_loss_coeff router_aux_loss_coef aux_loss_coef load_balancing_loss",
    "leave it out: torch chooses flash attention where it can; `kernels = triton` has scalec's "
    "own":
        "flash_attention flash_attn use_flash_attn use_flash_attention attn_implementation sdpa "
        "attention_backend attn_backend",
    "there is no fp8: write `precision = bf16`":
        "fp8 float8 fp8_recipe transformer_engine quantization int8 load_in_8bit load_in_4bit",
    "leave it out: `precision = fp16` has a loss scale, which adapts itself":
        "loss_scale dynamic_loss_scale grad_scaler initial_scale_power",
    "`precision = fp32` computes in full fp32; write `precision = bf16` to be faster":
        "tf32 allow_tf32",
    "microbatches follow: `global_batch` / (`microbatch` × data-parallel ranks)":
        "gradient_accumulation_steps gradient_accumulation grad_accum grad_accumulation "
        "accumulate_grad_batches accumulation_steps num_microbatches microbatches n_microbatches",
    "a run counts `steps`; data is read as often as they take":
        "epochs num_epochs num_train_epochs max_epochs n_epochs",
    "a run counts `steps`, of `global_batch` × `seq` tokens each":
        "tokens train_tokens max_tokens total_tokens num_tokens samples train_samples",
    "leave it out: sequences are in an order of their own for each `seed`":
        "shuffle shuffle_data drop_last",
    "leave it out: a thread of each rank reads ahead":
        "num_workers dataloader_num_workers pin_memory prefetch_factor",
    "sequences are cut from the files one after another; with the input `documents[batch, seq]` "
    "documents do not see each other":
        "pack packing sample_packing reset_position_ids reset_attention_mask",
    "all parameters are trained; an optimizer's group with `lr_scale = 0  weight_decay = 0` "
    "keeps some as they are":
        "freeze frozen freeze_layers trainable requires_grad",
    "write it into the model: `x @ w[hidden -> ffn] + x @ a[hidden -> rank] @ b[rank -> ffn]`":
        "lora lora_rank peft peft_config adapter",
    "there is no average of weights": "ema ema_decay swa",
    "a run takes all its `steps`": "early_stopping early_stopping_patience load_best_model_at_end",
    "weights are given to the run: `train.py --init FOLDER`":
        "load_from init_from pretrained pretrained_model model_name_or_path from_pretrained "
        "finetune initial_load_path load",
    "weights are written by an option: `python train.py --export FOLDER`":
        "export save_pretrained push_to_hub export_dtype last_save_model_only",
    "leave it out: checkpoints are written beside training":
        "async_save async_mode async_checkpointing",
    "runs are the same bit for bit where torch's ops are deterministic":
        "deterministic full_determinism use_deterministic_algorithms",
    "set it for the run: `SCALEC_PROFILE=FOLDER`": "profile profiler profiling enable_profiling",
    "functions of your own around a step: `examples/trainer.py`":
        "hooks callbacks callback trainer",
    "write `schedule = interleaved_1f1b(chunks=2)`":
        "chunks virtual_stages virtual_pipeline_model_parallel_size num_model_chunks virtual_pp",
    "this is an option of train.py: `train.py --log-to tensorboard` or `wandb`":
        "report_to wandb tensorboard enable_tensorboard enable_wandb wandb_project logger metrics",
    "this is an option of train.py: `train.py --device`": "device use_cpu no_cuda",
    "this is an option of train.py: `train.py --help`":
        "output_dir logging_steps log_every logging log_interval log_freq eval_steps "
        "eval_interval eval_every resume resume_from_checkpoint eval evaluation eval_strategy "
        "validation_interval save_dir dump_folder run_name nccl_timeout comm "
        "init_timeout_seconds ddp_timeout job environment",
    "leave it out: a program uses NCCL on GPUs and gloo on CPUs":
        "backend distributed_backend distributed",
    "dropout is an op of the model: `dropout(x, 0.1)`":
        "dropout hidden_dropout attention_dropout dropout_rate",
}  # fmt: skip
"""Where a plan says what others have settings or sections for."""

_SECTIONS = {
    "write it in `train`: `optimizer adamw { lr = … }`": "optimizer optim",
    "write it in the optimizer: `schedule = cosine(warmup=100)`": "scheduler lr_scheduler schedule",
    'write it in `train`: `data text { files = ["corpus/*.txt"] }`':
        "data dataset datasets dataloader",
    "write it in `data text`: `tokenizer = bytes`; other tokenizers write files of ids, for "
    "`data tokens`":
        "tokenizer tokenization",
    "write it in `data`: `holdout = 5%`": "validation holdout",
    "write it in `train`: `save_every = 100`": "checkpoint checkpoints checkpointing save saving",
    "write it in `train`: `recompute = full`, or `selective(attention)`":
        "activation_checkpoint activation_checkpointing gradient_checkpointing recompute ac remat",
    "write it in `train`: `precision = bf16`": "precision mixed_precision amp bf16 fp16",
    "write it in `train`: `compile = on`": "compile torch_compile",
    "write `mesh { dp = 2  tp = 2 }` and the rules of `shard { batch over dp  heads, ffn over tp "
    "}`":
        "tensor_parallel data_parallel parallel parallelism parallel_dims strategy device_mesh",
    "write `shard { layers over pp }` and `pipeline { schedule = 1f1b }`": "pipeline_parallel pp",
    "it is called `shard`": "sharding shards placement placements",
    "it is called `train`": "training trainer train_config run",
    "it is called `cluster`": "hardware machine machines nodes resources",
    "it is called `watch`": "monitor guard health fault_tolerance",
    "a model is written `model NAME(tokens[batch, seq], labels[batch, seq]) { … }`, or used: "
    '`use "models/llama.scale" { dims { layers = 2 } }`':
        "model_config architecture config network",
    "a plan trains; for text from a model export it: `python train.py --export FOLDER`":
        "generate generation sample inference",
}  # fmt: skip
"""Sections by the names that others give them."""

_HEADINGS = {
    ("schedule",
        "cosinewithwarmup cosineannealing cosineannealinglr cosinedecay warmupcosine"):
        "write `schedule = cosine(warmup=100, floor=1e-5)`",
    ("schedule",
        "constantwithwarmup warmup"):
        "write `schedule = constant(warmup=100)`",
    ("data",
        "jsonl json parquet csv arrow hf huggingface c4 webdataset mds megatron"):
        'write the text to files for `data text { files = ["corpus/*.txt"] }`, or token ids for '
        '`data tokens { files = ["ids/*.bin"] }`',
    ("data",
        "synthetic random fake mock dummy"):
        "write `data text { files = [python_stdlib] }`, which is always there",
}  # fmt: skip
"""Names of optimizers, schedules and kinds of data that a plan does not have."""

_FORMS = {
    "lr":
        "a warm-up begins near 0, `schedule = cosine(warmup=100)`; a group with `lr_scale = 0  "
        "weight_decay = 0` keeps its parameters as they are",
    "warmup": "`warmup` is a number of steps, as in `warmup=100`, not a share of the run",
    "floor": "`floor` is a learning rate, as in `floor=3e-5`, not a share of `lr`",
    "tokenizer":
        "other tokenizers write files of token ids, which are read by `data tokens { files = "
        '["ids/*.bin"] }`',
}  # fmt: skip
"""How a setting is written whose value is often another one's: of another type, or out of range."""


def _fold(word: str) -> str:
    return word.casefold().replace("_", "")


_MEANT = {_fold(word): name for name, words in _SETTINGS.items() for word in words.split()}
_HELP = {_fold(word): help for help, words in _ELSEWHERE.items() for word in words.split()}

_BY_SECTION = {_fold(word): help for help, words in _SECTIONS.items() for word in words.split()}
_BY_HEADING = {
    (kind, word): help for (kind, words), help in _HEADINGS.items() for word in words.split()
}

_VALUES = {
    **dict.fromkeys(("bfloat16", "bfloat"), "bf16"),
    **dict.fromkeys(("float32", "float", "single"), "fp32"),
    **dict.fromkeys(("float16", "half"), "fp16"),
    **dict.fromkeys(("float64", "double"), "fp64"),
    **dict.fromkeys(("true", "yes"), "on"),
    **dict.fromkeys(("false", "no"), "off"),
}


def find_setting(word: str) -> str:
    """The plan's name of the setting `word`: another name, or the same."""
    return _MEANT.get(_fold(word), word)


def help_for_setting(word: str) -> str:
    """Where a plan says what other programs have a setting `word` for; "" if that is not known."""
    return _HELP.get(_fold(word), "")


def help_for_section(word: str) -> str:
    """How a plan says what other programs have a section `word` for; "" if that is not known."""
    return _BY_SECTION.get(_fold(word)) or help_for_setting(word)


def help_for_heading(kind: str, word: str) -> str:
    """The help for an optimizer, a schedule or data called `word`; "" if that is not known."""
    return _BY_HEADING.get((kind, _fold(word)), "")


def help_for_form(key: str) -> str:
    """How the setting `key` is written, where people often write another kind of value."""
    return _FORMS.get(key, "")


_VALUES_OF = {
    ("recompute", "on"): "full",
    ("recompute", "off"): "none",
    ("precision", "mixed"): "bf16",
    ("precision", "tf32"): "fp32",
}
"""Values that mean something in one setting."""


def find_value(key: str, word: str) -> str:
    """The plan's name of the value `word` of the setting `key`: another name, or the same."""
    name = _VALUES.get(_fold(word), word)
    return _VALUES_OF.get((key, name), name)
