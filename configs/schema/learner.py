"""The updates of the Megatron-Core learner: batches, optimizer, schedule, checkpoints."""

from collections.abc import Iterator
from typing import Annotated, Literal

from configs.errors import Contradiction
from configs.schema.base import (
    Count,
    LearningRate,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Schema,
    Tokens,
    at_most,
)


class OptimizerConfig(Schema):
    """AdamW of Megatron-Core with a linear warm-up."""

    lr: LearningRate = 1e-6
    """Learning rate, after the warm-up."""
    min_lr: NonNegativeFloat = 0.0
    """Learning rate that a schedule which decays would reach after the last optimizer step; that step's own is above it."""
    schedule: Literal["constant", "cosine", "linear"] = "constant"
    """Decay from ``lr`` to ``min_lr`` over the run: none, along a cosine, or along a line."""
    warmup_steps: NonNegativeInt = 0
    """Length of the warm-up, in optimizer steps (minibatches). The decay counts them too, and ends with the run."""
    betas: tuple[float, float] = (0.9, 0.95)
    """Decay rates of AdamW's two moments."""
    eps: PositiveFloat = 1e-8
    """Added to the root of AdamW's second moment."""
    weight_decay: Annotated[NonNegativeFloat, at_most(100, "it is a share of each weight, times lr")] = 0.0
    """AdamW's weight decay, decoupled from the gradient, only of matrices: biases and the weights of norms do not decay."""
    clip_grad: PositiveFloat = 1.0
    """Largest norm of the whole gradient; a gradient with a larger norm is scaled down to this norm."""
    distributed: bool = True
    """Shard the optimizer's state over data-parallel ranks (Megatron's distributed optimizer)."""
    offload: bool = False
    """Keep AdamW's state in host memory, and on the device only during an optimizer step or a checkpoint. The state has 12
    bytes for each parameter of a 16-bit model, 8 in float32. No activations are there during a step, so the two no longer
    add up. Each step moves the state to the device and back."""

    def _contradictions(self) -> Iterator[Contradiction]:
        if self.min_lr > self.lr:
            yield Contradiction(("min_lr", "lr"), f"min_lr={self.min_lr} is above lr={self.lr}")
        elif self.min_lr and self.schedule == "constant":
            yield Contradiction(
                ("min_lr", "schedule"),
                f"min_lr={self.min_lr} has no effect: schedule=constant does not decay",
                "remove it, or set schedule to cosine or linear",
            )
        if not all(0 <= b < 1 for b in self.betas):
            yield Contradiction(("betas",), f"betas={self.betas} must lie in [0, 1)")


LoraTarget = Literal["qkv", "proj", "fc1", "fc2"]


class LoraConfig(Schema):
    """Low-rank adapters (LoRA): of the targeted matrices W the learner trains B and A of W + alpha / rank B A. Everything
    else is frozen, without gradients or optimizer state. Servers get merged weights."""

    rank: Count = 16
    """Rows of A and columns of B, for each targeted matrix."""
    alpha: PositiveFloat = 32.0
    """The adapters' product is multiplied by alpha / rank."""
    targets: tuple[LoraTarget, ...] = ("qkv", "proj", "fc1", "fc2")
    """The matrices of each layer that get adapters: qkv (queries, keys and values, which share A), proj (the output
    projection of attention), fc1 (gate and up, which share A) and fc2 (down). In a model with experts only qkv and proj.
    """
    forward: Literal["factored", "merged"] = "merged"
    """How the learner computes the product with a targeted matrix. merged: with the weight that the servers
    get, W + alpha / rank B A rounded to rollout.dtype; the gradient ignores the rounding (straight-through).
    factored: W x + alpha / rank B (A x), which rounds differently from the servers, and saves the time of
    merging."""

    def _contradictions(self) -> Iterator[Contradiction]:
        if not self.targets:
            yield Contradiction(
                ("targets",), "targets=[] leaves nothing to train", "name one or more of qkv, proj, fc1, fc2"
            )
        if len(set(self.targets)) < len(self.targets):
            yield Contradiction(
                ("targets",), f"targets={list(self.targets)} names a matrix twice", "name each once"
            )


