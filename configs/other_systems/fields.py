"""Maps field names of verl, TRL, slime and OpenRLHF to Tandem's fields."""

_STEP = "`rollout.prompts_per_step` prompts, each with `rollout.group_size` responses"
_UPDATE = "a share of the batch: `rollout.prompts_per_step` times `rollout.group_size` over `learner.minibatches` samples"
_PARTS = "`learner.minibatches`, the number of optimizer steps that a step's batch is split into"
_MICRO = (
    "`learner.token_budget`, the tokens of a micro-batch: its number of sequences follows from their lengths"
)
_GROUP = "`rollout.group_size`, the responses to a prompt"
_LENGTH = "`rollout.max_new_tokens`, the tokens of a response"
_PROMPT = (
    "no field: a prompt may be as long as `rollout.max_new_tokens` and `learner.token_budget` leave room for"
)
_MODEL = "`model.path`, a Hugging Face folder on this disk"
_STEPS = "`steps`, the number of times that prompts are sampled and learned from; epochs are not counted"
_TP, _MEMORY = (
    "`layout.tp` of the learner and `rollout.tp` of a server",
    "`rollout.server_args={mem_fraction_static: 0.8}`",
)
_CONTEXT = "`layout.cp`, the ranks that every sequence is split over"
_DATA, _HELDOUT = (
    "`task.train_path`, beside `task.type=jsonl`",
    "`task.heldout_path`, beside `task.type=jsonl`",
)
_EVERY_EVALUATION, _EVERY_CHECKPOINT = "`evaluation.every`, in steps", "`checkpoint.every`, in steps"
_RUNS = "`launch.runs_dir`, in which each run makes a folder of its own"
_REWARD = "`reward={type: function, function: my_module:score}`"
_KL = "`kl.coefficient`, with `kl.place` loss or reward"
_ONCE = "no field: a batch is learned from once, in `learner.minibatches` parts"
_TRUNCATED = "`correction=decoupled_token_is`, a weight per token, truncated at 2"
_LR = "`learner.optimizer.lr`"
_WARMUP = "`learner.optimizer.warmup_steps`, a number of optimizer steps and no share of them"
_PACKED = "no field: sequences are packed without padding, up to `learner.token_budget`"

