"""The learner's side of ``tandem mismatch``: the real engine, frozen, scores tokens that servers sampled, and with
--why it scores them again under switches.

R responses, N their tokens end to end. All ranks call every function, in the same order.

A switch changes one thing in how the same weights score the same tokens. Another layout is not a switch: it needs
another start of the ranks.
"""

import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from configs.schema import RunConfig
from configs.schema.model import ModelConfig
from parallel.engine import MegatronEngine
from parallel.megatron import platform
from parallel.megatron.layers import PackedCoreAttention
from parallel.packing import PackedBatch
from parallel.rank_objects import from_all_ranks
from trainer.batch.plan import pack_prompted, plan_batches
from trainer.studies.layout_statistics import Sampled

MICROBATCHES_PER_CALL = 8
"""A call takes so many micro-batches for each pipeline stage. Progress is reported after each call."""

Report = Callable[[str], None]
Bins = list[list[int]]
LogprobsOf = Callable[[Sequence[PackedBatch]], list[Tensor]]
Answer = tuple[Tensor | None, str | None]
"""(log-probs of N tokens, None on all ranks but the first; the reason if there are none)."""


def frozen_engine(config: RunConfig, model: ModelConfig) -> MegatronEngine:
    return MegatronEngine(
        model,
        config.layout,
        None,
        logprob_chunk_tokens=config.learner.logprob_chunk_tokens,
        seed=config.seed,
        timeout_s=config.launch.collective_timeout_s,
        pieces=config.numerics_pieces,
    )


class Scorer:
    """Scores sets of samples with one model at one temperature."""

    def __init__(self, config: RunConfig, report: Report, model: ModelConfig | None = None):
        self.config, self._report = config, report
        self.engine = frozen_engine(config, model or config.model)
        self.temperature = config.rollout.temperature

    def of(self, model: ModelConfig) -> "Scorer":
        """A scorer with another model."""
        return Scorer(self.config, self._report, model)

    def packed(self, sampled: Sampled) -> Bins:
        """This rank's micro-batches, as training would pack them."""
        lengths = (sampled.prompt_lengths_R + sampled.response_lengths_R - 1).tolist()
        dp = self.engine.groups.dp_size
        budget = self.config.learner.token_budget
        plan = plan_batches(lengths, minibatches=[range(len(lengths))], dp_size=dp, token_budget=budget)
        return [list(microbatch) for microbatch in plan.microbatches[0][self.engine.groups.dp_rank]]

    def alone(self, sampled: Sampled) -> Bins:
        """Each sequence in a micro-batch of its own."""
        groups = self.engine.groups
        return [[row] for row in range(groups.dp_rank, sampled.num_responses, groups.dp_size)]

    def score(
        self,
        name: str,
        sampled: Sampled,
        bins: Bins | None = None,
        *,
        temperature: float | None = None,
        replays: bool | None = None,
    ) -> Tensor | None:
        """float32 log-probs of the N response tokens on rank 0, None elsewhere.

        replays: whether tokens go to the server's experts, if these are known; None: as the config says.
        """

        def logprobs(batches: Sequence[PackedBatch]) -> list[Tensor]:
            return self.engine.logprobs(batches, temperature=temperature or self.temperature)

        return self.scored_by(logprobs, name, sampled, bins or self.packed(sampled), replays=replays)

    def scored_by(
        self, logprobs: LogprobsOf, name: str, sampled: Sampled, bins: Bins, *, replays: bool | None = None
    ) -> Tensor | None:
        began = time.perf_counter()
        sequences, lengths = sampled.sequences(), sampled.response_lengths_R.tolist()
        replays = self.config.learner.routing == "rollout" if replays is None else replays
        experts = None
        if replays and sampled.experts_TLK is not None:
            inputs_R = sampled.prompt_lengths_R + sampled.response_lengths_R - 1
            experts = sampled.experts_TLK.split(inputs_R.tolist())
        size, mine, tokens = MICROBATCHES_PER_CALL * self.config.layout.pp, {}, 0
        for start in range(0, len(bins), size):
            part = bins[start : start + size]
            batches = [_pack(rows, sequences, lengths, experts) for rows in part]
            for rows, batch, logprobs_T in zip(part, batches, logprobs(batches), strict=True):
                kept = logprobs_T.float().cpu()[batch.response_mask_T].split([lengths[row] for row in rows])
                mine |= dict(zip(rows, kept, strict=True))
            tokens += sum(batch.num_tokens for batch in batches)
            if start + size < len(bins):
                self._report_rate(f"  {name}: {start + size} of {len(bins)} micro-batches", tokens, began)
        groups = self.engine.groups
        # Every rank of a copy of the model has the same results.
        everyone = from_all_ranks(mine if groups.tp_rank == groups.pp_rank == 0 else {})
        self._report_rate(f"scored {name}: {sampled.num_responses} responses", tokens, began)
        if groups.rank:
            return None
        whole = {row: logprobs for part in everyone for row, logprobs in part.items()}
        return torch.cat([whole[row] for row in range(sampled.num_responses)])

    def _report_rate(self, progress: str, tokens: int, began: float) -> None:
        if self.engine.groups.rank == 0:
            seconds = time.perf_counter() - began
            copies = self.engine.groups.dp_size
            self._report(f"{progress}, {tokens * copies / seconds:,.0f} tokens/s, {seconds:.1f} s")