class LearnerConfig(Schema):
    """The learner's updates of the policy."""

    minibatches: Count = 1
    """Optimizer steps per rollout batch; prompts_per_step must divide by it."""
    old_logprobs: Literal["when_needed", "always"] = "when_needed"
    """Whether a forward pass before the update computes the log-probs of ``old``. when_needed skips it if the
    update's own pass gives them: with one minibatch current is old, unless something needs old before the
    update."""
    routing: Literal["own", "rollout", "old"] = "own"
    """The experts of each token in the learner, for models with experts. own: the learner's router chooses
    them in each pass. rollout: the server chose them when it sampled (routing replay, R3). If the server
    computed the prompt of a turn again, after an interruption, the turn keeps the learner's own choice. old:
    the learner's router chose them in the pass before the update, which computes ``old`` (R2); it needs
    several minibatches. Replayed experts are weighted by the learner's own probabilities. ``ref`` replays
    them too; a critic chooses its own."""
    token_budget: Tokens = 16384
    """Most tokens of one packed micro-batch; a longer single sequence is an error. A micro-batch is on one rank, or
    split over the layout.cp ranks of context parallelism."""
    share_prompts: bool = True
    """Compute a prompt once for all its samples in a micro-batch. ``token_budget`` then counts it once, and an eighth for
    each sample, whose attention copies the prompt's keys and values. Values and gradients are those of whole sequences,
    up to rounding. It has no effect with layout.cp above 1, model.numerics=aligned, replayed experts, or if the policy, the
    critic or kl.model has recurrent layers or is computed by Transformer Engine: there each sample is computed whole."""
    skip_zero_gradients: bool = True
    """Run no backward pass for groups whose siblings all have the same reward, nor for masked responses. If
    advantages compare siblings, the gradient of these groups is zero. They get their own micro-batches with a forward pass
    alone, which their metrics need. It has no effect if the loss has other terms (KL in the loss, entropy, an
    objective of your own), with layout.pp above 1, and if such groups do learn something
    (reinforce_pp_baseline, which whitens over the step; gdpo, whose parts may differ; KL in the reward)."""
    truncated_responses: Literal["train", "mask"] = "train"
    """Whether the policy learns from responses that a limit of tokens cut off: ``rollout.max_new_tokens`` the
    last turn, or ``environment.max_tokens`` the episode. A smaller limit that the environment or agent gave the last
    turn counts too. train: as from all others, by their reward. mask: none of their tokens enters the loss, with its
    KL and entropy, the critic's loss, or a denominator of these (DAPO's overlong filtering, arXiv 2503.14476). Their
    rewards still count in their group's baseline and in dynamic sampling, as in TRL, NeMo-RL, ROLL and SkyRL; opo
    weights a reward by the tokens in the loss, here none. TRL's means over responses (its grpo and dr_grpo) divide by
    the masked ones too. A minibatch whose responses are all masked has a gradient of zero, as one of equal rewards has;
    the optimizer still steps. Gap of the engines and advantages are measured without them."""
    logprob_chunk_tokens: Tokens = 1024
    """Tokens whose float32 logits exist at once."""
    optimizer: OptimizerConfig = OptimizerConfig()
    lora: LoraConfig | None = None
    """None: every weight is trained. With adapters the reference policy of the KL is the model without them, which takes
    no memory. Learning rates are usually ten times those of full training."""
    freeze_router: bool = False
    """For models with experts: the weights of the policy's routers, and their biases, stay as they are, without gradients or
    optimizer state. Experts and everything else are trained, also the gate of a shared expert. With ``lora`` they are
    frozen in any case. A critic trains its own routers."""
    recompute: Literal["none", "full"] = "none"
    """Activation recomputation of the transformer layers."""


class CheckpointConfig(Schema):
    """When a run writes checkpoints from which it can be resumed."""

    every: NonNegativeInt = 0
    """Steps between resumable checkpoints; 0 writes none."""
    keep: PositiveInt = 2
    """Number of the newest checkpoints that stay on disk."""
    keep_best: (
        Literal["eval/accuracy", "eval/reward_mean", "eval/greedy/accuracy", "eval/greedy/reward_mean"] | None
    ) = None
    """The step with the best value of this evaluation metric also gets a checkpoint, which is kept besides
    the newest ones: ``tandem export RUN OUT --best``. Of equal steps the first."""
