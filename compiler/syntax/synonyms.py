"""Settings by the names that other programs give them: Hugging Face, Megatron-LM, DeepSpeed, torchtitan, nanoGPT."""

_SETTINGS = {
    # train
    "seq": "seq_len seq_length sequence_length max_seq_len max_seq_length max_length block_size context_length "
    "context_size max_position_embeddings n_positions n_ctx",
    "global_batch": "batch batch_size global_batch_size train_batch_size total_batch_size",
    "microbatch": "micro_batch micro_batch_size microbatch_size local_batch_size per_device_train_batch_size "
    "per_device_batch_size train_micro_batch_size_per_gpu device_batch_size mbs",
    "steps": "max_steps num_steps total_steps training_steps train_steps max_iters iters iterations train_iters "
    "num_train_steps num_iterations",
    "seed": "random_seed manual_seed",
    "precision": "dtype torch_dtype mixed_precision mixed_precision_param param_dtype compute_dtype bf16 fp16 amp",
    "master": "master_dtype master_weights main_params_dtype",
    "reduce": "reduce_dtype mixed_precision_reduce grad_reduce_dtype",
    "compile": "torch_compile",
    "recompute": "activation_checkpoint activation_checkpointing gradient_checkpointing checkpoint_activations "
    "recompute_activations recompute_granularity remat ac",
    # the optimizer
    "optimizer": "optim opt optimizer_type",
    "lr": "learning_rate max_lr peak_lr base_lr lr_max max_learning_rate",
    "betas": "beta beta1 beta2 adam_beta1 adam_beta2",
    "eps": "epsilon adam_eps adam_epsilon",
    "weight_decay": "wd decay l2",
    "clip": "grad_clip clip_grad clip_norm clip_grad_norm max_grad_norm max_norm gradient_clipping gradient_clip_val "
    "grad_norm_clip",
    "schedule": "lr_schedule lr_scheduler scheduler lr_scheduler_type lr_decay_style",
    "warmup": "warmup_steps num_warmup_steps warmup_iters lr_warmup_steps lr_warmup_iters warmup_ratio warmup_fraction",
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
}  # fmt: skip
"""Names of settings in a plan, and elsewhere."""

_ELSEWHERE = {
    "axes and their sizes are given in `mesh`, as in `mesh { dp = 2  tp = 4 }`": "mesh dp tp pp cp sp tensor_parallel "
    "data_parallel pipeline_parallel tensor_parallel_size data_parallel_size pipeline_parallel_size tp_size dp_size "
    "pp_size tensor_model_parallel_size pipeline_model_parallel_size tensor_parallel_degree pipeline_parallel_degree "
    "data_parallel_replicate_degree data_parallel_shard_degree",
    "state is sharded in a section of its own, as in `state { zero 1 over dp }`": "zero zero_stage "
    "zero_optimization fsdp fsdp_config sharding_strategy state distributed_optimizer use_distributed_optimizer",
    "dims of the model are given in `dims { … }`": "vocab vocab_size hidden hidden_size n_embd d_model dim layers "
    "num_layers num_hidden_layers n_layer heads num_heads num_attention_heads n_head ffn intermediate_size "
    "ffn_hidden_size num_key_value_heads",
    "microbatches follow: `global_batch` / (`microbatch` × data-parallel ranks)": "gradient_accumulation_steps "
    "gradient_accumulation grad_accum grad_accumulation accumulate_grad_batches accumulation_steps num_microbatches "
    "microbatches n_microbatches",
    "a run counts `steps`; data is read as often as they take": "epochs num_epochs num_train_epochs "
    "max_epochs n_epochs",
    "write `schedule = interleaved_1f1b(chunks=2)`": "chunks virtual_stages virtual_pipeline_model_parallel_size "
    "num_model_chunks virtual_pp",
    "this is an option of train.py: `train.py --help`": "output_dir logging_steps log_every "
    "log_interval log_freq eval_steps eval_interval eval_every resume resume_from_checkpoint",
    "dropout is an op of the model: `dropout(x, 0.1)`": "dropout hidden_dropout attention_dropout dropout_rate",
}  # fmt: skip
"""Where a plan says what others have settings for."""


def _folded(word: str) -> str:
    return word.casefold().replace("_", "")


_MEANT = {_folded(word): name for name, words in _SETTINGS.items() for word in words.split()}
_HELP = {_folded(word): help for help, words in _ELSEWHERE.items() for word in words.split()}

_VALUES = {
    **dict.fromkeys(("bfloat16", "bfloat"), "bf16"),
    **dict.fromkeys(("float32", "float", "single"), "fp32"),
    **dict.fromkeys(("float16", "half"), "fp16"),
    **dict.fromkeys(("float64", "double"), "fp64"),
    **dict.fromkeys(("true", "yes"), "on"),
    **dict.fromkeys(("false", "no"), "off"),
}


def setting_meant(word: str) -> str:
    """The plan's name of the setting `word`: another name, or the same."""
    return _MEANT.get(_folded(word), word)


def said_elsewhere(word: str) -> str:
    """Where a plan says what other programs have a setting `word` for; "" if that is not known."""
    return _HELP.get(_folded(word), "")


def value_meant(word: str) -> str:
    """The plan's name of the value `word`: another name, or the same."""
    return _VALUES.get(_folded(word), word)
