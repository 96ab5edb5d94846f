"""The table of metrics: name, reduction, unit and meaning of everything that a run may record.

The tracker warns of a recorded name that the table lacks. Console, alarms, report and status check their names
against it when they are imported. The site's page of metrics is made from it.

Symbols are those of docs/notation.md: ρ = π_train / π_rollout of a token, d = log ρ, Δp = |p_rollout − p_train|.
d, or its sum over a response, is bounded to ±20 before exp. log_ppl is minus the mean log-prob of a response's
tokens. Responses without valid tokens are left out. Under mismatch/* each sequence of an episode that forked is a response.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from fnmatch import fnmatchcase
from functools import cache


@dataclass(frozen=True, slots=True)
class Entry:
    name: str
    """``part/quantity``. A star stands for any text: a rule, a bucket, a part of the reward."""
    reduction: str | None
    """The ``Reduction`` (trainer/ranks/metrics.py) that merges micro-batches, ranks and minibatches. None: the metric
    is computed once, from the whole step."""
    unit: str
    meaning: str


@cache
def find_entry(name: str) -> Entry | None:
    """The entry of a recorded name, or of a name with the same star."""
    return METRICS.get(name) or next((METRICS[star] for star in _STARRED if fnmatchcase(name, star)), None)


def entry_of(name: str) -> Entry:
    """Raises ValueError for a name that the table does not have."""
    if entry := find_entry(name):
        return entry
    near = "".join(f", or use {other}" for other in get_close_matches(name, METRICS, n=1))
    raise ValueError(f"no metric is called {name!r}; add it to trainer/metric_names.py{near}")


def known(name: str) -> str:
    """``name`` itself, which the table must have (see ``entry_of``)."""
    entry_of(name)
    return name


def _spread(name: str, unit: str, about: str) -> Iterator[Entry]:
    """Mean, standard deviation (divided by the count) and extremes of one quantity."""
    words = {"mean": "mean", "std": "standard deviation", "min": "least", "max": "greatest"}
    return (Entry(f"{name}{kind}", kind, unit, f"{word} of {about}") for kind, word in words.items())


def _bucket(name: str, about: str) -> Iterator[Entry]:
    for quantity, reduction, unit, words in (
        ("abs_prob_mean", "mean", "probability", "mean Δp"),
        ("abs_prob_max", "max", "probability", "greatest Δp"),
        ("k3", "mean", "nats per token", "mean k3"),
        ("k3_max", "max", "nats", "greatest k3"),
    ):
        yield Entry(f"{name}/*/{quantity}", reduction, unit, f"{words} of the tokens {about}")


def _evaluation(name: str, of: str, count: str) -> Iterator[Entry]:
    for quantity, unit, words in (
        (
            "accuracy",
            "share of answers",
            f"right answers to {of}; a failed one is wrong, unless the part of its reward that decides was computed",
        ),
        ("accuracy_error", "share of answers", "standard error of the accuracy, from problem to problem"),
        ("reward_mean", "reward", f"mean reward on {of}; that of a failed answer is 0"),
        (
            "failed_fraction",
            "share of answers",
            "answers whose reward or episode failed, by which accuracy and mean reward may be too low",
        ),
        ("count", "responses", count),
        ("length_mean", "tokens", "mean length of these samples, as response/length_mean"),
        (
            "truncated_fraction",
            "share of responses",
            "samples whose last turn a limit of tokens cut off, as response/truncated_fraction",
        ),
    ):
        yield Entry(f"{name}{quantity}", None, unit, words)


# fmt: off
METRICS = {entry.name: entry for entry in (
    Entry("reward/mean", None, "reward", "mean reward of the step's responses; with dynamic sampling, of those that it selects"),
    Entry("reward/before_selection", None, "reward",
          "mean reward of all responses that were scored for the step, before dynamic sampling leaves groups out: that of the policy"),
    Entry("reward/std", None, "reward", "standard deviation of the rewards, divided by their count"),
    Entry("reward/part/*", None, "reward", "mean of a part of the reward over the responses that have it; a failed reward has no parts"),
    Entry("reward/failed", None, "responses", "samples whose reward or episode failed; they are not scored"),
    Entry("reward/failed_fraction", None, "share of responses",
          "their share of the samples that the step used up, before dynamic sampling leaves groups out"),
    Entry("reward/as_sampled", "mean", "reward",
          "mean R over the responses that are trained on: an estimate of E_rollout[R], unless dynamic sampling selects them"),
    Entry("reward/importance_weighted", "mean", "reward",
               "Σ w R / Σ w with w = Π ρ of a response: an estimate of E_train[R], biased by O(1 / responses), and by dynamic sampling"),
    Entry("reward/importance_ess", "ess", "share", "ESS of these weights; near 1 / responses one response makes the estimate"),
    Entry("response/length_mean", None, "tokens",
          "mean length of a sample with a turn: tokens that the policy sampled, in all turns and sequences of an episode"),
    Entry("response/length_max", None, "tokens", "greatest such length"),
    Entry("response/tokens", None, "tokens", "response tokens of the step's groups, also of samples that are not scored"),
    Entry("response/tokens_before_selection", None, "tokens", "those and the response tokens of groups that dynamic sampling leaves out"),
    Entry("response/truncated_fraction", None, "share of responses", "samples with a turn whose first sequence ended at the length limit"),
    Entry("episode/sequences_mean", None, "sequences", "mean number of sequences of a sample; 1 where no episode forks"),
    Entry("episode/turns_mean", None, "turns", "mean number of the policy's turns in a sample; 1 without an environment"),
    Entry("episode/turns_max", None, "turns", "greatest number of turns"),
    Entry("episode/turns_checked", None, "turns",
          "turns whose tokens were compared with what the server was sent and answered; one that differs ends the run"),
    Entry("episode/retracted_turns", None, "turns",
          "turns that the server interrupted, for new weights or for lack of memory, and whose prompt it then computed again"),
    Entry("episode/observed_tokens", None, "tokens", "tokens between the first and the last turn that the policy did not sample"),
    Entry("episode/token_limit_fraction", None, "share of samples", "episodes that environment.max_tokens ended"),
    Entry("episode/turn_limit_fraction", None, "share of samples", "episodes that environment.max_turns ended"),
    Entry("episode/time_limit_fraction", None, "share of samples", "episodes that environment.timeout_s ended"),
    Entry("episode/failed_fraction", None, "share of samples", "episodes whose environment raised, or whose process ended"),
    Entry("episode/cached_fraction", None, "share of prompt tokens", "of turns after the first: what the server had in its prefix cache"),
    Entry("episode/not_scored_fraction", None, "share of samples",
          "samples without a reward, which are neither trained on nor part of a baseline"),
    Entry("episode/lone_fraction", None, "share of samples",
          "samples with a reward whose siblings have none: they are not trained on either where the advantage compares siblings"),
    Entry("groups/no_signal_fraction", None, "share of groups", "the step's groups whose siblings all have the same reward"),
    Entry("groups/no_signal_before_selection", None, "share of groups", "the same of all groups that were sampled for the step"),
    *_spread("advantage/", "reward", "the advantages of response tokens"),

    Entry("policy/skipped_fraction", "mean", "share of tokens",
          "response tokens whose gradient is zero and was not computed (learner.skip_zero_gradients)"),
    Entry("loss/total", "loss", "reward", "the loss: the sum of its terms, as a mean over the minibatches"),
    Entry("loss/policy", "loss", "reward", "the objective's term of the loss"),
    Entry("loss/kl", "loss", "reward", "the KL term of the loss, times its coefficient"),
    Entry("loss/entropy", "loss", "reward", "the entropy term of the loss, times minus its coefficient"),
    Entry("policy/entropy", "mean", "nats per token", "entropy of current, over the vocabulary or, if the sampler truncates, the kept ids"),
    Entry("policy/ppo_kl", "mean", "nats per token", "mean log π_old − log π_current: estimates KL(old ‖ current) from samples of rollout"),
    Entry("policy/ppo_kl_negative_fraction", None, "share of minibatches", "minibatches whose ppo_kl is negative, as no divergence is"),
    Entry("policy/ref_kl", "mean", "nats per token", "KL(current ‖ ref), by the configured estimator"),
    Entry("policy/kl_in_reward", "mean", "nats per token", "estimate of KL(old ‖ ref), where the reward has the KL term"),
    Entry("policy/kl_coefficient", "mean", "reward per nat", "coefficient of the KL in the reward"),
    Entry("policy/ratio_mean", "mean", "ratio", "mean of the objective's ratio π_current / π_old over kept tokens"),
    Entry("policy/ratio_min", "min", "ratio", "least such ratio"),
    Entry("policy/ratio_max", "max", "ratio", "greatest such ratio"),
    Entry("policy/first_ratio_min", None, "ratio", "ratio_min of the first minibatch, where current is old (decoupled mode)"),
    Entry("policy/first_ratio_max", None, "ratio", "ratio_max of the first minibatch, likewise"),
    Entry("policy/clip_fraction", "mean", "share of tokens", "kept tokens whose ratio met a bound of the objective"),
    Entry("policy/dual_clip_fraction", "mean", "share of tokens", "kept tokens that the dual clip held"),
    Entry("policy/off_policy_fraction", "mean", "share of tokens", "kept tokens with A < 0 that correction.off_policy_mask masks"),
    Entry("optim/grad_norm", "max", "L2 norm", "gradient norm before clipping, the greatest of the minibatches"),
    Entry("optim/lr", "mean", "learning rate", "mean learning rate of the updates done"),
    Entry("optim/skipped", "sum", "minibatches", "updates that the optimizer skipped"),
    Entry("own/objective/*", "mean", "of the function", "values that a user's objective records; mean over kept tokens"),
    Entry("own/advantage/*", "mean", "of the function", "values that a user's advantage records; mean over the samples of the step"),
    Entry("own/weight/*", "mean", "of the function", "values that a user's weight records; mean over response tokens"),

    Entry("critic/loss", "loss", "reward²", "value loss, as a mean over the minibatches"),
    Entry("critic/value_mean", "mean", "reward", "mean value V over response tokens"),
    Entry("critic/return_mean", "mean", "reward", "mean return R over response tokens"),
    Entry("critic/clip_fraction", "mean", "share of tokens", "tokens whose clipped value has the larger error: they have no gradient"),
    Entry("critic/return_std", "std", "reward", "standard deviation of R"),
    Entry("critic/error_std", "std", "reward", "standard deviation of R − V_old"),
    Entry("critic/explained_variance", None, "share of the variance", "1 − Var(R − V_old) / Var(R); 1: every return is predicted"),
    Entry("critic/grad_norm", "max", "L2 norm", "as optim/grad_norm, of the critic"),
    Entry("critic/lr", "mean", "learning rate", "as optim/lr, of the critic"),
    Entry("critic/skipped", "sum", "minibatches", "as optim/skipped, of the critic"),

    Entry("mismatch/abs_prob_mean", "mean", "probability", "mean Δp over tokens"),
    Entry("mismatch/abs_prob_max", "max", "probability", "greatest Δp of a token"),
    Entry("mismatch/prob_pearson", "pearson", "r", "correlation of p_rollout and p_train over tokens"),
    Entry("mismatch/k1", "mean", "nats per token", "mean of −d: estimates KL(rollout ‖ train); may be negative"),
    Entry("mismatch/k3", "mean", "nats per token", "mean of ρ − 1 − d: estimates the same KL; never negative"),
    Entry("mismatch/logprob_gap_max", "max", "nats", "greatest |d| of a token, unbounded"),
    Entry("mismatch/ratio_mean", "mean", "ratio", "mean ρ: estimates 1 where rollout can sample every token that train can"),
    Entry("mismatch/ratio_max", "max", "ratio", "greatest ρ"),
    Entry("mismatch/ratio_min", "min", "ratio", "least ρ"),
    Entry("mismatch/ratio_outside_fraction", "mean", "share of tokens", "tokens with ρ outside [0.9, 1.1]"),
    Entry("mismatch/chi2_token", "mean", "E[ratio²] - 1", "mean of ρ² over tokens, less 1; 0 for equal policies"),
    Entry("mismatch/chi2_sequence", "mean", "E[ratio²] - 1", "mean of (Π ρ)² over responses, less 1"),
    Entry("mismatch/log_ppl_train", "mean", "nats per token", "mean log_ppl under train, over responses"),
    Entry("mismatch/log_ppl_rollout", "mean", "nats per token", "mean log_ppl under rollout"),
    Entry("mismatch/ppl_train", "mean", "perplexity", "mean of exp(log_ppl_train) over responses"),
    Entry("mismatch/ppl_rollout", "mean", "perplexity", "mean of exp(log_ppl_rollout)"),
    Entry("mismatch/ppl_ratio", "mean", "ratio",
               "mean of exp(log_ppl_train − log_ppl_rollout); above 1: the learner finds the samples less likely"),
    Entry("mismatch/log_ppl_diff_mean", "mean", "nats per token", "mean of log_ppl_train − log_ppl_rollout"),
    Entry("mismatch/log_ppl_diff_abs", "mean", "nats per token", "mean of its absolute value"),
    Entry("mismatch/log_ppl_diff_max", "max", "nats per token", "its greatest value"),
    Entry("mismatch/log_ppl_diff_min", "min", "nats per token", "its least value"),
    Entry("mismatch/response_abs_prob_max_mean", "mean", "probability", "mean over responses of a response's greatest Δp"),
    Entry("mismatch/response_abs_prob_mean_mean", "mean", "probability", "mean over responses of a response's mean Δp"),
    Entry("mismatch/response_abs_prob_mean_max", "max", "probability", "greatest mean Δp of a response"),
    Entry("mismatch/response_abs_prob_over", "mean", "share of responses", "responses whose greatest Δp is over 0.5"),
    Entry("mismatch/response_abs_prob_max_share/*", "mean", "share of responses",
               "responses by their greatest Δp; a star is le_0.001, …, over_0.5"),
    Entry("mismatch/response_abs_prob_mean_share/*", "mean", "share of responses",
               "responses by their mean Δp; a star is le_1e-05, …, over_0.1"),
    *_bucket("mismatch/by_length", "of all responses of a length; a star is le_64, …, over_4096"),
    *_bucket("mismatch/by_position", "at the same positions of all responses, counted from 1; a star is le_64, …, over_4096"),

    *_spread("mismatch/raw_weight_", "weight", "the weight of a token before its bound"),
    *_spread("mismatch/weight_", "weight", "the weight of a token after its bound, before it is normalised"),
    *_spread("mismatch/raw_sequence_weight_", "weight", "a response's mean weight before the bound"),
    *_spread("mismatch/sequence_weight_", "weight", "a response's mean weight after the bound"),
    Entry("mismatch/ess", "ess", "share",
               "(Σ w)² / (n Σ w²) of the weights before the bound; 1: all alike, 1 / n: one token outweighs the rest"),
    Entry("mismatch/ess_bounded", "ess", "share", "the same after the bound"),
    Entry("mismatch/truncated_fraction", "mean", "share of tokens", "tokens whose raw weight is above the upper bound"),
    Entry("mismatch/below_lower_fraction", "mean", "share of tokens", "tokens whose raw weight is below the lower bound"),
    Entry("mismatch/weight_normaliser", "mean", "weight", "mean weight that normalised weights are divided by"),
    Entry("mismatch/kept_fraction", "mean", "share of tokens", "response tokens that rejection and veto leave in the loss"),
    Entry("mismatch/experts_differ", "mean", "share",
          "response tokens and layers whose replayed experts (learner.routing=rollout or old) are not those that the router would "
          "choose now, behind layers that replay"),
    Entry("mismatch/experts_differ/*", "mean", "share of tokens", "the same of one layer; a star is layer_0, layer_1, …"),
    Entry("mismatch/replayed_fraction", "mean", "share of tokens",
          "response tokens that go to replayed experts (learner.routing=rollout or old)"),
    Entry("mismatch/kept_ids", "mean", "ids per token",
          "ids that top_p, top_k and min_p left for a response token: log-probs and entropies are of the softmax over them"),
    Entry("mismatch/rejected/*/tokens", "mean", "share of tokens", "tokens that a rule rejects; a star is a rule, veto or total"),
    Entry("mismatch/rejected/*/sequences", "mean", "share of responses", "responses of which it leaves no token"),
    Entry("mismatch/rejected/*/touched_sequences", "mean", "share of responses", "responses of which it rejects some token"),
    *_spread("mismatch/rejected/*/statistic_", "of the rule", "what the rule bounds: ρ at its level, a divergence, or p_train − p_rollout"),
    Entry("mismatch/rejected/*/above_upper", "mean", "share", "tokens, responses or segments above the rule's upper bound"),
    Entry("mismatch/rejected/*/below_lower", "mean", "share", "those below its lower bound"),
    Entry("mismatch/veto/tokens", "sum", "tokens", "tokens whose ρ is below the veto's threshold"),
    Entry("mismatch/veto/sequences", "sum", "responses", "responses that hold such a token"),

    Entry("staleness/mean", "mean", "versions", "mean lag of the response tokens: updates between their sampling and their step"),
    Entry("staleness/max", "max", "versions", "greatest lag of a response token; rollout.max_staleness at most"),
    Entry("staleness/mixed_fraction", "mean", "share of responses", "responses with tokens of several versions"),
    Entry("staleness/by_lag/*/tokens", "sum", "tokens", "response tokens of a lag; a star is le_0, le_1, le_2, …, over_16"),
    Entry("staleness/by_lag/*/abs_prob_mean", "mean", "probability", "mean Δp of the tokens of a lag"),
    Entry("staleness/by_lag/*/abs_prob_max", "max", "probability", "greatest Δp of the tokens of a lag"),
    Entry("staleness/by_lag/*/logprob_gap_max", "max", "nats", "greatest |d| of the tokens of a lag, unbounded"),
    Entry("staleness/by_lag/*/k3", "mean", "nats per token", "mean k3 of the tokens of a lag"),
    Entry("staleness/by_lag/*/weight_mean", "mean", "weight", "mean importance weight of the tokens of a lag, as the loss uses it"),
    Entry("staleness/by_lag/*/ess", "ess", "share", "ESS of the unbounded ρ of the tokens of a lag"),
    Entry("staleness/by_lag/*/kept_fraction", "mean", "share of tokens", "tokens of a lag that rejection and veto leave in the loss"),
    Entry("sampling/ready_groups", None, "groups", "groups of later steps that are finished when the step's groups are handed out"),
    Entry("sampling/running_groups", None, "groups", "groups of later steps that are being sampled then"),
    Entry("sampling/idle_s", None, "s", "seconds since the step before, or the run's first sample, without a sample at the servers"),
    Entry("sampling/requests", None, "completions", "completions requested of the servers: a sample has one for each turn"),
    Entry("sampling/retries", None, "completions", "completions requested again, since an attempt failed in transport or ran out of time"),
    Entry("sampling/reward_retries", None, "requests", "requests to reward models and judges that were repeated"),
    Entry("sampling/resampled_groups", None, "groups", "groups sampled instead of groups without signal (dynamic sampling)"),
    Entry("sampling/filled_groups", None, "groups", "groups without signal that were taken after the last round of dynamic sampling"),
    Entry("sampling/left_out_prompts", None, "prompts", "prompts of the data that are too long (task.too_long_prompts)"),
    Entry("sampling/seconds", None, "s", "seconds from the learner's request for the step's groups to the answer"),
    *_evaluation("eval/", "held-out problems", "samples: held-out problems times samples_per_prompt"),
    Entry("eval/accuracy_fall", None, "standard errors",
          "the best accuracy of an evaluation before this one, less this one's, in standard errors of the difference"),
    Entry("eval/pass_at/*", None, "share of problems",
          "pass@k, a star is k: an unbiased estimate of the share of held-out problems of which k samples hold a right one"),
    *_evaluation("eval/greedy/", "held-out problems, one each at temperature 0", "such answers (evaluation.greedy)"),
    *_evaluation("eval/set/*/greedy/", "problems of a further held-out set, one each at temperature 0", "such answers"),
    *_evaluation("eval/set/*/", "problems of a further held-out set (task.heldout_sets)", "samples of the set"),
    Entry("eval/set/*/pass_at/*", None, "share of problems", "pass@k on the problems of the set, the last star is k"),
    *_evaluation("eval/source/*/", "held-out problems of a source (reward.type=by_field)", "samples of the source"),
    Entry("eval/source/*/pass_at/*", None, "share of problems", "pass@k on the problems of the source, the last star is k"),
    Entry("sync/version", None, "version", "weight version that the step published"),
    Entry("sync/bytes", None, "bytes", "bytes of weights that were sent, counted once for all servers"),
    Entry("sync/servers", None, "servers", "servers that have the step's weights; fewer than rollout.replicas where one has ended"),
    Entry("sync/max_logprob_gap", None, "nats", "greatest log-prob difference of learner and servers on the probe prompt"),
    Entry("time/step", None, "s", "seconds of the step, without its evaluation and the checkpoint after it"),
    Entry("time/sampling", None, "s", "seconds in which the learner waits for samples, rollout.drain_s included"),
    Entry("time/logprobs", None, "s", "seconds of the forward passes before the update; colocated, of making room for the learner too"),
    Entry("time/update", None, "s", "seconds of the updates"),
    Entry("time/sync", None, "s", "seconds of sending and verifying the weights; colocated, of making room for the servers too"),
    Entry("time/evaluation", None, "s", "seconds of the evaluation after the step, which is no part of time/step"),
    Entry("time/checkpoint", None, "s",
          "seconds of the checkpoint before the step, which is no part of time/step; that after the last step is on the console"),
    Entry("throughput/tokens_per_s", None, "tokens/s",
          "response tokens per second of time/step, without those that dynamic sampling leaves out"),
)}
# fmt: on
_STARRED = [name for name in METRICS if "*" in name]
STEP_PARTS = ("sampling", "logprobs", "update", "sync")
"""Parts of ``time/step``, ``time/*``, that do not overlap."""
TIME_PARTS = (*STEP_PARTS, "evaluation", "checkpoint")
"""These, and the parts of a run's time between its steps."""
WITHOUT_SELECTION = {"reward/before_selection": "reward/mean"}
"""What stands for a metric in a run without dynamic sampling, which trains on all that it samples."""


def value_of(row: Mapping[str, float | None], name: str) -> float | None:
    """A step's value of the metric or, without dynamic sampling, of what stands for it; None where it has none."""
    value = row.get(name)
    return row.get(WITHOUT_SELECTION.get(name, name)) if value is None else value
