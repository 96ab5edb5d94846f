"""Maps field names of verl, TRL, slime and OpenRLHF to Tandem's fields.

A key of the tables is the last part of a name, such as ``train_batch_size``. It has more parts where the last
one alone says too little, since Tandem has it too or two blocks of another system do: ``actor.optim.lr``. Of
two keys that end a name the longer one holds. ``answers.py`` looks names up and makes sentences of them.
"""

from configs.other_systems.roll import NEW_ROLL_KEYS, ROLL_KEYS
from configs.other_systems.verl import VERL_KEYS

_STEP = "`rollout.prompts_per_step` prompts, each with `rollout.group_size` responses"
_UPDATE = (
    "a share of the batch, of which `learner.minibatches` is the number: rollout_batch_size times n_samples_per_prompt"
    " / global_batch_size, such as 32 times 8 / 64 = 4"
)
_PARTS = "`learner.minibatches`, the number of optimizer steps that a step's batch is split into"
_PARTS_OF_PROMPTS = f"{_PARTS}: train_batch_size / ppo_mini_batch_size, such as 1024 / 256 = 4"
_MICRO = (
    "`learner.token_budget`, the tokens of a micro-batch: its number of sequences follows from their lengths"
)
_GROUP = "`rollout.group_size`, the responses to a prompt"
_GENERATION_PARTS = f"{_PARTS}: steps_per_generation / gradient_accumulation_steps, such as 8 / 2 = 4"
_LENGTH = "`rollout.max_new_tokens`, the tokens of a response"
_PROMPT = "a prompt may be as long as `rollout.max_new_tokens` and `learner.token_budget` leave room for"
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
_ONCE = "a batch is learned from once, in `learner.minibatches` parts"
_TRUNCATED = "`correction=decoupled_token_is`, a weight per token, truncated at 2"
_LR = "`learner.optimizer.lr`"
_NORMALISED = "`advantage.normalize_by_std`, of the rewards of a group"
_RESAMPLED = "`rollout.dynamic_sampling`, which samples further groups in place of those that it leaves out"
_STALE = "`rollout.max_staleness`, by how many versions a token may be older than the weights that it trains"
_RECOMPUTE = "`learner.recompute`, none or full"
_ENVIRONMENT = "`environment`, of type tokens, chat, agent or openenv"
_SERVER = "`rollout.server_args`, the arguments of SGLang's servers"
_SERVERS = "`rollout.replicas`, the number of servers, each of `rollout.tp` GPUs"
_REMOTE = "`reward={type: model, urls: [...]}`"
_WEIGHT = "`correction`, a preset or a block; TRL's default is `correction={weight: {level: sequence, bound: mask, lower: 0, upper: 3}}`"
_FROZEN = "the reference of the KL stays what it is at the start"
_REFERENCE = (
    "`kl.model.path`, a Hugging Face folder; without it the reference is the model at the start of the run"
)
_TEACHER = "`kl={coefficient: 1.0, estimator: k2, model: {path: TEACHER}}`"
_OFFLOADED = "what leaves the GPU follows from `launch.placement`; colocated takes turns"
_SAMPLES_KEPT = "`tracking.sample_groups`, the groups of a step whose samples are kept"
_PACKED = "sequences are packed without padding, up to `learner.token_budget`"


def _optimizer(field: str, *, before: tuple[str, ...]) -> dict[str, str]:
    """The settings of an optimizer, whose block is ``field``. before: what stands before their names."""
    warmup = f"`{field}.warmup_steps`, a number of optimizer steps and no share of them"
    settings = {
        **dict.fromkeys(["lr_scheduler_type", "lr_scheduler", "lr_decay_style", "warmup_style"], f"`{field}.schedule`"),
        **dict.fromkeys(["warmup_ratio", "lr_warmup_ratio", "lr_warmup_steps", "lr_warmup_steps_ratio", "lr_warmup_iters"], warmup),
        **dict.fromkeys(["max_grad_norm", "grad_clip", "max_norm"], f"`{field}.clip_grad`"),
        **dict.fromkeys(["adam_beta1", "adam_beta2", "adam_betas"], f"`{field}.betas`"),
        "min_lr_ratio": f"`{field}.min_lr`, a rate and no share of `{field}.lr`",
    }  # fmt: skip
    # Tandem has these names too: they say what they are of by what stands before them.
    same = {
        name: f"`{field}.{name}`" for name in ("lr", "min_lr", "weight_decay", "betas", "eps", "clip_grad")
    }
    return {
        f"{block}{name}": text
        for block in before
        for name, text in (settings | same if block.endswith("optim.") else settings).items()
    }


