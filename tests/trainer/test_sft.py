"""The supervised warm start: every example once per epoch and per batch, a true mean over all ranks, and a
model that others load."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import AutoModelForCausalLM

from configs.schema.layout import LayoutConfig
from configs.schema.model import ModelConfig
from configs.schema.run import CountdownSftData, JsonlSftData, SftConfig, SftOptimizerConfig
from rollout.tasks.files import LONGEST_KEPT
from rollout.tiny_model import make_tiny_countdown_model
from rollout.tokenization import load_tokenizer
from tests.parallel.weights.test_hf_headers import TINY
from tests.support.chat_tokenizer import chat_tokenizer
from tests.support.megatron_workers import relative_difference, run_ranks, work_sft
from trainer.batch.plan import packed_length
from trainer.sft import Example, batches, load_examples, local_batch


def sft_config(model: Path = Path("unused"), **changes) -> SftConfig:
    fields = dict(
        kind="sft",
        seed=3,
        steps=10,
        batch_size=12,
        model=ModelConfig(path=model, dtype="float32"),
        data=CountdownSftData(examples=300, noise=0.3),
        output=Path("unused"),
        token_budget=150,
        # Adam's eps is large enough that a rounding error of a tiny gradient is not blown up to a whole step.
        optimizer=SftOptimizerConfig(betas=(0.9, 0.95), eps=1e-4),
    )
    return SftConfig(**{**fields, **changes})


def with_ranks(data_parallel: int, **changes) -> SftConfig:
    return sft_config(layout=LayoutConfig(dp=data_parallel), **changes)


@st.composite
def examples(draw):
    """(a batch of examples of distinct tokens, data-parallel ranks)"""
    data_parallel = draw(st.integers(1, 3))
    count = data_parallel * draw(st.integers(1, 6))
    rounds = st.tuples(st.integers(1, 9), st.integers(1, 12))
    sizes = draw(st.lists(st.lists(rounds, min_size=1, max_size=3), min_size=count, max_size=count))
    return [example_of(1000 * i, rounds) for i, rounds in enumerate(sizes)], data_parallel


def example_of(first: int, rounds: list[tuple[int, int]]) -> Example:
    """Tokens from ``first`` on, of rounds of (what is read, an answer)."""
    places, length = [], 0
    for read, answered in rounds:
        places.append(range(length + read, length + read + answered))
        length += read + answered
    return Example(token_ids=list(range(first, first + length)), answers=places)


def learned_ids(example: Example) -> list[int]:
    return [example.token_ids[place] for answer in example.answers for place in answer]


@settings(max_examples=80, deadline=None)
@given(problem=examples(), slack=st.integers(0, 60))
def test_ranks_share_a_batch_without_loss_or_repeat(problem, slack):
    made, data_parallel = problem
    budget = max(len(e.token_ids) for e in made) - 1 + slack
    config = with_ranks(data_parallel, batch_size=len(made), token_budget=budget)
    targets, num_microbatches = [], set()
    for dp_rank in range(data_parallel):
        microbatches, counted = local_batch(made, config, dp_rank=dp_rank)
        assert counted == sum(len(learned_ids(e)) for e in made), "not the answer tokens of the whole batch"
        num_microbatches.add(len(microbatches))
        for microbatch in microbatches:
            assert microbatch.num_tokens <= budget
            targets += microbatch.targets_T[microbatch.response_mask_T].tolist()
            rows = zip(
                microbatch.sequence_ids_S.tolist(), microbatch.tokens_T.split(microbatch.lengths), strict=True
            )
            assert all(tokens.tolist() == made[row].token_ids[:-1] for row, tokens in rows)
    assert sorted(targets) == [token for e in made for token in learned_ids(e)], (
        "not every answer token exactly once"
    )
    assert len(num_microbatches) == 1, "ranks would wait for each other for ever"


@settings(max_examples=80, deadline=None)
@given(
    count=st.integers(1, 30), batch_size=st.integers(1, 40), steps=st.integers(1, 12), seed=st.integers(0, 99)
)
def test_every_epoch_is_a_permutation(count, batch_size, steps, seed):
    config = sft_config(batch_size=batch_size, steps=steps, seed=seed)
    found = list(batches(count, config))
    assert [len(batch) for batch in found] == [batch_size] * steps
    flat = [row for batch in found for row in batch]
    for start in range(0, len(flat), count):
        epoch = flat[start : start + count]
        assert len(set(epoch)) == len(epoch) and set(epoch) <= set(range(count))
    assert list(batches(count, config)) == found, "ranks, or two runs, would see different batches"


def test_epochs_and_seeds_have_their_own_order():
    config = sft_config(batch_size=50, steps=2)
    first, second = batches(50, config)
    assert first != second and first != sorted(first)
    assert next(batches(50, sft_config(batch_size=50, steps=2, seed=4))) != first


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models") / "tiny"
    make_tiny_countdown_model(folder, seed=0)
    return folder


def test_an_example_is_prompt_answer_and_end(model, tmp_path):
    path = tmp_path / "pairs.jsonl"
    path.write_text(
        "".join(json.dumps({"q": q, "a": a}) + "\n" for q, a in [("1 2 3: 6", " 1+2+3"), ("9:", "(9)")])
    )
    data = JsonlSftData(
        type="jsonl", path=path, prompt_field="q", response_field="a", apply_chat_template=False
    )
    found = load_examples(sft_config(model, data=data))
    tokenizer = load_tokenizer(model)
    assert [tokenizer.decode(e.token_ids) for e in found] == ["1 2 3: 6 1+2+3<eos>", "9:(9)<eos>"]
    assert [tokenizer.decode(learned_ids(e)) for e in found] == [" 1+2+3<eos>", "(9)<eos>"]


def test_an_example_obeys_the_arguments_of_the_template(tmp_path):
    make_tiny_countdown_model(tmp_path / "tiny", seed=0)
    (tmp_path / "tiny/chat_template.jinja").write_text("{{ messages[0].content }}{{ ending }}")
    (tmp_path / "pairs.jsonl").write_text('{"prompt": "1+1", "response": "2"}')
    data = JsonlSftData(type="jsonl", path=tmp_path / "pairs.jsonl")
    config = sft_config(tmp_path / "tiny", data=data)
    model = config.model.model_copy(update={"chat_template_kwargs": {"ending": "="}})
    (found,) = load_examples(config.model_copy(update={"model": model}))
    assert load_tokenizer(tmp_path / "tiny").decode(found.token_ids) == "1+1=2<eos>"
    assert found.answers == [range(4, 6)]


def test_an_example_of_messages_ends_where_its_turn_does(tmp_path):
    """As ``messages`` and as ``prompt`` and ``completion``, with tools; the template's line break is not learned."""
    chat_tokenizer("qwen3").save_pretrained(tmp_path / "model")
    (tmp_path / "model/config.json").write_text(json.dumps(TINY | {"max_position_embeddings": 1000}))
    asked, told = {"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "4"}
    tools = [{"type": "function", "function": {"name": "add"}}]
    found = []
    for fields, record in (
        ({"messages_field": "messages"}, {"messages": [asked, told]}),
        ({"response_field": "completion"}, {"prompt": [asked], "completion": [told]}),
    ):
        path = tmp_path / "pairs.jsonl"
        path.write_text(json.dumps({**record, "tools": tools}))
        data = JsonlSftData(type="jsonl", path=path, tools_field="tools", **fields)
        found += load_examples(sft_config(tmp_path / "model", data=data, token_budget=1000))
    assert found[0] == found[1]
    tokenizer, (example, _) = load_tokenizer(tmp_path / "model"), found
    (answer,) = example.answers
    prompt = str(tokenizer.decode(example.token_ids[: answer.start]))
    assert '"name": "add"' in prompt and prompt.endswith("2 + 2?<|im_end|>\n<|im_start|>assistant\n")
    assert tokenizer.decode(learned_ids(example)) == "<think>\n\n</think>\n\n4<|im_end|>"


def with_template(model: Path, folder: Path) -> Path:
    """A copy of the tiny model that takes conversations: a question ends with ``=``, an answer with the end token."""
    shutil.copytree(model, folder)
    template = (
        "{% for m in messages %}{{ m.content }}{{ '=' if m.role == 'user' else eos_token }}{% endfor %}"
    )
    (folder / "chat_template.jinja").write_text(template)
    return folder


def conversations(path: Path, *records: list[str], **changes) -> JsonlSftData:
    """A file of conversations, each a question, an answer, a question, ..."""
    rows = [
        [{"role": ("user", "assistant")[place % 2], "content": text} for place, text in enumerate(record)]
        for record in records
    ]
    path.write_text("".join(json.dumps({"messages": row}) + "\n" for row in rows))
    return JsonlSftData(type="jsonl", path=path, messages_field="messages", **changes)


def test_all_turns_of_a_conversation_are_learned_in_the_tokens_of_the_last(model, tmp_path):
    folder = with_template(model, tmp_path / "model")
    data = conversations(tmp_path / "a.jsonl", ["1+1", "2"], ["1+1", "2", "5*4", "20"])
    last, every = (
        load_examples(sft_config(folder, data=data.model_copy(update={"learned_turns": turns})))
        for turns in ("last", "all")
    )
    assert [e.token_ids for e in last] == [e.token_ids for e in every]
    assert last[0] == every[0], "one answer is the last and all of them"
    assert [e.answers for e in last] == [[range(4, 6)], [range(10, 13)]]
    assert every[1].answers == [range(4, 6), range(10, 13)]


def test_a_conversation_of_which_the_template_rewrites_a_turn_is_named(model, tmp_path):
    folder = with_template(model, tmp_path / "model")
    template = folder / "chat_template.jinja"
    rewrites = "{{ m.content if loop.last or m.content != '20' else '2' }}"
    template.write_text(template.read_text().replace("{{ m.content }}", rewrites))
    answers = [["5*4", "2", "1", "1"], ["5*4", "20"], ["5*4", "20", "1", "1"]]
    data = conversations(tmp_path / "a.jsonl", *answers, learned_turns="all")
    with pytest.raises(
        ValueError,
        match=r"a\.jsonl:line 3: message 2, .* writes '5\*4=20<eos>' if it is the last one, and '5\*4=2<eos>",
    ):
        load_examples(sft_config(folder, data=data))
    assert len(load_examples(sft_config(folder, data=conversations(tmp_path / "a.jsonl", *answers)))) == 3


@pytest.mark.parametrize(
    ("budget", "most", "said"),
    [
        (8, 8, "more than token_budget=8; raise token_budget"),
        (10**6, 256, "more than the model's max_position_embeddings=256; shorten"),
    ],
)
def test_an_example_that_is_too_long_is_named_at_load(model, tmp_path, budget, most, said):
    path = tmp_path / "pairs.jsonl"
    config = sft_config(
        model, data=JsonlSftData(type="jsonl", path=path, apply_chat_template=False), token_budget=budget
    )
    fits, too_long = (
        json.dumps({"prompt": "1", "response": "1" * (length - 1)}) for length in (most, most + 1)
    )
    path.write_text(fits)
    (found,) = load_examples(config)
    assert packed_length(found.token_ids) == most
    path.write_text(f"{fits}\n\n{too_long}")
    with pytest.raises(ValueError, match=rf"pairs\.jsonl:line 3: takes {most + 1} tokens, {re.escape(said)}"):
        load_examples(config)


def test_generated_examples_are_countdown_answers(model):
    tokenizer = load_tokenizer(model)
    found = load_examples(sft_config(model))
    assert len(found) == 300
    for example in found:
        assert tokenizer.unk_token_id not in example.token_ids
        assert tokenizer.decode(example.token_ids).endswith("<eos>")
        assert re.search(r"[-+*]", tokenizer.decode(learned_ids(example))), "the answer is no expression"


def answer_loss(folder: Path, made: list[Example]) -> float:
    """-mean log p of all answer tokens, by transformers, one sequence at a time, in float64."""
    network = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64).eval()
    losses = []
    with torch.no_grad():
        for e in made:
            log_LV = network(torch.tensor([e.token_ids])).logits[0].log_softmax(-1)
            losses += [-log_LV[i - 1, e.token_ids[i]].item() for answer in e.answers for i in answer]
    return sum(losses) / len(losses)


