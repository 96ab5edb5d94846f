"""The report's pictures and their panels, as data. ``drawing.py`` draws them.

A name with a star stands for all recorded metrics of that entry of the table. A star in the label becomes the part of
the name that the star stands for. ``1 - NAME`` is 1 minus the metric. Lines, panels and pictures without a recorded
metric are left out.
"""

from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass, field

from trainer.metric_names import entry_of, known

MEAN, MAX = "abs_prob_mean", "abs_prob_max"
"""Metrics of a bucket."""


@dataclass(frozen=True, slots=True)
class Lines:
    """Metrics in one unit over the steps."""

    title: str
    metrics: Mapping[str, str]
    """Name to label; all of one unit."""
    _: KW_ONLY
    log: bool = False
    """Log scale if the values are positive and span a decade; linear around zero if some are not positive."""
    bounds: tuple[float | None, float | None] = (None, None)
    sparse: bool = False
    """Shares measured at few steps: marked points, no smoothing."""
    line: str | None = None
    """The field of the config whose value is a horizontal line."""
    alarm: str | None = None
    """Draw the level of this alarm if it is in view."""
    alarm_of: str | None = None
    """Label of the line that the alarm judges, if the panel has others."""
    idle: float | None = None
    """The panel is left out if all values are this: nothing happened, and a note says so."""
    idle_of: Mapping[str, float] = field(default_factory=dict)
    """By the metric's name, its own value of ``idle``."""
    may_lack: tuple[str, ...] = ()
    """Metrics that not every run has, so their absence gets no note."""
    noise: float = 0.0
    """The panel is also left out if all values are nearer than this to ``idle`` (or to 0): that is rounding."""

    @property
    def unit(self) -> str:
        (unit,) = {
            f"1 - {entry_of(name[4:]).unit}" if name.startswith("1 - ") else entry_of(name).unit
            for name in self.metrics
        }
        return unit


@dataclass(frozen=True, slots=True)
class Shares:
    """The bins of a distribution (``PREFIX/le_EDGE``, ``PREFIX/over_EDGE``), stacked over the steps. The panel is left
    out if all is in the first bin at all steps."""

    title: str
    prefix: str

    @property
    def unit(self) -> str:
        return entry_of(f"{self.prefix}/*").unit


@dataclass(frozen=True, slots=True)
class Buckets:
    """Bars by bucket (``PREFIX/le_EDGE/METRIC``), over the last steps: the mean of ``MEAN`` and the maximum of ``MAX``."""

    title: str
    prefix: str
    axis: str
    """The quantity of the buckets, and its unit."""
    noise: float = 0.0
    """The panel is left out if no maximum reaches this."""

    @property
    def unit(self) -> str:
        return entry_of(f"{self.prefix}/*/{MEAN}").unit


Panel = Lines | Shares | Buckets


@dataclass(frozen=True, slots=True, kw_only=True)
class Picture:
    name: str
    title: str
    about: str
    panels: tuple[Panel, ...]
    optional: bool = False
    """Not every run has it, so its absence gets no note."""

    def __post_init__(self) -> None:
        """Raises ValueError for a name that is no metric, and for a panel of two units."""
        for panel in self.panels:
            assert panel.unit
            if isinstance(panel, Buckets):
                known(f"{panel.prefix}/*/{MAX}")


ROUNDING = 1e-5
"""Divergences below this are float32's rounding of log-probs, far below any level or bound."""
ROUNDING_OF_EXTREMES = 1e-4
"""The same for the greatest of thousands of tokens, or of their weights."""

