"""Maps field names of verl, TRL, slime, OpenRLHF, NeMo-RL, ROLL, AReaL and prime-rl to Tandem's fields.

A key of the tables is the last part of a name, such as ``train_batch_size``. It has more parts if the last
one is ambiguous, because Tandem or two blocks of another system have it: ``actor.optim.lr``. If two keys
match the end of a name, the longer one counts. ``answers.py`` looks names up and makes sentences of them.
"""

from collections.abc import Mapping

from configs.other_systems.roll import NEW_ROLL_KEYS, ROLL_KEYS
from configs.other_systems.verl import VERL_KEYS

_PARTS = "`learner.minibatches`, the number of optimizer steps that a step's batch is split into"


_SAMPLING = ("gconfig", "generation", "actor_infer.generating_args", "sampling")
"""Blocks of AReaL, NeMo-RL, ROLL and prime-rl in which the parameters of sampling have Tandem's names."""


def _by_name(answers: Mapping[str, str]) -> dict[str, str]:
    """{name: answer} from {answer: its names, separated by blanks}."""
    return {name: answer for answer, names in answers.items() for name in names.split()}


def _optimizer(field: str, *, before: tuple[str, ...]) -> dict[str, str]:
    """Answers for the settings of Tandem's optimizer block ``field``. before: the prefixes of their names."""
    warmup = f"`{field}.warmup_steps`, a number of optimizer steps, not a share of them"
    rollout_steps = f"`{field}.warmup_steps` in optimizer steps; there it counts rollout batches: times `learner.minibatches`"
    settings = {
        **dict.fromkeys(["lr_scheduler_type", "lr_scheduler", "lr_decay_style", "warmup_style"], f"`{field}.schedule`"),
        **dict.fromkeys(
            ["warmup_ratio", "lr_warmup_ratio", "lr_warmup_steps_ratio", "lr_warmup_iters", "lr_warmup_fraction",
             "warmup_steps_proportion"], warmup),
        "lr_warmup_steps": rollout_steps,  # verl's name
        "megatron_cfg.scheduler.lr_warmup_iters": rollout_steps,  # NeMo-RL's
        **dict.fromkeys(["max_grad_norm", "grad_clip", "max_norm", "gradient_clipping"], f"`{field}.clip_grad`"),
        **dict.fromkeys(["adam_beta1", "adam_beta2", "adam_betas", "beta1", "beta2"], f"`{field}.betas`"),
        "adam_eps": f"`{field}.eps`",
        "min_lr_ratio": f"`{field}.min_lr`, a rate, not a share of `{field}.lr`",
    }  # fmt: skip
    # Tandem has these names too, so only their prefix tells what they belong to.
    same = {
        name: f"`{field}.{name}`"
        for name in ("lr", "min_lr", "weight_decay", "betas", "eps", "clip_grad", "warmup_steps")
    }
    return {
        f"{block}{name}": text
        for block in before
        for name, text in (
            settings | same
            if block.endswith(("optim.", "adam.", "optimizer.", "kwargs.", "training_args."))
            else settings
        ).items()
    }