def reported_losses(lines: list[str]) -> list[float]:
    return [float(found[1]) for line in lines if (found := re.search(r"loss (\d+\.\d+)", line))]


def weights_in(folder: Path) -> dict[str, Tensor]:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).state_dict()


@pytest.mark.engines
def test_a_run_learns_the_same_on_one_rank_and_on_two(model, tmp_path):
    """Loss, saved folder and weights; the first loss is of the whole first batch, against transformers."""
    one, two = (with_ranks(n, model=model, output=tmp_path / f"over {n}") for n in (1, 2))
    lines_of_one = work_sft(one)
    lines_of_two, silent = run_ranks(work_sft, 2, tmp_path / "ranks", two)
    assert silent == [], "ranks other than the first report too"

    made = load_examples(one)
    first_batch = [made[row] for row in next(batches(len(made), one))]
    for lines in (lines_of_one, lines_of_two):
        losses = reported_losses(lines)
        assert losses[0] == pytest.approx(answer_loss(model, first_batch), abs=2e-4)
        assert losses[-1] < losses[0] - 0.3
    assert answer_loss(one.output, made[:60]) < answer_loss(model, made[:60]) - 0.3

    start, after_one, after_two = (weights_in(folder) for folder in (model, one.output, two.output))
    assert relative_difference(after_two, after_one) < 2e-6
    assert relative_difference(after_one, start) > 1e-2
    text = load_tokenizer(one.output).decode(made[0].token_ids)
    assert text == load_tokenizer(model).decode(made[0].token_ids)