PICTURES = (
    Picture(
        name="reward",
        title="Reward and held-out accuracy",
        about="Mean reward of the responses that each step trains on, and the importance-weighted estimate of the learner's own reward. "
        "If they differ, the first one misleads. With dynamic sampling both cover only selected groups; the mean "
        "before selection is the policy's own. Accuracy is on problems that are never trained on.",
        panels=(
            Lines(
                "Reward",
                {
                    "reward/mean": "trained on",
                    "reward/importance_weighted": "importance-weighted",
                    "reward/before_selection": "before selection",
                },
                may_lack=("reward/before_selection",),
            ),
            Lines(
                "Held-out accuracy",
                {"eval/accuracy": "accuracy", "eval/set/*/accuracy": "*", "eval/source/*/accuracy": "*"},
                sparse=True,
                bounds=(0, None),
            ),
        ),
    ),
    Picture(
        name="reward_parts",
        title="Parts of the reward, and groups",
        about="Means of the parts of the reward, over the responses that have them; groups whose siblings all score the same, which carry "
        "no signal; and the groups that dynamic sampling sampled again.",
        panels=(
            Lines("Parts of the reward", {"reward/part/*": "*"}),
            Lines(
                "Groups without signal",
                {
                    "groups/no_signal_fraction": "trained on",
                    "groups/no_signal_before_selection": "before selection",
                },
                bounds=(0, 1),
                idle=0,
            ),
            Lines(
                "Dynamic sampling",
                {
                    "sampling/resampled_groups": "sampled again",
                    "sampling/filled_groups": "filled without signal",
                },
                bounds=(0, None),
                idle=0,
            ),
        ),
        optional=True,
    ),
    Picture(
        name="mismatch",
        title="Mismatch of the two engines",
        about="Δp = |p_rollout - p_learner| of a sampled token: the distance of SGLang and learner on the same token. Layouts and "
        "response length hardly change the mean Δp, but they change the greatest Δp of a response.",
        panels=(
            Lines(
                "Δp of responses",
                {
                    "mismatch/abs_prob_max": "max over all tokens",
                    "mismatch/response_abs_prob_max_mean": "max of a response, mean",
                    "mismatch/response_abs_prob_mean_max": "mean of a response, max",
                    "mismatch/abs_prob_mean": "mean over all tokens",
                },
                log=True,
            ),
            Lines(
                "Responses with a Δp over 0.5",
                {"mismatch/response_abs_prob_over": "share"},
                bounds=(0, None),
                alarm="response_abs_prob_over_max",
                idle=0,
            ),
            Lines(
                "1 - Pearson's r of the probabilities",
                {"1 - mismatch/prob_pearson": "1 - r"},
                log=True,
                noise=ROUNDING,
            ),
        ),
    ),
    Picture(
        name="mismatch_where",
        title="Where the mismatch is",
        about="Responses by their greatest Δp, and Δp by length of the response and by position in it (mean over the last 10 steps of the "
        "means, and their maximum). High bars at late positions only: a gap that builds up.",
        panels=(
            Shares("Greatest Δp of a response", "mismatch/response_abs_prob_max_share"),
            Buckets("Δp by response length", "mismatch/by_length", "length (tokens)", ROUNDING_OF_EXTREMES),
            Buckets("Δp by position", "mismatch/by_position", "position (token)", ROUNDING_OF_EXTREMES),
        ),
    ),
    Picture(
        name="routing",
        title="Replayed experts",
        about="The learner replays experts: the servers' (learner.routing=rollout) or those of its pass before the update (old). The "
        "panels have the response tokens whose experts it would not choose itself, and the tokens that keep its own choice, because "
        "the server computed their prompt again.",
        panels=(
            Lines(
                "Experts that differ", {"mismatch/experts_differ": "of tokens and layers"}, bounds=(0, None)
            ),
            Lines("By layer", {"mismatch/experts_differ/*": "*"}, bounds=(0, None)),
            Lines("Not replayed", {"1 - mismatch/replayed_fraction": "share"}, bounds=(0, None), idle=0),
        ),
        optional=True,
    ),
    Picture(
        name="divergence",
        title="Divergences of the two engines",
        about="k3 estimate of KL(rollout || learner); second moments of the ratios learner / rollout of tokens and of whole responses, "
        "less 1; differences of the responses' log-perplexities (above 0: the learner finds the samples less likely).",
        panels=(
            Lines("KL, k3", {"mismatch/k3": "k3"}, log=True, alarm="kl_max", noise=ROUNDING),
            Lines(
                "Chi-squared",
                {"mismatch/chi2_sequence": "sequence", "mismatch/chi2_token": "token"},
                log=True,
                alarm="chi2_token_max",
                alarm_of="token",
                noise=ROUNDING,
            ),
            Lines(
                "Log-perplexity, learner - rollout",
                {
                    "mismatch/log_ppl_diff_abs": "mean of |difference|",
                    "mismatch/log_ppl_diff_mean": "mean difference",
                },
                noise=ROUNDING,
            ),
        ),
    ),
    Picture(
        name="weights",
        title="Importance weights",
        about="Before and after the bound, over response tokens, and their effective sample size (1: all weights are equal). Near 1 "
        "after the bound and low before it: the bound hides a collapse.",
        panels=(
            Lines(
                "Before the bound",
                {
                    "mismatch/raw_weight_max": "max",
                    "mismatch/raw_weight_mean": "mean",
                    "mismatch/raw_weight_std": "std",
                },
                log=True,
                idle=1,
                idle_of={"mismatch/raw_weight_std": 0},
                noise=ROUNDING_OF_EXTREMES,
            ),
            Lines(
                "After the bound",
                {"mismatch/weight_max": "max", "mismatch/weight_mean": "mean", "mismatch/weight_std": "std"},
                log=True,
                idle=1,
                idle_of={"mismatch/weight_std": 0},
                noise=ROUNDING_OF_EXTREMES,
            ),
            Lines(
                "Effective sample size",
                {
                    "mismatch/ess": "before the bound",
                    "mismatch/ess_bounded": "after the bound",
                    "reward/importance_ess": "of whole responses",
                },
                bounds=(None, 1.0),
                alarm="ess_min",
                alarm_of="before the bound",
                idle=1,
                noise=ROUNDING,
            ),
        ),
    ),
    Picture(
        name="rejection",
        title="What the correction rejects",
        about="Response tokens that are left to learn from, and shares of tokens and of whole responses that each rule rejects; total: all "
        "rules and the veto together.",
        panels=(
            Lines("Kept", {"mismatch/kept_fraction": "kept"}, bounds=(0, 1.0), idle=1),
            Lines(
                "Rejected tokens",
                {"mismatch/rejected/*/tokens": "*"},
                bounds=(0, 1.0),
                alarm="rejected_max",
                alarm_of="total",
                idle=0,
            ),
            Lines(
                "Rejected responses",
                {"mismatch/rejected/*/sequences": "*"},
                bounds=(0, 1.0),
                alarm="rejected_max",
                alarm_of="total",
                idle=0,
            ),
        ),
        optional=True,
    ),
    Picture(
        name="update",
        title="The policy's update",
        about="Gradient norm before clipping; response tokens whose ratio current / old met the bounds of the objective; the k1 estimate "
        "of KL(old || current), and how often it is negative, which a KL divergence never is: the samples are not old's.",
        panels=(
            Lines(
                "Gradient norm",
                {"optim/grad_norm": "gradient norm"},
                bounds=(0, None),
                line="learner.optimizer.clip_grad",
            ),
            Lines(
                "Clipped tokens",
                {
                    "policy/clip_fraction": "clipped",
                    "policy/dual_clip_fraction": "dual clip",
                    "policy/off_policy_fraction": "off-policy mask",
                },
                bounds=(0, None),
                idle=0,
                may_lack=("policy/clip_fraction", "policy/dual_clip_fraction", "policy/off_policy_fraction"),
            ),
            Lines("KL(old || current), k1", {"policy/ppo_kl": "k1"}, idle=0, noise=ROUNDING),
            Lines(
                "Minibatches with a negative k1",
                {"policy/ppo_kl_negative_fraction": "negative"},
                bounds=(0, 1.0),
                idle=0,
            ),
        ),
    ),
    Picture(
        name="reference",
        title="KL to the reference policy",
        about="KL(current || ref). If the KL term is in the reward: the estimate of KL(old || ref) there, and its coefficient.",
        panels=(
            Lines(
                "KL", {"policy/ref_kl": "current to ref", "policy/kl_in_reward": "old to ref, in the reward"}
            ),
            Lines("Coefficient in the reward", {"policy/kl_coefficient": "coefficient"}),
        ),
        optional=True,
    ),
    Picture(
        name="staleness",
        title="Tokens by age",
        about="Updates of the weights between the sampling of a token and its step. At lag 0 the gap is the mismatch of the engines alone; "
        "from lag 1 on the policy's own change adds to it. Below, how far the sample role is ahead, and who waits for whom.",
        panels=(
            Lines("Lag of the tokens", {"staleness/mean": "mean", "staleness/max": "greatest"}),
            Lines("Mean k3 by lag", {"staleness/by_lag/*/k3": "*"}, log=True),
            Lines("Effective sample size by lag", {"staleness/by_lag/*/ess": "*"}, bounds=(None, 1.0)),
            Lines("Mean weight by lag", {"staleness/by_lag/*/weight_mean": "*"}),
            Lines(
                "Rejected by lag", {"1 - staleness/by_lag/*/kept_fraction": "*"}, bounds=(0, None), idle=0.0
            ),
            Lines(
                "Groups ahead of the step",
                {"sampling/ready_groups": "finished", "sampling/running_groups": "being sampled"},
                bounds=(0, None),
                idle=0.0,
            ),
            Lines(
                "Who waits",
                {"time/sampling": "learner, for samples", "sampling/idle_s": "servers, for work"},
                bounds=(0, None),
            ),
        ),
        optional=True,
    ),
    Picture(
        name="critic",
        title="Critic",
        about="Value loss; explained variance of the returns (1: every return is predicted, 0: as well as one constant does, below: "
        "worse); mean value against mean return.",
        panels=(
            Lines("Value loss", {"critic/loss": "loss"}, bounds=(0, None)),
            Lines("Explained variance", {"critic/explained_variance": "explained"}, bounds=(None, 1.0)),
            Lines("Values and returns", {"critic/return_mean": "return", "critic/value_mean": "value"}),
        ),
        optional=True,
    ),
    Picture(
        name="responses",
        title="Responses",
        about="Entropy (near 0 sampling is deterministic), mean perplexity of the responses, their length, and the share that ended at the "
        "length limit and not by an end-of-sequence token.",
        panels=(
            Lines("Entropy of the policy", {"policy/entropy": "entropy"}, bounds=(0, None)),
            Lines(
                "Perplexity of the responses",
                {"mismatch/ppl_rollout": "rollout", "mismatch/ppl_train": "learner"},
                log=True,
            ),
            Lines(
                "Response length",
                {"response/length_max": "longest", "response/length_mean": "mean"},
                bounds=(0, None),
            ),
            Lines(
                "Truncated responses", {"response/truncated_fraction": "truncated"}, bounds=(0, 1.0), idle=0
            ),
        ),
    ),
)

FLAT_MEANS = {
    ("policy/dual_clip_fraction", 0.0): "dual clip acts on rare tokens only",
    ("mismatch/kept_fraction", 1.0): "the correction rejects no token",
    ("mismatch/kept_fraction", 0.0): "the correction rejects every token: nothing is learned",
    ("mismatch/response_abs_prob_over", 0.0): "the engines contradict each other in no response",
    ("response/truncated_fraction", 1.0): "no response ends by itself: max_new_tokens is too small",
    ("groups/no_signal_fraction", 1.0): "siblings always have the same reward: only gdpo can learn from them",
    ("reward/mean", 0.0): "no response was ever right: there is nothing to learn from",
}
"""The meaning of a metric that has this value at all steps."""
FLAT_MEANS_OF_ONE_MINIBATCH = {
    ("policy/clip_fraction", 0.0): "expected with one minibatch per step: the scored policy is updated",
    ("policy/ppo_kl", 0.0): "expected with one minibatch per step: current equals old exactly",
}
"""Likewise, with ``learner.minibatches: 1``."""
for _name, _ in FLAT_MEANS | FLAT_MEANS_OF_ONE_MINIBATCH:
    known(_name)