OTHER_FIELDS = {
    **dict.fromkeys(["batch_size", "train_batch_size", "rollout_batch_size", "generation_batch_size"], _STEP),
    "global_batch_size": _UPDATE,
    **dict.fromkeys(["mini_batch_size", "ppo_mini_batch_size", "num_steps_per_rollout", "steps_per_generation"], _PARTS),
    **dict.fromkeys(
        ["micro_batch_size", "micro_train_batch_size", "ppo_micro_batch_size", "ppo_micro_batch_size_per_gpu",
         "gradient_accumulation_steps", "per_device_train_batch_size", "ppo_max_token_len_per_gpu", "max_tokens_per_gpu",
         "log_prob_micro_batch_size", "log_prob_micro_batch_size_per_gpu", "micro_rollout_batch_size"], _MICRO,
    ),
    **dict.fromkeys(["num_generations", "n_samples_per_prompt", "num_samples", "rollout_n", "n"], _GROUP),
    **dict.fromkeys(["max_response_length", "max_completion_length", "rollout_max_response_len", "generate_max_len"], _LENGTH),
    **dict.fromkeys(["max_prompt_length", "rollout_max_prompt_len", "prompt_max_len"], _PROMPT),
    **dict.fromkeys(["model_name", "model_name_or_path", "model_path", "hf_checkpoint", "pretrain"], _MODEL),
    **dict.fromkeys(
        ["max_steps", "total_training_steps", "num_train_epochs", "total_epochs", "num_rollout", "epochs", "num_epochs"], _STEPS
    ),
    **dict.fromkeys(
        ["tensor_model_parallel_size", "tensor_parallel_size", "vllm_tensor_parallel_size", "rollout_num_gpus_per_engine"],
        _TP,
    ),
    **dict.fromkeys(["context_parallel_size", "ulysses_sequence_parallel_size", "ring_attn_size"], _CONTEXT),
    **dict.fromkeys(
        ["gpu_memory_utilization", "vllm_gpu_memory_utilization", "sglang_mem_fraction_static", "mem_fraction_static"],
        _MEMORY,
    ),
    **dict.fromkeys(["train_files", "prompt_data", "dataset", "dataset_name", "data"], _DATA),
    **dict.fromkeys(["val_files", "eval_prompt_data", "eval_dataset"], _HELDOUT),
    **dict.fromkeys(["test_freq", "eval_steps", "eval_interval"], _EVERY_EVALUATION),
    **dict.fromkeys(["save_freq", "save_steps", "save_interval"], _EVERY_CHECKPOINT),
    **dict.fromkeys(["output_dir", "default_local_dir", "save_path"], _RUNS),
    **dict.fromkeys(["reward_funcs", "custom_reward_function", "custom_rm_path", "rm_type", "reward_fn"], _REWARD),
    **dict.fromkeys(["kl_coef", "init_kl_coef", "beta", "use_kl_loss", "use_kl_in_reward"], _KL),
    **dict.fromkeys(["ppo_epochs", "num_iterations", "max_epochs"], _ONCE),
    **dict.fromkeys(["scale_rewards", "norm_adv_by_std_in_grpo"], "`advantage.normalize_by_std`"),
    "loss_type": "`aggregation.type` and `objective.type`; the one of verl's rollout_correction goes under `correction={verl: {...}}`",
    **dict.fromkeys(["filter_groups", "dynamic_sampling_filter_path", "dynamic_filtering"], "`rollout.dynamic_sampling`"),
    **dict.fromkeys(["colocate", "vllm_mode", "colocate_all_models", "hybrid_engine"], "`launch.placement`, auto, separate or colocated"),
    **dict.fromkeys(["nnodes", "actor_num_nodes"], "`launch.nodes.learner` and `launch.nodes.rollout`"),
    **dict.fromkeys(["n_gpus_per_node", "actor_num_gpus_per_node"], "`launch.nodes.gpus_per_node`"),
    **dict.fromkeys(["logger", "report_to", "use_wandb"], "no field: every run writes metrics.jsonl, a report and MLflow (`tracking.uri`)"),
    **dict.fromkeys(["val_before_train", "eval_on_start"], "`evaluation.at_ends`"),
    **dict.fromkeys(["use_tis", "vllm_importance_sampling_correction"], _TRUNCATED),
    "custom_generate_function_path": "`environment={type: tokens}`, a class of your own",
    **dict.fromkeys(["learning_rate", "actor_learning_rate"], _LR),
    **dict.fromkeys(["enable_rollout_routing_replay", "use_rollout_routing_replay"], "`learner.routing=rollout`"),
    "use_routing_replay": "`learner.routing=old`",
    "router_replay": "`learner.routing`, old (R2) or rollout (R3)",
    **dict.fromkeys(["lora_rank", "lora_r"], "`learner.lora.rank`; without `learner.lora` every weight is trained"),
    "lora_alpha": "`learner.lora.alpha`",
    **dict.fromkeys(
        ["target_modules", "lora_target_modules"],
        "`learner.lora.targets`, of qkv (q_proj, k_proj, v_proj), proj (o_proj), fc1 (gate_proj, up_proj) and fc2 (down_proj)",
    ),
    **dict.fromkeys(["lora_dropout", "use_dora", "use_rslora", "lora_bias"], "no field: `learner.lora` is plain LoRA, without dropout"),
    "kl_estimator": "`kl.estimator`",
    "entropy_coef": "`entropy.coefficient`",
    "importance_sampling_level": "`objective.type`: clipped has a ratio per token, gspo one per sequence",
    "clip_ratio": "`objective.clip_low` and `objective.clip_high`",
    "eps_clip": "`objective.clip_low` and `objective.clip_high`",
    "epsilon": "`objective.clip_low` and `objective.clip_high`",
    "epsilon_high": "`objective.clip_high`",
    "eps_clip_high": "`objective.clip_high`",
    **dict.fromkeys(["eps_clip_c", "delta"], "`objective.dual_clip`"),
    "advantage_estimator": "`advantage.type`",
    **dict.fromkeys(["lr_scheduler_type", "lr_scheduler", "lr_decay_style"], "`learner.optimizer.schedule`"),
    **dict.fromkeys(["warmup_ratio", "lr_warmup_ratio", "lr_warmup_steps", "lr_warmup_steps_ratio"], _WARMUP),
    **dict.fromkeys(["max_grad_norm", "grad_clip", "max_norm"], "`learner.optimizer.clip_grad`"),
    **dict.fromkeys(["adam_beta1", "adam_beta2", "adam_betas"], "`learner.optimizer.betas`"),
    **dict.fromkeys(["bf16", "fp16", "torch_dtype"], "`model.dtype` of the learner and `rollout.dtype` of the servers"),
    **dict.fromkeys(["gradient_checkpointing", "enable_gradient_checkpointing"], "`learner.recompute`, none or full"),
    **dict.fromkeys(["use_remove_padding", "use_dynamic_bsz", "use_dynamic_batch_size"], _PACKED),
    **dict.fromkeys(["save_total_limit", "max_actor_ckpt_to_keep", "max_ckpt_num"], "`checkpoint.keep`"),
    "save_strategy": _EVERY_CHECKPOINT,
    "eval_strategy": _EVERY_EVALUATION,
    **dict.fromkeys(["logging_steps", "log_interval"], "no field: every step has its line"),
    "log_completions": "`tracking.sample_groups`, the groups of a step whose samples are kept",
    **dict.fromkeys(["prompt_key", "input_key"], "`task.prompt_field`, beside `task.type=jsonl`"),
    **dict.fromkeys(
        ["chat_template_kwargs", "apply_chat_template_kwargs", "enable_thinking"],
        "`model.chat_template_kwargs`, such as {enable_thinking: false}",
    ),
    "label_key": "`task.answer_field`, beside `task.type=jsonl`",
    "filter_overlong_prompts": "`task.too_long_prompts`, refuse or leave_out",
    **dict.fromkeys(["shuffle", "shuffle_dataset", "rollout_shuffle"], "`sampler.type`, shuffle or sequential"),
    **dict.fromkeys(["reward_weights", "overlong_buffer"], "`reward={type: weighted, parts: {...}}`"),
    "use_vllm": "no field: the servers are SGLang's",
    "vllm_num_engines": "`rollout.replicas`",
    "critic_warmup": "`critic.warmup_steps`",
    **dict.fromkeys(["resume_mode", "resume_from_checkpoint"], "`resume`, the folder of a run"),
    "experiment_name": "`name`",
    "project_name": "`tracking.experiment`",
    "run_name": "`name`",
}  # fmt: skip
"""The keys are the last parts of the names; the values continue the sentence "here it is"."""

OTHER_BLOCKS = {"data", "algorithm", "actor_rollout_ref", "trainer", "reward_model"}
"""verl's blocks: the keys within them are answered, though a name may be close to one of Tandem's."""