OTHER_FIELDS = {
    **dict.fromkeys(["batch_size", "train_batch_size", "rollout_batch_size", "generation_batch_size"], _STEP),
    "global_batch_size": _UPDATE,
    "ppo_mini_batch_size": _PARTS_OF_PROMPTS,
    **dict.fromkeys(["mini_batch_size", "num_steps_per_rollout"], _PARTS),
    "steps_per_generation": _GENERATION_PARTS,
    **dict.fromkeys(
        ["micro_batch_size", "micro_train_batch_size", "ppo_micro_batch_size", "ppo_micro_batch_size_per_gpu",
         "gradient_accumulation_steps", "per_device_train_batch_size", "ppo_max_token_len_per_gpu", "max_tokens_per_gpu",
         "log_prob_micro_batch_size", "log_prob_micro_batch_size_per_gpu", "log_prob_max_token_len_per_gpu",
         "log_probs_max_tokens_per_gpu", "micro_rollout_batch_size", "micro_batch_size_per_gpu"], _MICRO,
    ),
    **dict.fromkeys(["num_generations", "n_samples_per_prompt", "rollout_n", "n"], _GROUP),
    **dict.fromkeys(
        ["max_response_length", "max_completion_length", "rollout_max_response_len", "generate_max_len", "response_length"], _LENGTH
    ),
    **dict.fromkeys(
        ["model_name", "model_name_or_path", "model_path", "hf_checkpoint", "pretrain", "actor_rollout_ref.model.path"], _MODEL
    ),
    **dict.fromkeys(
        ["max_steps", "total_training_steps", "num_train_epochs", "total_epochs", "num_rollout", "num_epoch", "num_episodes"], _STEPS
    ),
    **dict.fromkeys(
        ["tensor_model_parallel_size", "tensor_parallel_size", "vllm_tensor_parallel_size", "rollout_num_gpus_per_engine"],
        _TP,
    ),
    "megatron.tensor_model_parallel_size": "`layout.tp`",
    "rollout.tensor_model_parallel_size": "`rollout.tp`, the GPUs of a server",
    **dict.fromkeys(["context_parallel_size", "ulysses_sequence_parallel_size", "ring_attn_size"], _CONTEXT),
    **dict.fromkeys(
        ["gpu_memory_utilization", "vllm_gpu_memory_utilization", "sglang_mem_fraction_static", "mem_fraction_static"],
        _MEMORY,
    ),
    **dict.fromkeys(["pipeline_model_parallel_size"], "`layout.pp`"),
    **dict.fromkeys(["virtual_pipeline_model_parallel_size"], "`layout.vpp`"),
    **dict.fromkeys(["expert_model_parallel_size", "expert_parallel_size"], "`layout.ep`"),
    "sequence_parallel": "`layout.sp`",
    **dict.fromkeys(["enforce_eager", "engine_kwargs", "max_num_seqs", "max_num_batched_tokens", "enable_chunked_prefill"], _SERVER),
    **dict.fromkeys(["train_files", "prompt_data", "prompt_dataset", "train_dataset", "dataset", "dataset_name", "data"], _DATA),
    **dict.fromkeys(["val_files", "eval_prompt_data", "eval_dataset"], _HELDOUT),
    **dict.fromkeys(["test_freq", "eval_steps", "eval_interval"], _EVERY_EVALUATION),
    **dict.fromkeys(["save_freq", "save_steps", "save_interval"], _EVERY_CHECKPOINT),
    **dict.fromkeys(["output_dir", "default_local_dir", "save_path", "save"], _RUNS),
    **dict.fromkeys(["reward_funcs", "custom_reward_function", "custom_rm_path", "rm_type", "reward_manager"], _REWARD),
    **dict.fromkeys(["rm_url", "remote_rm_url", "remote_url", "reward_model.enable", "reward_model.model.path"], _REMOTE),
    **dict.fromkeys(["kl_coef", "init_kl_coef", "init_coef", "beta", "use_kl_loss", "use_kl_in_reward", "kl_loss_coef"], _KL),
    **dict.fromkeys(["kl_loss_type", "kl_estimator"], "`kl.estimator`"),
    "kl_penalty": "`kl.estimator`, with `kl.place=reward`",
    **dict.fromkeys(["kl_ctrl.type", "use_adaptive_kl"], "`kl.controller.type`, fixed or adaptive"),
    **dict.fromkeys(["target_kl", "kl_target"], "`kl.controller.target`"),
    **dict.fromkeys(["kl_ctrl.horizon", "kl_horizon"], "`kl.controller.horizon`"),
    **dict.fromkeys(["ref_load", "opd_teacher_load", "teacher_model_name_or_path"], _REFERENCE),
    **dict.fromkeys(["use_opd", "opd_type"], _TEACHER),
    "opd_kl_coef": _KL,
    **dict.fromkeys(
        ["scale_rewards", "norm_adv_by_std_in_grpo", "disable_grpo_std_normalization", "no_std_norm"], _NORMALISED
    ),
    "normalize_advantages": "`advantage.whiten`",
    **dict.fromkeys(["lambd", "algorithm.lam"], "`advantage.lam`, beside `advantage.type=gae`"),
    "algorithm.gamma": "`advantage.gamma`, beside `advantage.type`, gae or reinforce_pp",
    "critic.enable": "`advantage.type`, of which gae has a critic",
    **dict.fromkeys(["adv_estimator", "advantage_estimator"], "`advantage.type`"),
    "algorithm": "`advantage.type` and `objective.type`",
    "loss_mode": "`objective.type`",
    "loss_agg_mode": "`aggregation.type`",
    "calculate_per_token_loss": "`aggregation.type=token_mean`",
    "loss_scale_factor": "`aggregation.constant`",
    "loss_type": "`aggregation.type` and `objective.type`; in verl's rollout_correction, a key of `correction={verl: {...}}`",
    **dict.fromkeys(
        ["filter_groups", "dynamic_sampling_filter_path", "dynamic_filtering", "dynamic_filtering_enable",
         "dynamic_filtering_range", "gen_batch_size", "max_num_gen_batches", "over_sampling_batch_size"], _RESAMPLED,
    ),
    **dict.fromkeys(
        ["partial_rollout", "partial_rollout_enable", "staleness_threshold", "update_weights_interval", "async_enable"], _STALE
    ),
    **dict.fromkeys(
        ["colocate", "vllm_mode", "colocate_all_models", "colocate_all", "hybrid_engine"],
        "`launch.placement`, auto, separate or colocated",
    ),
    **dict.fromkeys(["nnodes", "actor_num_nodes", "num_nodes"], "`launch.nodes.learner` and `launch.nodes.rollout`"),
    **dict.fromkeys(["n_gpus_per_node", "actor_num_gpus_per_node", "num_gpus_per_node"], "`launch.nodes.gpus_per_node`"),
    **dict.fromkeys(["logger", "report_to", "use_wandb"], "`tracking.wandb={}` or `tracking.tensorboard=true`; MLflow is always on"),
    **dict.fromkeys(["val_before_train", "eval_on_start", "skip_eval_before_train"], "`evaluation.at_ends`"),
    "val_max_samples": "`evaluation.max_prompts`",
    **dict.fromkeys(["n_samples_per_eval_prompt", "num_generations_eval", "val_kwargs.n"], "`evaluation.samples_per_prompt`"),
    "val_kwargs.do_sample": "`evaluation.greedy`",
    **dict.fromkeys(["eval_temperature", "val_kwargs.temperature"], "`evaluation.temperature`"),
    **dict.fromkeys(["use_tis", "tis_clip", "tis_imp_ratio_cap", "is_correction_enable"], _TRUNCATED),
    **dict.fromkeys(
        ["vllm_importance_sampling_correction", "vllm_importance_sampling_mode", "vllm_importance_sampling_cap",
         "vllm_importance_sampling_clip_max", "vllm_importance_sampling_clip_min"], _WEIGHT,
    ),
    "use_rollout_logprobs": "`correction.mode`, bypass",
    **dict.fromkeys(["use_opsm", "opsm_delta", "off_policy_mask_threshold"], "`correction.off_policy_mask`, in nats per token"),
    **dict.fromkeys(["use_unbiased_kl", "use_bias_correction_kl"], "`kl.unbiased`"),
    "custom_tis_function_path": "`correction.weight`, with level function",
    "custom_generate_function_path": "`environment={type: tokens}`, a class of your own",
    **dict.fromkeys(
        ["rollout_function_path", "rollout_func", "environment_factory", "agent_func_path", "tool_config_path",
         "interaction_config_path", "agent_loop_config_path", "multi_turn"], _ENVIRONMENT,
    ),
    "custom_loss_function_path": "`objective={type: function, function: my_module:objective}`",
    "custom_advantage_function_path": "`advantage={type: function, function: my_module:advantage}`",
    **{
        name: f"`{field}`"
        for field in ("rollout.temperature", "rollout.top_p", "rollout.top_k", "rollout.min_p", "rollout.dtype")
        for name in (field, field.replace(".", "_"))
    },
    **dict.fromkeys(["learning_rate", "actor_learning_rate"], _LR),
    "critic_learning_rate": "`critic.optimizer.lr`",
    **dict.fromkeys(["enable_rollout_routing_replay", "use_rollout_routing_replay"], "`learner.routing=rollout`"),
    "use_routing_replay": "`learner.routing=old`",
    "router_replay": "`learner.routing`, old (R2) or rollout (R3)",
    **dict.fromkeys(["lora_rank", "lora_r"], "`learner.lora.rank`; without `learner.lora` every weight is trained"),
    "lora_alpha": "`learner.lora.alpha`",
    **dict.fromkeys(
        ["target_modules", "lora_target_modules"],
        "`learner.lora.targets`, of qkv (q_proj, k_proj, v_proj), proj (o_proj), fc1 (gate_proj, up_proj) and fc2 (down_proj)",
    ),
    "peft_config": "`learner.lora`",
    **dict.fromkeys(["entropy_coeff", "entropy_coef"], "`entropy.coefficient`"),
    "importance_sampling_level": "`objective.type`: clipped has a ratio per token, gspo one per sequence",
    **dict.fromkeys(
        ["clip_ratio", "eps_clip", "epsilon", "eps_clip_low_high"], "`objective.clip_low` and `objective.clip_high`"
    ),
    **dict.fromkeys(["clip_ratio_low", "eps_clip_low"], "`objective.clip_low`"),
    **dict.fromkeys(["clip_ratio_high", "epsilon_high", "eps_clip_high"], "`objective.clip_high`"),
    **dict.fromkeys(["clip_ratio_c", "eps_clip_c", "delta"], "`objective.dual_clip`"),
    "cliprange_value": "`critic.value_clip`",
    **_optimizer("learner.optimizer", before=("", "optim.", "actor.optim.")),
    **_optimizer("critic.optimizer", before=("critic.", "critic.optim.")),
    **dict.fromkeys(["bf16", "fp16", "torch_dtype", "param_dtype"], "`model.dtype` of the learner and `rollout.dtype` of the servers"),
    **dict.fromkeys(
        ["gradient_checkpointing", "enable_gradient_checkpointing", "gradient_checkpointing_enable", "recompute_granularity",
         "recompute_method", "recompute_num_layers"], _RECOMPUTE,
    ),
    **dict.fromkeys(["save_total_limit", "max_actor_ckpt_to_keep", "max_ckpt_num", "max_num"], "`checkpoint.keep`"),
    "save_strategy": _EVERY_CHECKPOINT,
    "eval_strategy": _EVERY_EVALUATION,
    **dict.fromkeys(["log_completions", "log_val_generations", "rollout_data_dir"], _SAMPLES_KEPT),
    **dict.fromkeys(["prompt_key", "input_key"], "`task.prompt_field`, beside `task.type=jsonl`"),
    **dict.fromkeys(
        ["chat_template_kwargs", "apply_chat_template_kwargs", "enable_thinking"],
        "`model.chat_template_kwargs`, such as {enable_thinking: false}",
    ),
    "label_key": "`task.answer_field`, beside `task.type=jsonl`",
    **dict.fromkeys(["filter_overlong_prompts", "data.truncation"], "`task.too_long_prompts`, refuse or leave_out"),
    "reward_fn_key": "`reward.field`, beside `reward.type=by_field`",
    "tool_key": "`task.tools_field`, beside `task.type=jsonl`",
    **dict.fromkeys(["data.shuffle", "shuffle_dataset", "rollout_shuffle"], "`sampler.type`, shuffle or sequential"),
    **dict.fromkeys(
        ["reward_weights", "overlong_buffer", "overlong_buffer_cfg", "overlong_buffer_len"],
        "`reward={type: weighted, parts: {...}}`",
    ),
    **dict.fromkeys(["vllm_num_engines", "num_engines", "rollout_num_gpus", "rollout.data_parallel_size"], _SERVERS),
    **dict.fromkeys(["critic_warmup", "num_critic_only_steps", "freezing_steps"], "`critic.warmup_steps`"),
    **dict.fromkeys(["resume_mode", "resume_from_path", "resume_from_checkpoint", "load"], "`resume`, the folder of a run"),
    **dict.fromkeys(["experiment_name", "run_name"], "`name`"),
    **dict.fromkeys(["project_name", "wandb_project"], "`tracking.wandb.project`; `tracking.experiment` for MLflow"),
    **dict.fromkeys(["data.seed", "data_loader_seed", "rollout_seed"], "`seed`"),
    "rollout_correction": "`correction: {verl: {...}}`, with verl's keys",
    **dict.fromkeys([key for key in VERL_KEYS if key != "loss_type"], "a key of `correction: {verl: {...}}`"),
    **dict.fromkeys([*ROLL_KEYS, *NEW_ROLL_KEYS], "a key of `correction: {roll: {...}}`"),
}  # fmt: skip
"""The values continue the sentence "here it is"."""

