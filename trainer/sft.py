"""The supervised warm start: next-token loss on only the answers, by the same engine as the RL update.

loss = -(1 / N) sum over answer tokens of log pi(token | preceding tokens),   N answer tokens in the batch of all ranks
"""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from configs.schema import SftConfig
from configs.schema.run import CountdownSftData
from parallel.engine import MegatronEngine
from parallel.engine_base import Training
from parallel.packing import PackedBatch
from parallel.planning.architecture import architecture_of
from parallel.rank_objects import from_first_rank
from rollout.records import DataPrompt, Message
from rollout.sampling.prompt_room import check_example_length
from rollout.tasks import generate_sft_examples, read_pairs
from rollout.tokenization import encode_prompt, encode_response, end_token_ids, find_turns, load_tokenizer
from trainer.batch.plan import pack_responses, packed_length, plan_batches
from trainer.ranks.metrics import Metric, merge_metrics, merge_over_ranks
from trainer.waiting_for_space import save_when_there_is_space

if TYPE_CHECKING:
    from rollout.tokenization import Tokenizer

REPORT_EVERY_S = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Example:
    token_ids: list[int]
    answers: list[range]
    """Places of the answers to learn, in order. The last one ends the example."""


def train_sft(config: SftConfig, *, report: Callable[[str], None]) -> None:
    """Train ``config.model`` on ``config.data`` for ``config.steps`` and write ``config.output``. Every rank
    calls it.

    Raises ValueError for data that cannot be trained on (see ``load_examples``), before the model is loaded.
    """
    print_line = report if dist.get_rank() == 0 else lambda line: None
    print_line(f"warm start: reading examples for {config.steps} steps of {config.batch_size}")
    examples = load_examples(config)
    engine = MegatronEngine(
        config.model,
        config.layout,
        Training(optimizer=config.optimizer, total_steps=config.steps),
        logprob_chunk_tokens=config.logprob_chunk_tokens,
        seed=config.seed,
        timeout_s=config.launch.collective_timeout_s,
    )
    started = last_report = time.perf_counter()
    tokens = 0
    for step, rows in enumerate(batches(len(examples), config), start=1):
        microbatches, counted = local_batch(
            [examples[r] for r in rows], config, dp_rank=engine.groups.dp_rank
        )
        result = engine.update(microbatches, _loss(1.0 / counted), temperature=1.0)
        tokens += counted
        now = time.perf_counter()
        # Rank 0's clock decides for all ranks, because the merge below is a collective.
        if from_first_rank(now - last_report >= REPORT_EVERY_S or step in (1, config.steps)):
            last_report = now
            loss = merge_over_ranks(merge_metrics(result.outputs), engine.groups.dp_group)["loss"].value
            left = (now - started) / step * (config.steps - step)
            rate = tokens / (now - started)
            progress = f"warm start {step:>5}/{config.steps}  loss {loss:.4f}  lr {result.lr:.1e}"
            print_line(f"{progress}  {rate:,.0f} answer tokens/s  {left:4.0f} s left")
    save_when_there_is_space(engine.save_hf, config.output, print_line)


def _loss(scale: float) -> Callable[[PackedBatch, Tensor, Tensor], tuple[Tensor, dict[str, Metric]]]:
    def loss_fn(microbatch: PackedBatch, logprobs_T: Tensor, entropy_T: Tensor):
        mask_T = microbatch.response_mask_T.to(logprobs_T.device)
        loss = -torch.where(mask_T, logprobs_T, 0.0).sum() * scale
        return loss, {"loss": Metric.mean(-logprobs_T, mask_T)}

    return loss_fn


def load_examples(config: SftConfig) -> list[Example]:
    """Tokenised prompt and answer, which ends with an end token, in the order of the file or the generator.
    The tokens do not depend on whether earlier turns of the assistant are learned too.

    Raises ValueError as ``read_pairs`` and ``find_turns`` do, and for an example that is too long for a micro-batch or for
    the model, naming its line.
    """
    tokenizer = load_tokenizer(config.model.path)
    ends = end_token_ids(tokenizer, config.model.path)
    max_positions = architecture_of(config.model.path).max_positions
    examples = []
    for where, prompt, answer in _pairs(config):
        try:
            example = _tokenised(tokenizer, ends, prompt, answer, config)
        except ValueError as error:
            raise ValueError(f"{where}: {error}") from error
        check_example_length(
            where,
            packed_length(example.token_ids),
            token_budget=config.token_budget,
            max_positions=max_positions,
        )
        examples.append(example)
    return examples


def _pairs(config: SftConfig) -> list[tuple[str, DataPrompt, str | Message]]:
    """(source, prompt, answer) of each example."""
    data = config.data
    if not isinstance(data, CountdownSftData):
        return read_pairs(data)
    examples = generate_sft_examples(data.task, count=data.examples, noise=data.noise, seed=config.seed)
    return [(f"generated example {number}", *pair) for number, pair in enumerate(examples, start=1)]


def _tokenised(
    tokenizer: "Tokenizer", ends: Sequence[int], prompt: DataPrompt, answer: str | Message, config: SftConfig
) -> Example:
    has_template = not isinstance(config.data, CountdownSftData) and config.data.apply_chat_template
    arguments = config.model.chat_template_kwargs
    template: dict[str, Any] = {"apply_chat_template": has_template, "chat_template_kwargs": arguments}
    prompt_ids = encode_prompt(tokenizer, prompt, system_prompt=None, **template)
    answer_ids = encode_response(tokenizer, prompt, answer, ends, **template)
    earlier = []
    if config.learns_all_turns:
        earlier = find_turns(tokenizer, prompt, prompt_ids, ends, chat_template_kwargs=arguments)
    token_ids = [*prompt_ids, *answer_ids]
    return Example(token_ids=token_ids, answers=[*earlier, range(len(prompt_ids), len(token_ids))])


def batches(count: int, config: SftConfig) -> Iterator[list[int]]:
    """``steps`` lists of example numbers: a new seeded permutation per epoch, the same on every rank."""
    generator = torch.Generator().manual_seed(config.seed)
    order: list[int] = []
    for _ in range(config.steps):
        while len(order) < config.batch_size:
            order += torch.randperm(count, generator=generator).tolist()
        yield order[: config.batch_size]
        order = order[config.batch_size :]


def local_batch(examples: list[Example], config: SftConfig, *, dp_rank: int) -> tuple[list[PackedBatch], int]:
    """This rank's micro-batches of a batch, and the number of answer tokens of the whole batch."""
    plan = plan_batches(
        [packed_length(e.token_ids) for e in examples],
        minibatches=[range(len(examples))],
        dp_size=config.layout.dp_size,
        token_budget=config.token_budget,
        microbatch_multiple=config.layout.microbatch_multiple,
    )
    ids = plan.sequence_ids(dp_rank)
    mine = [examples[i] for i in ids]
    packed = pack_responses([e.token_ids for e in mine], [e.answers for e in mine], ids)
    counted = sum(len(answer) for e in examples for answer in e.answers)
    return [packed.select(rows) for rows in plan.rows(dp_rank)[0]], counted