OTHER_FIELDS = _by_name({
    "`rollout.prompts_per_step` prompts, each with `rollout.group_size` responses":
        "batch_size train_batch_size rollout_batch_size num_prompts_per_step consumer_batch_size",
    "`rollout.prompts_per_step` of `rollout.group_size` responses each; there it counts responses: generation_batch_size / "
    "num_generations, such as 1024 / 8 = 128 prompts":
        "generation_batch_size",
    "`rollout.prompts_per_step` of `rollout.group_size` responses each; there it counts responses: batch_size / group_size, such as "
    "512 / 16 = 32 prompts":
        "orchestrator.batch_size",
    "a share of the batch; `learner.minibatches` is the number of shares: rollout_batch_size times n_samples_per_prompt "
    "/ global_batch_size, such as 32 times 8 / 64 = 4":
        "global_batch_size",
    "a share of the batch; `learner.minibatches` is the number of shares: the responses of a step / train_global_batch_size, such as "
    "32 times 16 / 512 = 1":
        "train_global_batch_size",
    "a share of the batch; `learner.minibatches` is the number of shares: rollout.batch_size times n_samples_per_prompt / "
    "train.batch_size, such as 128 times 8 / 1024 = 1":
        "train.batch_size",
    f"{_PARTS}: train_batch_size / ppo_mini_batch_size, such as 1024 / 256 = 4": "ppo_mini_batch_size",
    _PARTS: "mini_batch_size num_steps_per_rollout ppo_n_minibatches",
    f"{_PARTS}: steps_per_generation / gradient_accumulation_steps, such as 8 / 2 = 4": "steps_per_generation",
    "`learner.token_budget`, the tokens of a micro-batch: its number of sequences follows from their lengths":
        "micro_batch_size micro_train_batch_size ppo_micro_batch_size ppo_micro_batch_size_per_gpu gradient_accumulation_steps "
        "per_device_train_batch_size ppo_max_token_len_per_gpu max_tokens_per_gpu log_prob_micro_batch_size logprob_batch_size "
        "log_prob_micro_batch_size_per_gpu log_prob_max_token_len_per_gpu log_probs_max_tokens_per_gpu micro_rollout_batch_size "
        "micro_batch_size_per_gpu train_micro_batch_size train_mb_tokens max_tokens_per_mb",
    "`rollout.group_size`, the responses to a prompt":
        "num_generations n_samples_per_prompt rollout_n n num_generations_per_prompt num_return_sequences_in_group n_samples "
        "orchestrator.group_size train.group_size actor.group_size rollouts_per_example",
    "`rollout.max_new_tokens`, the tokens of a response":
        "max_response_length max_completion_length rollout_max_response_len generate_max_len response_length "
        "max_completion_tokens sampling.max_tokens gconfig.max_new_tokens generation.max_new_tokens actor.max_new_tokens "
        "actor_infer.generating_args.max_new_tokens max_resp_len",
    "`rollout.stop`, texts that stay at the end of the response": "stop_strings sampling_params.stop generation_kwargs.stop",
    "`rollout.stop`, the texts of these tokens; end tokens of the model itself belong into eos_token_id of its generation_config.json":
        "stop_token_ids rollout_stop_token_ids",
    "`model.path`, a Hugging Face folder on this disk":
        "model.name model_name model_name_or_path model_path hf_checkpoint pretrain actor_rollout_ref.model.path actor.path",
    "`critic.model.path`; without it the critic starts from the policy": "critic.model.path critic.model_name_or_path",
    "`steps`, the number of times that prompts are sampled and learned from; epochs are not counted":
        "max_steps total_training_steps num_train_epochs total_epochs num_rollout num_epoch num_episodes "
        "max_num_steps max_num_epochs total_train_epochs total_train_steps",
    "`layout.tp` of the learner and `rollout.tp` of a server":
        "tensor_model_parallel_size tensor_parallel_size",
    "`layout.tp`":
        "megatron.tensor_model_parallel_size megatron_cfg.tensor_model_parallel_size dtensor_cfg.tensor_parallel_size",
    "`rollout.tp`, the GPUs of a server":
        "rollout.tensor_model_parallel_size vllm_tensor_parallel_size rollout_num_gpus_per_engine vllm_cfg.tensor_parallel_size "
        "vllm.tensor_parallel_size inference.parallel.tp",
    "`layout` (its sizes dp, pp, tp, cp, ep are d, p, t, c, e), and for the servers `rollout.replicas`, d, and `rollout.tp`, t":
        "allocation_mode actor.backend rollout.backend",
    "`layout.cp`, the ranks that every sequence is split over":
        "context_parallel_size ulysses_sequence_parallel_size ring_attn_size trainer.model.cp",
    "`rollout.server_args={mem_fraction_static: 0.8}`":
        "gpu_memory_utilization vllm_gpu_memory_utilization sglang_mem_fraction_static mem_fraction_static",
    "`layout.pp`": "pipeline_model_parallel_size",
    "`layout.vpp`": "virtual_pipeline_model_parallel_size",
    "`layout.ep`": "expert_model_parallel_size expert_parallel_size trainer.model.ep",
    "`layout.sp`": "sequence_parallel",
    "`rollout.server_args`, the arguments of SGLang's servers":
        "enforce_eager engine_kwargs max_num_seqs max_num_batched_tokens enable_chunked_prefill kv_cache_dtype "
        "vllm_cfg.expert_parallel_size",
    "`task.train_path`, beside `task.type=jsonl`":
        "train_files prompt_data prompt_dataset train_dataset train_dataset.path train_data_path dataset dataset_name data",
    "`task.heldout_path`, beside `task.type=jsonl`; further files are `task.heldout_sets`":
        "val_files eval_prompt_data eval_dataset eval.dataset eval.env valid_dataset valid_dataset.path val_data_path",
    "`evaluation.every`, in steps":
        "test_freq eval_steps eval_interval eval_strategy eval.steps eval.interval val_period evaluator.freq_steps evaluator.freq_epochs",
    "`checkpoint.every`, in steps":
        "save_freq save_steps save_interval save_strategy save_period ckpt ckpt.interval saver.freq_steps saver.freq_epochs "
        "recover.freq_steps recover.freq_epochs",
    "`launch.runs_dir`, in which each run makes its own folder":
        "output_dir default_local_dir save_path save checkpoint_dir fileroot log_dir ckpt.path",
    "`reward={type: function, function: my_module:score}`": "reward_funcs custom_reward_function custom_rm_path",
    "`reward.type`, such as math_verify, code or function; DAPO's rewards are in configs/recipes/dapo.yaml":
        "rm_type reward_manager math_verify_impl",
    "`reward={type: weighted, parts: {right: {type: math_verify}, long: {type: overlong, buffer_tokens: 4096, weight: 0.5}}}`; where "
    "right and wrong are 1 and -1 there, as in verl's DAPO, the weight is half of the penalty's factor, since here they are 1 and 0":
        "overlong_buffer overlong_buffer_cfg overlong_buffer_len overlong_buffer_length reward_shaping overlong_reward_penalty "
        "overlong_tokens overlong_penalty_factor",
    "`reward={type: model, urls: [...]}`":
        "rm_url remote_rm_url remote_url reward_model.enable reward_model.model.path reward.model_name_or_path reward_pretrain",
    "`kl.coefficient`, with `kl.place` loss or reward":
        "kl_coef init_kl_coef init_coef beta use_kl_loss use_kl_in_reward kl_loss_coef opd_kl_coef algo.kl.use_loss "
        "reference_policy_kl_penalty",
    "`kl.coefficient`, with `kl.place` reward": "kl_ctl add_token_level_kl",
    "`kl.estimator`": "kl_loss_type kl_estimator algo.kl.estimator reference_policy_kl_type",
    "`kl.estimator`, with `kl.place=reward`": "kl_penalty",
    "`kl.controller.type`, fixed or adaptive": "kl_ctrl.type use_adaptive_kl",
    "`kl.controller.target`": "target_kl kl_target",
    "`kl.controller.horizon`": "kl_ctrl.horizon kl_horizon",
    "`kl.model.path`, a Hugging Face folder; without it the reference is the model at the start of the run":
        "ref_load opd_teacher_load teacher_model_name_or_path ref.model_name_or_path ref.path",
    "`kl={coefficient: 1.0, estimator: k2, model: {path: TEACHER}}`": "use_opd opd_type distillation",
    "`advantage.normalize_by_std`, of the rewards of a group":
        "scale_rewards norm_adv_by_std_in_grpo disable_grpo_std_normalization no_std_norm normalize_rewards norm_std_type",
    "`advantage.type=rloo`, or grpo, whose deviation is that of the whole group": "use_leave_one_out_baseline",
    "`advantage.whiten` of `advantage.type=gae`; reinforce_pp and reinforce_pp_baseline always whiten":
        "normalize_advantages whiten_advantages",
    "`advantage.type`: by the mean and the deviation of the group it is grpo": "reward_norm",
    "`advantage.type=reinforce_pp_baseline`, which whitens over the step; grpo does not": "adv_norm",
    "`advantage.lam`, beside `advantage.type=gae`": "lambd algorithm.lam gae_lambda",
    "`advantage.gamma`, beside `advantage.type`, gae or reinforce_pp": "algorithm.gamma algo.advantage.gamma discount",
    "`advantage.type`; only gae has a critic": "critic.enable",
    "`advantage.type`; normalize_then_sum is gdpo, sum_then_normalize grpo": "multi_objective_aggregation",
    "`advantage.type`": "adv_estimator advantage_estimator advantage.estimator",
    "`advantage.type` and `objective.type`": "algorithm",
    "`objective.type`": "loss_mode policy_loss_type use_cispo",
    "`aggregation.type`": "loss_agg_mode",
    "`aggregation.type`, token_mean or sequence_mean_token_mean": "calculate_per_token_loss token_level_loss use_token_level_loss",
    "`aggregation.constant`": "loss_scale_factor",
    "`aggregation.type` and `objective.type`; in verl's rollout_correction, a key of `correction={verl: {...}}`": "loss_type",
    "`rollout.dynamic_sampling={type: resample}`, which samples further groups instead of those that it leaves out":
        "filter_groups filter_groups.enable dynamic_sampling_filter_path dynamic_filtering dynamic_filtering_enable "
        "dynamic_filtering_range use_dynamic_sampling actor.dynamic_sampling dynamic_bs online_difficulty_filtering",
    "`rollout.dynamic_sampling.compare`, correct (verl's acc) or reward": "filter_groups.metric",
    "`rollout.dynamic_sampling.max_rounds`, after which groups without signal are learned from":
        "max_num_gen_batches dynamic_sampling_max_gen_batches",
    "`rollout.max_staleness`, by how many versions a token may be older than the weights that it trains":
        "partial_rollout partial_rollout_enable staleness_threshold update_weights_interval async_enable "
        "max_off_policy_threshold max_off_policy_steps max_head_offpolicyness max_trajectory_age_steps "
        "async_generation_ratio async_queue_size async_grpo async_training max_async_level queue_size",
    "`launch.placement`, auto, separate or colocated, which shares the GPUs of all nodes":
        "colocate vllm_mode colocate_all_models colocate_all hybrid_engine colocated",
    "`launch.nodes.learner` and `launch.nodes.rollout`": "nnodes actor_num_nodes num_nodes n_nodes num_train_nodes num_infer_nodes",
    "`launch.nodes.gpus_per_node`": "n_gpus_per_node actor_num_gpus_per_node num_gpus_per_node gpus_per_node",
    "`layout`, whose sizes multiply to the learner's GPUs": "num_train_gpus",
    "`tracking.wandb={}` or `tracking.tensorboard=true`; MLflow is always on":
        "logger report_to use_wandb wandb_enabled tensorboard_enabled mlflow_enabled",
    "`tracking.experiment`": "mlflow.experiment_name",
    "`tracking.wandb.entity`": "wandb_team wandb_entity",
    "`evaluation.at_ends`": "val_before_train eval_on_start skip_eval_before_train val_at_start val_at_end",
    "`evaluation.max_prompts`": "val_max_samples max_val_samples",
    "`evaluation.samples_per_prompt`":
        "n_samples_per_eval_prompt num_generations_eval val_kwargs.n eval.n_samples_per_prompt val_num_generations_per_prompt val_n_sample "
        "log_passrate",
    "`evaluation.greedy`, beside the sampled responses": "val_kwargs.do_sample val_greedy",
    "`evaluation.temperature`": "eval_temperature val_kwargs.temperature eval.temperature eval.sampling.temperature",
    "`evaluation.top_p`": "eval_top_p val_kwargs.top_p eval.sampling.top_p",
    "`evaluation.top_k`": "eval_top_k val_kwargs.top_k eval.sampling.top_k",
    "`evaluation.max_new_tokens`": "eval_max_response_len eval.sampling.max_completion_tokens eval.sampling.max_tokens",
    "`learner.freeze_router`": "freeze_moe_router moe_router_freeze_gate freeze_e_score_correction_bias",
    "`rollout.temperature`": "actor.temperature",
    "`learner.optimizer.schedule`, whose warm-up is `learner.optimizer.warmup_steps`": "policy.scheduler",
    "`correction=decoupled_token_is`, a weight per token, truncated at 2": "use_tis tis_clip tis_imp_ratio_cap",
    "`correction={weight: {bound: clip, lower: 0.5, upper: 2}}`, if the weight has a lower bound too": "tis_clip_low",
    "`correction`; OpenRLHF's tis with its default bounds is `correction={weight: {bound: clip, lower: 0.5, upper: 5}}`, its icepop "
    "`correction={weight: {bound: mask, lower: 0.5, upper: 5}}`":
        "is_correction_enable is_correction_type is_correction_threshold",
    "`correction`; without truncation it is `correction={weight: {bound: none}}`, with tis `correction={weight: {upper: 2}}`, with "
    "icepop `correction={weight: {bound: mask, lower: 0.5, upper: 2}}`, each with NeMo-RL's own bounds":
        "use_importance_sampling_correction truncated_importance_sampling_type truncated_importance_sampling_ratio "
        "truncated_importance_sampling_ratio_min",
    "`correction`; AReaL's ratio with upper 5 is `correction={weight: {bound: mask, lower: 0, upper: 5}}`":
        "behave_imp_weight_cap behav_imp_weight_cap behave_imp_weight_mode rejection_sampling",
    "`correction.mode`, decoupled": "use_decoupled_loss",
    "`learner.old_logprobs`, when_needed or always": "recompute_logprob prox_logp_method",
    "`correction.weight.level`": "tis_level mis_level",
    "`correction.weight.bound`": "tis_mode mis_mode",
    "`correction.weight.lower`": "tis_lower_bound mis_lower_bound",
    "`correction.weight.upper`": "tis_upper_bound mis_upper_bound",
    "`correction.weight.normalise`": "tis_batch_normalize mis_batch_normalize",
    "`correction.reject`, a list of rules": "use_rs rs_level rs_lower_bound rs_upper_bound",
    "`correction.veto`": "rs_veto_threshold tis_veto_threshold mis_veto_threshold",
    "`correction`, a preset or a block; TRL's default is `correction={weight: {level: sequence, bound: mask, lower: 0, upper: 3}}`":
        "vllm_importance_sampling_correction vllm_importance_sampling_mode vllm_importance_sampling_cap "
        "vllm_importance_sampling_clip_max vllm_importance_sampling_clip_min",
    "`correction.mode`, bypass": "use_rollout_logprobs",
    "`correction.off_policy_mask`, in nats per token": "off_policy_mask_threshold",
    "`correction.off_policy_mask`, in nats per token from the rollout's log-probs; slime counts from the learner's before the update, "
    "without the gap of the engines, so its default of 1e-4 is too small here":
        "use_opsm opsm_delta",
    "`kl.unbiased`": "use_unbiased_kl use_bias_correction_kl",
    "`correction.weight`, with level function": "custom_tis_function_path",
    "`environment={type: tokens}`, your own class": "custom_generate_function_path",
    "`environment`, of type tokens, chat, agent or openenv":
        "rollout_function_path rollout_func environment_factory agent_func_path tool_config_path interaction_config_path "
        "agent_loop_config_path multi_turn",
    "`environment`, of type agent for a program of verifiers": "orchestrator.env train.env train.source",
    "`advantage.credit`, turn, which adds the rewards of later turns without a discount": "turn_discount",
    "`environment.max_turns`": "max_rollout_turns max_turns max_assistant_turns",
    "`environment.tool_call_parser`, beside `environment.type` chat or agent":
        "tool_call_parser sglang_tool_call_parser enable_auto_tool_choice",
    "`objective={type: function, function: my_module:objective}`": "custom_loss_function_path",
    "`advantage={type: function, function: my_module:advantage}`": "custom_advantage_function_path custom_reward_post_process_path",
    "`learner.optimizer.lr`": "learning_rate actor_learning_rate adam.lr",
    "`critic.optimizer.lr`": "critic_learning_rate",
    "`learner.optimizer.offload`": "optimizer_offload optimizer_cpu_offload optim_cpu_offload adam_offload",
    "`critic.optimizer.offload`": "critic.fsdp_config.optimizer_offload critic.megatron.optimizer_offload",
    "`learner.routing=rollout`":
        "enable_rollout_routing_replay use_rollout_routing_replay enable_router_replay enable_return_routed_experts",
    "`learner.routing=old`": "use_routing_replay",
    "`learner.routing`, old (R2) or rollout (R3)": "router_replay",
    "`learner.lora.rank`; without `learner.lora` every weight is trained": "lora_rank lora_r lora.rank lora_cfg.dim peft.dim",
    "`learner.lora.alpha`": "lora_alpha lora.alpha lora_cfg.alpha peft.alpha",
    "`learner.lora.targets`, of qkv (q_proj, k_proj, v_proj), proj (o_proj), fc1 (gate_proj, up_proj) and fc2 (down_proj)":
        "target_modules lora_target_modules",
    "`learner.lora`": "peft_config",
    "`entropy.coefficient`": "entropy_coeff entropy_coef entropy_loss_coef",
    "`objective.type`: clipped has a ratio per token, gspo one per sequence": "importance_sampling_level sequence_level_importance_ratios",
    "`objective.clip_low` and `objective.clip_high`": "clip_ratio eps_clip epsilon eps_clip_low_high pg_clip",
    "`objective.clip_low`": "clip_ratio_low eps_clip_low pg_clip_low ratio_clip_min",
    "`objective.clip_high`": "clip_ratio_high epsilon_high eps_clip_high eps_clip_higher pg_clip_high ratio_clip_max",
    "`objective.dual_clip`": "clip_ratio_c eps_clip_c delta c_clip ratio_clip_c",
    "`objective.max_decrease`, beside `objective.type=dppo`": "dppo_mask_low",
    "`objective.max_increase`, beside `objective.type=dppo`": "dppo_mask_high",
    "`objective.type=policy_gradient`": "disable_ppo_ratio",
    "`objective.dual_clip`; ROLL's value is 1 + 2 pg_clip, such as 1.4": "dual_clip_loss",
    "`objective.temperature_positive`, beside `objective.type=sapo`": "sapo_temperature_pos tau_pos",
    "`objective.temperature_negative`, beside `objective.type=sapo`": "sapo_temperature_neg tau_neg",
    "`critic.value_clip`": "cliprange_value value_clip",
    "`model.dtype` of the learner and `rollout.dtype` of the servers": "bf16 fp16 torch_dtype param_dtype policy.precision",
    "`model.dtype`": "actor.dtype",
    "`rollout.dtype`": "vllm_cfg.precision sglang.dtype vllm.dtype",
    "`learner.recompute`, none or full":
        "gradient_checkpointing enable_gradient_checkpointing gradient_checkpointing_enable recompute_granularity "
        "recompute_method recompute_num_layers activation_checkpointing model.ac",
    "`checkpoint.keep`": "save_total_limit max_actor_ckpt_to_keep max_ckpt_num max_num max_ckpt_to_keep keep_top_k ckpt.keep_last",
    "`checkpoint.keep_best`, the metric by which the best checkpoint is kept too": "metric_name metric_for_best_model",
    "`tracking.sample_groups`, the groups of a step whose samples are kept":
        "log_completions rollout_data_dir save_debug_rollout_data dump_details",
    "`tracking.evaluation_problems`, the held-out problems whose samples are kept":
        "log_val_generations validation_data_dir num_val_samples_to_print",
    "`task.prompt_field`, beside `task.type=jsonl`": "prompt_key input_key",
    "`model.chat_template_kwargs`, such as {enable_thinking: false}": "chat_template_kwargs apply_chat_template_kwargs enable_thinking",
    "`task.answer_field`, beside `task.type=jsonl`": "label_key output_key",
    "`task.system_prompt`, a text": "system_prompt_file",
    "`task.too_long_prompts`, refuse or leave_out": "filter_overlong_prompts data.truncation",
    "`reward.field`, beside `reward.type=by_field`": "reward_fn_key",
    "`task.tools_field`, beside `task.type=jsonl`": "tool_key",
    "`sampler.type`, shuffle or sequential": "data.shuffle train_dataset.shuffle shuffle_dataset rollout_shuffle",
    "`reward={type: weighted, parts: {...}}`": "reward_weights gdpo_reward_keys gdpo_reward_weights",
    "`learner.truncated_responses`, mask": "mask_truncated_completions overlong_filtering",
    "`learner.truncated_responses`, mask; ROLL's also masks a response that ends by itself at exactly the limit": "max_len_mask",
    "`learner.truncated_responses`, mask; AReaL's code trains on such a response with a reward of 0, as your own reward function can by "
    "finish_reason":
        "mask_no_eos_with_zero",
    "`reward.weight`, a factor; NeMo-RL's clamp and shift are a line of your own reward function": "reward_scaling",
    "a line of your own reward function (`reward.type`, function) or, for a reward of any kind, of your own advantage "
    "(`advantage.type`, function), which gets the rewards":
        "reward_clip reward_bias",
    "a line of your own advantage (`advantage.type`, function)": "advantage_clip advantage_clip_low advantage_clip_high",
    "your own advantage (`advantage.type`, function), which returns the rewards": "disable_rewards_normalization",
    "`rollout.replicas`, the number of servers, each of `rollout.tp` GPUs":
        "vllm_num_engines num_engines rollout_num_gpus rollout.data_parallel_size num_infer_gpus num_infer_replicas",
    "`rollout.max_concurrency`, of all servers": "sglang_server_concurrency max_concurrent_rollouts max_inflight_rollouts initial_inflight",
    "`rollout.max_server_restarts`": "use_fault_tolerance",
    "`rollout.router`": "use_slime_router sglang_router_policy",
    "`rollout.sglang_plugin`": "sglang_plugin",  # otherwise it would be taken for a flag of slime's
    "`rollout.weight_transfer`": "weight_update_mode weight_broadcast.type update_weight_transfer_mode",
    "`critic.warmup_steps`": "critic_warmup num_critic_only_steps freezing_steps",
    "`resume`, the folder of a run": "resume_mode resume_from_path resume_from_checkpoint load resume_step recover.mode",
    "`name`": "experiment_name run_name exp_name trial_name wandb.name",
    "extends, a list of Tandem's files; the values of the other system's file belong here too": "defaults",
    "`tracking.wandb.project`; `tracking.experiment` for MLflow": "project_name wandb_project wandb.project",
    "`seed`": "data.seed data_loader_seed rollout_seed random_seed grpo.seed",
    "`correction: {verl: {...}}`, with verl's keys": "rollout_correction",
}) | {
    **{
        name: f"`{field}`"
        for field in ("rollout.temperature", "rollout.top_p", "rollout.top_k", "rollout.min_p", "rollout.stop", "rollout.dtype")
        for name in (field, field.replace(".", "_"), *(f"{block}.{field.split('.')[1]}" for block in _SAMPLING))
    },
    **_optimizer("learner.optimizer", before=(
        "", "optim.", "optimizer.", "optimizer.kwargs.", "training_args.", "actor.optim.", "actor.adam.", "actor.optimizer.",
    )),
    **_optimizer("critic.optimizer", before=("critic.", "critic.optim.", "critic.adam.", "critic.optimizer.")),
    **dict.fromkeys([key for key in VERL_KEYS if key != "loss_type"], "a key of `correction: {verl: {...}}`"),
    **dict.fromkeys([*ROLL_KEYS, *NEW_ROLL_KEYS], "a key of `correction: {roll: {...}}`"),
}  # fmt: skip
"""The values continue the sentence "here it is"."""