def _pack(
    rows: Sequence[int],
    sequences: Sequence[Sequence[int]],
    response_lengths: Sequence[int],
    experts: Sequence[Tensor] | None,
) -> PackedBatch:
    ids = [sequences[row] for row in rows]
    packed = pack_prompted(ids, [len(sequences[row]) - response_lengths[row] for row in rows], rows)
    if experts is None:
        return packed
    every_T = torch.ones(packed.num_tokens, dtype=torch.bool)
    return packed.with_fields(experts_TLK=torch.cat([experts[row] for row in rows]), is_replayed_T=every_T)


# -----------------------------------------------------------------------------------------------------------------
# switches


def score_under_switches(scorer: Scorer, sampled: Sampled) -> dict[str, Answer]:
    """One answer per switch. ``repeat`` switches nothing and shows the noise level."""
    answers: dict[str, Answer] = {"repeat": (scorer.score("repeat", sampled), None)}
    return answers | {name: switch(scorer, sampled) for name, switch in SWITCHES.items()}


def _dtype(scorer: Scorer, sampled: Sampled) -> Answer:
    model = scorer.config.model
    other = "float32" if model.dtype != "float32" else "bfloat16"
    return scorer.of(model.model_copy(update={"dtype": other})).score(f"learner in {other}", sampled), None


def _lm_head(scorer: Scorer, sampled: Sampled) -> Answer:
    model = scorer.config.model
    if model.dtype == "float32":
        return None, "the learner is float32 throughout, its LM head too"
    other = model.model_copy(update={"fp32_lm_head": not model.fp32_lm_head})
    return scorer.of(other).score("lm_head", sampled), None


def _attention(scorer: Scorer, sampled: Sampled) -> Answer:
    modules = (module for chunk in scorer.engine.chunks for module in chunk.modules())
    attentions = [module for module in modules if isinstance(module, PackedCoreAttention)]
    other = scorer.engine.dtype
    if not attentions or attentions[0].dtype == other:
        return None, "the learner's attention runs in the model's dtype already"
    before = attentions[0].dtype
    for module in attentions:
        module.dtype = other
    try:
        return scorer.score("attention", sampled), None
    finally:
        for module in attentions:
            module.dtype = before


def _routing(scorer: Scorer, sampled: Sampled) -> Answer:
    if scorer.engine.architecture.experts is None:
        return None, "the model has no experts"
    if sampled.experts_TLK is None:
        return None, "the server gave no experts, or not those that a token was sampled with"
    return scorer.score("routing", sampled, replays=scorer.config.learner.routing != "rollout"), None


def _temperature_ignored(scorer: Scorer, sampled: Sampled) -> Answer:
    if scorer.temperature == 1:
        return None, "rollout.temperature is 1, so ignoring it changes nothing"
    return scorer.score("temperature_ignored", sampled, temperature=1.0), None


def _temperature_in_model_dtype(scorer: Scorer, sampled: Sampled) -> Answer:
    if scorer.temperature == 1:
        return None, "rollout.temperature is 1: nothing is divided"
    if scorer.engine.dtype == torch.float32 or scorer.config.model.fp32_lm_head:
        return None, "the logits are float32, as is the division"
    if scorer.config.layout.pp > 1:
        return None, "the logits of a pipeline's last stage are not at hand; give a first --learner with pp=1"

    def rounded(batches: Sequence[PackedBatch]) -> list[Tensor]:
        chunk = scorer.config.learner.logprob_chunk_tokens
        return [_rounded_logprobs(scorer.engine, batch, scorer.temperature, chunk) for batch in batches]

    return scorer.scored_by(rounded, "temperature_in_model_dtype", sampled, scorer.packed(sampled)), None


@torch.no_grad()
def _rounded_logprobs(engine: MegatronEngine, batch: PackedBatch, temperature: float, chunk: int) -> Tensor:
    """log softmax(logits / T) with the quotient rounded to the model's dtype, as in an engine that divides its
    logits in place. [T]"""
    (model,), batch = engine.chunks, batch.to(platform.device())
    packed = model.pack(batch.cu_seqlens, batch.positions_T)
    logits_TV = model.logits(tokens_T=batch.tokens_T, packed=packed) / temperature
    parts = zip(logits_TV.split(chunk), batch.targets_T.split(chunk), strict=True)
    return torch.cat(
        [part.float().log_softmax(-1).gather(1, targets[:, None]).squeeze(1) for part, targets in parts]
    )


def _deterministic_kernels(scorer: Scorer, sampled: Sampled) -> Answer:
    if not platform.has_cuda():
        return None, "torch.use_deterministic_algorithms chooses CUDA kernels; a CPU has no choice of them"
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        return scorer.score("deterministic_kernels", sampled), None
    finally:
        torch.use_deterministic_algorithms(False)


SWITCHES: dict[str, Callable[[Scorer, Sampled], Answer]] = {
    "packing": lambda scorer, sampled: (scorer.score("packing", sampled, scorer.alone(sampled)), None),
    "dtype": _dtype,
    "lm_head": _lm_head,
    "attention": _attention,
    "routing": _routing,
    "temperature_in_model_dtype": _temperature_in_model_dtype,
    "temperature_ignored": _temperature_ignored,
    "deterministic_kernels": _deterministic_kernels,
}