WITHOUT_COUNTERPART = {
    **dict.fromkeys(
        ["max_prompt_length", "rollout_max_prompt_len", "prompt_max_len", "rollout_max_context_len", "max_model_len",
         "vllm_max_model_length", "prompt_length"], _PROMPT,
    ),
    "expert_tensor_parallel_size": "`layout.ep` splits the experts, and no expert is split",
    **dict.fromkeys(
        ["zero_stage", "fsdp_size"], "the learner is Megatron-Core; `learner.optimizer.distributed` splits the optimizer's state"
    ),
    **dict.fromkeys(["actor.strategy", "ref.strategy", "critic.strategy", "train_backend"], "the learner is Megatron-Core"),
    **dict.fromkeys(
        ["param_offload", "optimizer_offload", "grad_offload", "optimizer_cpu_offload", "adam_offload", "offload_train",
         "free_cache_engine", "vllm_enable_sleep_mode"], _OFFLOADED,
    ),
    **dict.fromkeys(["ref_update_interval", "sync_ref_model"], _FROZEN),
    **dict.fromkeys(["ppo_epochs", "num_iterations", "max_epochs"], _ONCE),
    **dict.fromkeys(
        ["optim.total_training_steps", "lr_decay_iters"], "the schedule ends with the run, after `steps` steps"
    ),
    "calculate_log_probs": "servers send the log-prob of every token that they sample",
    "get_mismatch_metrics": "every step measures the gap of the engines",
    **dict.fromkeys(["lora_dropout", "use_dora", "use_rslora"], "`learner.lora` is plain LoRA, without dropout"),
    **dict.fromkeys(
        ["use_remove_padding", "use_dynamic_bsz", "use_dynamic_batch_size", "log_prob_use_dynamic_bsz", "dynamic_batch_enable",
         "packing_samples"], _PACKED,
    ),
    **dict.fromkeys(["balance_batch", "balance_data"], "the learner's ranks always get even shares of the tokens"),
    **dict.fromkeys(["actor.shuffle", "critic.shuffle"], "a part of a batch is a run of its prompts, in their order"),
    **dict.fromkeys(["logging_steps", "log_interval"], "every step has its line"),
    **dict.fromkeys(["use_vllm", "rollout.name"], "the servers are SGLang's"),
    "rollout.mode": "requests to the servers are always asynchronous",
    **dict.fromkeys(["tokenizer_path", "data.tokenizer"], "the tokenizer is that of `model.path`"),
    **dict.fromkeys(["ray_kwargs", "ray_init", "ray_wait_register_center_timeout"], "there is no Ray"),
    "val_batch_size": "an evaluation takes all held-out prompts, or `evaluation.max_prompts` of them",
    "eval_max_response_len": "evaluations have `rollout.max_new_tokens` too",
    **dict.fromkeys(
        ["eval_top_p", "eval_top_k", "val_kwargs.top_p", "val_kwargs.top_k"], "evaluations sample from all tokens"
    ),
    **dict.fromkeys(["optim.optimizer", "optim.optimizer_impl"], "the optimizer is AdamW"),
}  # fmt: skip
"""The values continue the sentence "it has no counterpart: "."""

OTHER_BLOCKS = {"data", "algorithm", "actor_rollout_ref", "trainer", "reward_model", "optim"}
"""verl's blocks: the keys within them are answered, though a name may be close to one of Tandem's."""