WITHOUT_COUNTERPART = _by_name({
    "a prompt may be as long as `rollout.max_new_tokens` and `learner.token_budget` leave room for":
        "max_prompt_length rollout_max_prompt_len prompt_max_len rollout_max_context_len max_model_len vllm_max_model_length "
        "prompt_length max_total_sequence_length seq_len data.max_len max_input_seq_length train_dataset.max_length gconfig.max_tokens",
    "`layout.ep` splits the experts, and no expert is split": "expert_tensor_parallel_size",
    "the learner is Megatron-Core: `layout.tp` and `layout.pp` split the weights, `learner.optimizer.distributed` the optimizer's state":
        "zero_stage fsdp_size reshard_after_forward",
    "the learner is Megatron-Core": "actor.strategy ref.strategy critic.strategy train_backend",
    "what leaves the GPU follows from `launch.placement`; colocated takes turns":
        "param_offload grad_offload offload_train free_cache_engine vllm_enable_sleep_mode cpu_offload enable_offload ac_offloading",
    "`learner.optimizer.offload` moves the whole state to the device for each step, and waits for it": "overlap_cpu_optimizer_d2h_h2d",
    "the reference of the KL stays what it is at the start": "ref_update_interval sync_ref_model",
    "a batch is learned from once, in `learner.minibatches` parts": "ppo_epochs num_iterations max_epochs",
    "the schedule ends with the run, after `steps` steps": "optim.total_training_steps lr_decay_iters",
    "servers send the log-prob of every token that they sample": "calculate_log_probs",
    "every step measures the gap of the engines": "get_mismatch_metrics",
    "`learner.lora` is plain LoRA, without dropout": "lora_dropout lora.dropout use_dora use_rslora",
    "sequences are packed without padding, up to `learner.token_budget`":
        "use_remove_padding use_dynamic_bsz use_dynamic_batch_size log_prob_use_dynamic_bsz dynamic_batch_enable packing_samples "
        "sequence_packing dynamic_batching make_sequence_length_divisible_by",
    "the learner's ranks always get even shares of the tokens": "balance_batch balance_data",
    "a minibatch has consecutive prompts of the batch, in their order": "actor.shuffle critic.shuffle",
    "every step writes its line": "logging_steps log_interval",
    "the servers are SGLang's": "use_vllm rollout.name policy.generation_batch_size generation.backend",
    "Tandem starts the servers, and a router if `rollout.router` asks for one": "sglang_router_ip sglang_router_port",
    "requests to the servers are always asynchronous": "rollout.mode",
    "tokenizer and chat template are those of `model.path`":
        "tokenizer_path data.tokenizer tokenizer.name chat_template custom_chat_template",
    "there is no Ray": "ray_kwargs ray_init ray_wait_register_center_timeout",
    "an evaluation takes all held-out prompts, or `evaluation.max_prompts` of them": "val_batch_size valid_dataset.batch_size",
    "the optimizer is AdamW": "optimizer optim.optimizer optim.optimizer_impl optim.type optimizer.type optimizer.name",
    "every token of a response is learned from": "top_entropy_quantile",
    "a response keeps all its tokens, also those of a text in `rollout.stop`": "include_stop_str_in_output no_stop_trim",
    "samples follow the softmax that the learner computes, without a penalty": "repetition_penalty",
    "the model is that of the config.json in `model.path`, where you may change it":
        "num_layers hidden_size ffn_hidden_size num_attention_heads num_query_groups group_query_attention kv_channels vocab_size "
        "rotary_base rotary_percent norm_epsilon normalization swiglu qk_layernorm disable_bias_linear add_qkv_bias "
        "position_embedding_type use_rotary_position_embeddings untie_embeddings_and_output_weights num_experts moe_layer_freq "
        "moe_ffn_hidden_size moe_router_topk moe_router_score_function moe_shared_expert_intermediate_size spec "
        "make_vocab_size_divisible_by override_config hf_config_overrides max_position_embeddings seq_length",
    "the pipeline's stages have the same number of layers, the last one may have fewer":
        "decoder_first_pipeline_num_layers decoder_last_pipeline_num_layers num_layers_in_first_pipeline_stage "
        "num_layers_in_last_pipeline_stage",
    "no loss and no bias balances the experts; a router is trained by the policy's loss, or frozen by `learner.freeze_router`":
        "moe_router_load_balancing_type moe_aux_loss_coeff moe_router_bias_update_rate router_aux_loss_coef",
    "replacements are sampled one by one, as soon as a group turns out to have no signal (`rollout.dynamic_sampling`)":
        "gen_batch_size over_sampling_batch_size oversampling_factor batch_multiplier",
    "no layer has dropout": "attention_dropout hidden_dropout embd_pdrop resid_pdrop disable_dropout",
    "a reward function returns a number, and parts beside it": "reward_key eval_reward_key",
    "a reward function scores one response; `advantage` compares those of a group": "group_rm",
    "a reward function gets the whole record, as row": "metadata_key",
    "prompts are those of the data, behind `task.system_prompt`": "prompt_file",
    "every token that the policy sampled is learned from": "loss_mask_type",
    "W&B reads its key, group and mode from the variables WANDB_API_KEY, WANDB_RUN_GROUP and WANDB_MODE":
        "wandb_key wandb_host wandb_group wandb.group wandb_mode wandb.mode",
    "metrics go to MLflow, W&B and TensorBoard (`tracking`)": "swanlab_enabled use_swanlab swanlab.mode trackio.mode",
    "a run that is asked to stop writes a checkpoint first": "checkpoint_must_save_by",
    "`model.path` is a Hugging Face folder, which is not converted": "megatron_to_hf_mode converter_type",
    "the loss has no such term": "kl_tau",
    "Tandem sets Megatron-Core's kernels and precision itself":
        "attention_backend attention_softmax_in_fp32 accumulate_allreduce_grads_in_fp32 qkv_format params_dtype pipeline_dtype "
        "override_transformer_config moe_token_dispatcher_type moe_permute_fusion moe_router_dtype moe_grouped_gemm moe_enable_deepep "
        "use_mbridge vanilla_mbridge use_dist_checkpointing use_precision_aware_optimizer use_torch_compile use_fused_kernels",
    "the learner runs no code from a model's folder": "trust_remote_code",
    "images are not read": "image_key data.image_key multimodal_keys",
})  # fmt: skip
"""The values continue the sentence "it has no counterpart: "."""

OTHER_BLOCKS = {
    "data", "algorithm", "actor_rollout_ref", "trainer", "reward_model", "filter_groups", "optim", "optimizer", "train_dataset",
    "valid_dataset", "train", "checkpointing", "logger", "saver", "evaluator", "ckpt",
}  # fmt: skip
"""Blocks of verl, AReaL, OpenRLHF, NeMo-RL and prime-rl. Their keys are answered even if a name is close to one of
ours."""