@pytest.mark.engines
def test_a_step_of_all_turns_is_that_of_a_slow_reference(model, tmp_path):
    """One step of AdamW by transformers and torch, a conversation at a time. Its eps is far above any gradient, so that the
    step is as long as the gradient."""
    folder = with_template(model, tmp_path / "model")
    made = [
        ["1+1", "2"],
        ["1+1", "2", "5*4", "20"],
        ["7", "7", "8", "8", "10+20", "30"],
        ["3-2", "1", "1", "1"],
    ]
    config = sft_config(
        folder,
        data=conversations(tmp_path / "a.jsonl", *made, learned_turns="all"),
        output=tmp_path / "out",
        steps=1,
        batch_size=len(made),
        token_budget=20,  # several micro-batches, which share the mean over all answer tokens
        optimizer=SftOptimizerConfig(lr=1.0, schedule="constant", eps=10.0, clip_grad=1e9),
        layout=LayoutConfig(dp=1),
    )
    lines, examples = work_sft(config), load_examples(config)
    assert [len(e.answers) for e in examples] == [1, 2, 3, 2]
    assert reported_losses(lines) == [pytest.approx(answer_loss(folder, examples), abs=1e-4)]

    network = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
    start = weights_in(folder)
    total = sum(len(learned_ids(e)) for e in examples)
    for e in examples:
        log_LV = network(torch.tensor([e.token_ids])).logits[0].log_softmax(-1)
        for place in (place for answer in e.answers for place in answer):
            (-log_LV[place - 1, e.token_ids[place]] / total).backward(retain_graph=True)
    torch.optim.AdamW(network.parameters(), lr=1.0, eps=10.0, betas=(0.9, 0.98), weight_decay=0.0).step()
    wanted = {name: (after - start[name]).float() for name, after in network.state_dict().items()}
    found = {name: after - start[name] for name, after in weights_in(config.output).items()}
    assert relative_difference(found, wanted) < 1e-5


@pytest.mark.engines
def test_the_command_says_in_a_sentence_what_ended_it(model, tmp_path):
    path = tmp_path / "pairs.jsonl"
    # The checks before a start tokenise the texts of most bytes alone: this one has fewer, and more tokens.
    responses = [*["é" * 15] * LONGEST_KEPT, "1" * 20]
    path.write_text(
        "".join(json.dumps({"prompt": "1", "response": response}) + "\n" for response in responses)
    )
    data = f"{{type: jsonl, path: {path}, apply_chat_template: false}}"
    (tmp_path / "sft.yaml").write_text(
        f"kind: sft\nmodel: {{path: {model}}}\ndata: {data}\noutput: warm\ntoken_budget: 20\n"
    )
    command = [sys.executable, "-m", "launch", "sft", "sft.yaml", "batch_size=1", "layout.dp=1"]
    env = os.environ | {"PYTHONPATH": str(Path(__file__).resolve().parents[2])}
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1
    assert (
        f"ValueError: {path}:line {len(responses)}: takes 21 tokens, more than token_budget=20" in done.stderr
    )
    assert (
        "Traceback" not in done.stderr
        and "Traceback" in next((tmp_path / "runs").glob("*/logs/sft-rank.log")).read_text()
    )
