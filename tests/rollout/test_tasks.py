"""Countdown against brute force, and the user's files, whole and broken."""

import json
import math
import random
import re
from collections import Counter
from dataclasses import replace
from itertools import permutations, product
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from configs.schema.run import JsonlSftData
from configs.schema.task import CountdownTask, Gsm8kTask, JsonlTask
from rollout.records import WithTools
from rollout.rewards import countdown_reward
from rollout.rewards.arithmetic import evaluate
from rollout.tasks import countdown as cd
from rollout.tasks import (
    files,
    first_problem,
    generate_sft_examples,
    load_task,
    longer_than,
    read_pairs,
    survey_task_file,
)
from rollout.tiny_model import make_tiny_countdown_model
from rollout.tokenization import encode_response, load_tokenizer
from tests.support.chat_tokenizer import chat_tokenizer


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models") / "tiny"
    make_tiny_countdown_model(folder, seed=0)
    return load_tokenizer(folder)


@pytest.fixture(scope="module")
def three(tokenizer):
    return load_task(CountdownTask(), tokenizer=tokenizer)


def brute_force_values(numbers: tuple[int, ...]) -> set[int]:
    """Values of all binary trees over all orders of the numbers: every place for the outermost operator,
    recursively."""

    def values(row):
        if len(row) == 1:
            return {row[0]}
        found = set()
        for cut in range(1, len(row)):
            for a, b in product(values(row[:cut]), values(row[cut:])):
                found |= {a + b, a - b, a * b}
        return found

    return set().union(*(values(order) for order in permutations(numbers)))


def brute_force_texts(numbers: tuple[int, ...]) -> dict[str, int]:
    """{text: value} of all fully parenthesised expressions, each stripped of every pair of parentheses that
    changes nothing."""

    def texts(row):
        if len(row) == 1:
            return {str(row[0])}
        pairs = (p for cut in range(1, len(row)) for p in product(texts(row[:cut]), texts(row[cut:])))
        return {f"({a}{op}{b})" for a, b in pairs for op in "+-*"}

    def strip(text):
        """Drop pairs of parentheses one at a time, where the text stays the same function of its numbers."""
        for pair in re.finditer(r"\(", text):
            depth, start = 0, pair.start()
            for end in range(start, len(text)):
                depth += (text[end] == "(") - (text[end] == ")")
                if depth == 0:
                    break
            shorter = text[:start] + text[start + 1 : end] + text[end + 1 :]
            if same_everywhere(text, shorter):
                return strip(shorter)
        return text

    return {
        text: evaluate(text).value for order in permutations(numbers) for text in map(strip, texts(order))
    }


def same_everywhere(first: str, second: str) -> bool:
    """Whether two texts with their numbers in the same order are the same function of those numbers (checked
    at random points)."""
    rng = random.Random(1)
    for _ in range(4):
        draws = [str(rng.randrange(10**6, 10**7)) for _ in range(len(re.findall(r"\d+", first)))]
        replaced = []
        for text in (first, second):
            left = iter(draws)
            replaced.append(re.sub(r"\d+", lambda _, left=left: next(left), text))
        if evaluate(replaced[0]).value != evaluate(replaced[1]).value:
            return False
    return True


def test_all_and_only_solvable_problems(three):
    problems = {prompt.reference for prompts in (three.train, three.heldout) for prompt in prompts}
    assert len(problems) == len(three.train) + len(three.heldout)
    rng = random.Random(0)
    for _ in range(150):
        numbers = tuple(sorted(rng.choices(range(1, 21), k=3)))
        expected = {
            f"{' '.join(map(str, numbers))}={value}"
            for value in brute_force_values(numbers)
            if 1 <= value <= 100
        }
        assert {p for p in problems if p.startswith(" ".join(map(str, numbers)) + "=")} == expected


@pytest.mark.parametrize("size", [1, 2, 4])
def test_reachable_values_by_brute_force(size):
    rng = random.Random(size)
    for _ in range(5):
        numbers = tuple(sorted(rng.choices(range(1, 13), k=size)))
        assert cd.reachable(numbers, 60) == {v for v in brute_force_values(numbers) if 1 <= v <= 60}


def test_prompts(three, tokenizer):
    prompt = next(p for p in three.train if p.reference == "1 2 3=6")
    assert (prompt.text, prompt.prompt_id) == ("1 2 3=6:", "countdown:1 2 3=6")
    assert tokenizer.decode(prompt.token_ids) == prompt.text
    assert [p.text for p in three.train[5:8]] == [three.train[i].text for i in (5, 6, 7)]


def test_train_and_heldout_are_disjoint_by_construction(three, tokenizer):
    train, heldout = ({p.reference for p in prompts} for prompts in (three.train, three.heldout))
    assert not train & heldout
    assert len(heldout) / len(train | heldout) == pytest.approx(1 / 16, abs=0.01)
    wider = load_task(CountdownTask(max_number=25, max_target=120), tokenizer=tokenizer)
    # Another range never turns a held-out problem into a training one.
    assert not {p.reference for p in wider.train} & heldout


def test_a_larger_share_holds_out_more_of_the_same():
    problems = list(cd.solvable_problems(CountdownTask(max_number=8)))
    small, large = ({p for p in problems if cd.is_heldout(p, f)} for f in (0.1, 0.4))
    assert small < large


def test_large_settings_are_a_fixed_subset():
    config = CountdownTask(num_numbers=5, max_number=30)
    choices = cd._number_choices(config)
    assert choices == cd._number_choices(config) and len(set(choices)) == cd.MAX_CHOICES[5]
    assert all(list(c) == sorted(c) and len(c) == 5 and c[0] >= 1 and c[-1] <= 30 for c in choices)
    assert max(c[-1] for c in choices) == 30 and min(c[0] for c in choices) == 1


def test_impossible_settings(tokenizer):
    with pytest.raises(ValueError, match="no Countdown problem is left"):
        load_task(
            CountdownTask(num_numbers=1, max_number=1, max_target=1, heldout_fraction=1 - 1e-9),
            tokenizer=tokenizer,
        )


def test_a_tokenizer_without_the_characters_is_refused(tokenizer):
    class Narrow:
        """The real tokenizer with one character lost, as in a vocabulary that lacks it."""

        unk_token_id, name_or_path = tokenizer.unk_token_id, "narrow"
        decode = staticmethod(tokenizer.decode)

        @staticmethod
        def encode(text, **options):
            return tokenizer.encode(text.replace("*", "?"), **options)

    with pytest.raises(ValueError, match=r"narrow cannot write \['\*'\]"):
        load_task(CountdownTask(), tokenizer=Narrow())


@pytest.mark.parametrize("numbers", [(3, 5), (2, 13, 14), (2, 2, 4), (6, 6, 6), (2, 3, 5, 11), (3, 3, 8, 8)])
def test_counts_and_draws_cover_every_distinct_expression(numbers):
    expected = brute_force_texts(numbers)
    assert cd.value_counts(numbers) == Counter(expected.values())
    if len(numbers) > 3:
        return
    rng = random.Random(0)
    draws = Counter(cd.random_expression(numbers, rng) for _ in range(60 * len(expected)))
    assert dict(draws.keys()) == expected
    assert max(draws.values()) < 2 * 60 and min(draws.values()) > 60 / 2.5  # uniform: 60 +- 5 sigma is 21..99


@pytest.mark.parametrize(("numbers", "value"), [((2, 13, 14), 3), ((2, 2, 4), 8), ((2, 3, 5, 11), 10)])
def test_solutions_are_drawn_uniformly(numbers, value):
    solutions = {text for text, v in brute_force_texts(numbers).items() if v == value}
    rng = random.Random(0)
    draws = Counter(cd.random_solution(numbers, value, rng) for _ in range(400 * len(solutions)))
    assert set(draws) == solutions
    assert all(abs(count - 400) < 100 for count in draws.values())  # 5 sigma


def test_no_solution_is_an_error():
    with pytest.raises(ValueError, match="no expression of"):
        cd.random_solution((1, 2), 17, random.Random(0))


@pytest.mark.parametrize("num_numbers", [3, 4])
def test_sft_examples(num_numbers):
    config = CountdownTask(num_numbers=num_numbers, max_number=20 if num_numbers == 3 else 9)
    count, noise = 6000, 0.3
    examples = generate_sft_examples(config, count=count, noise=noise, seed=1)
    assert len(examples) == count
    scores = [countdown_reward(prompt.removesuffix(":"), answer) for prompt, answer in examples]
    assert all(score.parts["valid"] == 1 for score in scores)  # wrong answers use the same numbers
    correct = sum(score.value for score in scores) / count
    assert correct == pytest.approx(1 - noise, abs=4 * (noise * (1 - noise) / count) ** 0.5)
    train = {
        cd.prompt_text(p)
        for p in cd.solvable_problems(config)
        if not cd.is_heldout(p, config.heldout_fraction)
    }
    assert {prompt for prompt, _ in examples} <= train


def test_sft_seed_decides_everything():
    config = CountdownTask(max_number=9)
    first, again, other = (
        generate_sft_examples(config, count=200, noise=0.3, seed=seed) for seed in (7, 7, 8)
    )
    assert first == again != other


def test_sft_without_noise_is_all_correct():
    examples = generate_sft_examples(CountdownTask(max_number=9), count=500, noise=0.0, seed=0)
    assert all(countdown_reward(prompt.removesuffix(":"), answer).value == 1 for prompt, answer in examples)


# --- files
# -------------------------------------------------------------------------------------------------------------------------


def write_lines(path: Path, *records) -> Path:
    path.write_text("".join(f"{r if isinstance(r, str) else json.dumps(r)}\n" for r in records))
    return path


def gsm8k(path: Path, **options) -> Gsm8kTask:
    return Gsm8kTask(type="gsm8k", train_path=path, apply_chat_template=False, **options)


def jsonl(path: Path, **options) -> JsonlTask:
    return JsonlTask(type="jsonl", train_path=path, apply_chat_template=False, **options)


GOOD = {"question": "1+1", "answer": "One and one.\n#### 1,002"}


def test_gsm8k(tmp_path, tokenizer):
    path = write_lines(
        tmp_path / "train.jsonl",
        GOOD,
        "",
        {"question": "2", "answer": "#### -3"},
        {"question": "3", "answer": "#### $-1,234,567.50 or so"},
    )
    task = load_task(gsm8k(path), tokenizer=tokenizer)
    assert [(p.text, p.reference) for p in task.train] == [
        ("1+1", "1002"),
        ("2", "-3"),
        ("3", "$-1234567.50 or so"),
    ]
    assert len(task.heldout) == 0
    assert task.train[0].token_ids == tokenizer.encode("1+1")


def test_parquet_holds_the_same_as_jsonl(tmp_path, tokenizer):
    rows = [{"question": str(i), "answer": f"#### {i}"} for i in range(5000)]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "a.parquet")
    from_rows = load_task(gsm8k(tmp_path / "a.parquet"), tokenizer=tokenizer)
    from_lines = load_task(gsm8k(write_lines(tmp_path / "a.jsonl", *rows)), tokenizer=tokenizer)
    without_place = [
        [replace(prompt, place=None) for prompt in task.train] for task in (from_rows, from_lines)
    ]
    assert without_place[0] == without_place[1] and len(from_rows.train) == 5000


def test_jsonl_with_own_fields_numbers_and_heldout(tmp_path, tokenizer):
    train = write_lines(tmp_path / "a.jsonl", {"q": "1", "a": 7}, {"q": "1", "a": 7}, {"q": "1", "a": 0.5})
    heldout = write_lines(tmp_path / "b.jsonl", {"q": "2", "a": "x"})
    task = load_task(
        jsonl(train, heldout_path=heldout, prompt_field="q", answer_field="a"), tokenizer=tokenizer
    )
    assert [p.reference for p in task.train] == ["7", "7", "0.5"] and [p.reference for p in task.heldout] == [
        "x"
    ]
    ids = [p.prompt_id for p in task.train]
    assert len(set(ids)) == 3 and ids[1] == f"{ids[0]}#2"


def test_a_file_of_many_is_read_once_for_all_who_ask_for_its_survey(tmp_path, monkeypatch):
    read, read_records = [], files.read_records

    def reading(path, *arguments, **named):
        read.append(path)
        return read_records(path, *arguments, **named)

    monkeypatch.setattr(files, "read_records", reading)
    sets = [tmp_path / f"{number}.jsonl" for number in range(40)]
    for path in sets:
        write_lines(path, {"prompt": path.stem, "answer": "1"})
    config = jsonl(sets[0])
    for _ in range(2):
        assert [survey_task_file(config, path).count for path in sets] == [1] * len(sets)
    assert read == sets


def dapo_row(prompt=({"content": "30 + 4?", "role": "user"},), **changes) -> dict:
    """As DAPO-Math-17k and AIME-2024 have it."""
    return {
        "data_source": "math_dapo", "prompt": list(prompt), "ability": "MATH", "reward_model": {"ground_truth": "34", "style": "rule"},
        "extra_info": {"index": "9a9b"},
    } | changes  # fmt: skip


@pytest.mark.parametrize("suffix", ["parquet", "jsonl"])
def test_the_public_dapo_files_are_read_as_they_are(tmp_path, tokenizer, suffix):
    rows, path = (
        [dapo_row(), dapo_row(reward_model={"ground_truth": "35", "style": "rule"})],
        tmp_path / f"a.{suffix}",
    )
    if suffix == "parquet":
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    else:
        write_lines(path, *rows)
    task = load_task(jsonl(path, answer_field="reward_model.ground_truth"), tokenizer=tokenizer)
    assert [(p.text, p.reference) for p in task.train] == [("30 + 4?", "34"), ("30 + 4?", "35")]
    survey = survey_task_file(jsonl(path, answer_field="reward_model.ground_truth"), path)
    assert (survey.count, survey.distinct, survey.longest_bytes) == (2, 1, 7)
    assert [p.place for p in task.train] == [
        f"{path}:{'row' if suffix == 'parquet' else 'line'} {number}" for number in (1, 2)
    ]


def test_prompts_keep_their_records_where_asked(tmp_path, tokenizer):
    rows = [dapo_row(), dapo_row(level=2)]
    config = jsonl(write_lines(tmp_path / "a.jsonl", *rows), answer_field="reward_model.ground_truth")
    assert [prompt.row for prompt in load_task(config, tokenizer=tokenizer, keep_rows=True).train] == rows
    assert [prompt.row for prompt in load_task(config, tokenizer=tokenizer).train] == [None, None]


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_prompts_to_train_on_keep_their_source_where_asked(tmp_path, tokenizer, suffix):
    """Those held out need none."""
    names = ["math", 5] if suffix == "jsonl" else ["math", "5"]  # a column has one type
    rows = [{"prompt": "1", "answer": "1", "of": {"source": name}, "more": "long"} for name in names]
    heldout = [{"prompt": "1", "answer": "1"}]
    paths = [tmp_path / f"{name}.{suffix}" for name in ("train", "heldout")]
    for path, some in zip(paths, (rows, heldout), strict=True):
        if suffix == "jsonl":
            write_lines(path, *some)
        else:
            pyarrow.parquet.write_table(pyarrow.Table.from_pylist(some), path)
    config = jsonl(paths[0], heldout_path=paths[1])
    task = load_task(config, tokenizer=tokenizer, source_field="of.source")
    assert [prompt.row for prompt in task.train] == [{"of.source": "math"}, {"of.source": "5"}]
    assert [prompt.row for prompt in task.heldout] == [None]
    kept = load_task(config, tokenizer=tokenizer, source_field="of.source", keep_rows=True).train
    assert [prompt.row["more"] for prompt in kept] == ["long", "long"]
    with pytest.raises(
        ValueError, match=rf"train\.{suffix}:\w+ 1: field `source` is missing; this record has"
    ):
        load_task(config, tokenizer=tokenizer, source_field="source")


def test_a_field_whose_own_name_has_a_dot_comes_first(tmp_path, tokenizer):
    path = write_lines(tmp_path / "a.jsonl", {"prompt": "1", "a.b": "whole", "a": {"b": "inner"}})
    assert load_task(jsonl(path, answer_field="a.b"), tokenizer=tokenizer).train[0].reference == "whole"


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (
            dapo_row(reward_model={"style": "rule"}),
            r"`reward_model.ground_truth` is missing; this record has `data_source`, `prompt`",
        ),
        (dapo_row(reward_model="34"), r"`reward_model.ground_truth` is missing"),
        (dapo_row(reward_model={"ground_truth": ["34"]}), r"`reward_model.ground_truth` is a list"),
        (
            dapo_row([{"role": "system", "content": "x"}, {"role": "user", "content": "1"}]),
            r"`prompt` is a conversation of system, user, which only a chat template .*set apply_chat_template: true",
        ),
        (
            dapo_row([{"role": "assistant", "content": "x"}]),
            r"`prompt` is a conversation of assistant, which ends with",
        ),
        (dapo_row([{"role": "user"}]), r"`prompt\[0\]\.content` is null"),
        (dapo_row([]), r"`prompt` is a list"),
        (dapo_row(["30 + 4?"]), r"`prompt` is a list"),
    ],
)
def test_other_conversations_and_lost_answers_are_named(tmp_path, tokenizer, row, message):
    path = write_lines(tmp_path / "a.jsonl", dapo_row(), row)
    with pytest.raises(ValueError, match=rf"a\.jsonl:line 2: .*{message}"):
        load_task(jsonl(path, answer_field="reward_model.ground_truth"), tokenizer=tokenizer)


SYSTEM, ASKED = {"role": "system", "content": "Be brief."}, {"role": "user", "content": "2 + 2?"}
ANSWERED = {"role": "assistant", "content": "4"}


def in_chat(path: Path, **options) -> JsonlTask:
    return JsonlTask(type="jsonl", train_path=path, **options)


contents = st.text(st.characters(exclude_categories=["C"]), min_size=1, max_size=12).filter(str.strip)
rounds = st.lists(st.tuples(contents, contents), max_size=2)


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_conversations_have_the_tokens_of_transformers(tmp_path, suffix):
    @settings(max_examples=40, deadline=None)
    @given(
        drawn=st.lists(st.tuples(st.none() | contents, rounds, contents), min_size=1, max_size=4),
        family=st.sampled_from(["qwen2_5", "qwen3", "llama3_1"]),
    )
    def check(drawn, family):
        conversations = []
        for system, turns, last in drawn:
            roles = [("system", system)] if system else []
            roles += [pair for asked, told in turns for pair in (("user", asked), ("assistant", told))]
            conversations.append([{"role": r, "content": c} for r, c in [*roles, ("user", last)]])
        rows, path = [{"prompt": c, "answer": "1"} for c in conversations], tmp_path / f"a.{suffix}"
        if suffix == "parquet":
            pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
        else:
            write_lines(path, *rows)
        reader = chat_tokenizer(family)
        prompts = load_task(in_chat(path), tokenizer=reader).train
        assert [prompt.token_ids for prompt in prompts] == [
            reader.apply_chat_template(c, add_generation_prompt=True, return_dict=False)
            for c in conversations
        ]
        assert [prompt.messages or ({"role": "user", "content": prompt.text},) for prompt in prompts] == [
            tuple(c) for c in conversations
        ]
        survey = survey_task_file(in_chat(path), path)
        assert survey.distinct == len({json.dumps(c) for c in conversations})
        assert len({prompt.prompt_id for prompt in prompts}) == len(prompts)

    check()


def test_a_conversation_is_the_same_prompt_in_either_kind_of_file(tmp_path):
    """Also where parquet gives every message the fields of all, or sorts them."""
    call = {"type": "function", "function": {"name": "add", "arguments": '{"a": 2}'}}
    called = [
        ASKED, {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "4", "name": "add"},
    ]  # fmt: skip
    rows = [
        {"prompt": called, "answer": "4"},
        {"prompt": [SYSTEM, ASKED], "answer": "4"},
        {"prompt": [ASKED], "answer": "4"},
    ]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "a.parquet")
    write_lines(tmp_path / "a.jsonl", *rows)
    reader = chat_tokenizer("qwen3")
    found = [load_task(in_chat(tmp_path / name), tokenizer=reader).train for name in ("a.parquet", "a.jsonl")]
    assert [p.prompt_id for p in found[0]] == [p.prompt_id for p in found[1]]
    assert [p.token_ids for p in found[0]] == [p.token_ids for p in found[1]]
    assert len({p.prompt_id for p in found[0]}) == 3
    calls, system, single = found[0]
    assert reader.decode(calls.token_ids).count("<tool_call>") == 1
    assert calls.messages[1] == {"role": "assistant", "content": "", "tool_calls": [call]}
    assert [p.text for p in (system, single)] == ["2 + 2?", "2 + 2?"], (
        "rewards do not read the system message"
    )
    assert calls.text == "user: 2 + 2?\n\nassistant: \n\ntool: 4"


def test_the_text_and_the_id_of_a_single_message_are_those_of_the_text(tmp_path):
    rows = [{"prompt": [ASKED], "answer": "4"}, {"prompt": ASKED["content"], "answer": "4"}]
    first, second = load_task(
        in_chat(write_lines(tmp_path / "a.jsonl", *rows)), tokenizer=chat_tokenizer()
    ).train
    assert second.prompt_id == f"{first.prompt_id}#2" and first.token_ids == second.token_ids
    # Of every version, since seeds and the order hang on it.
    assert first.prompt_id == "jsonl:53660c4d2901fc9f"


@pytest.mark.parametrize(
    ("prompt", "options", "message"),
    [
        ([SYSTEM, {"role": "human", "content": "x"}], {}, r"field `prompt\[1\]\.role` is 'human'; .*system, user, assistant, tool"),
        ([{"from": "human", "value": "x"}], {}, r"field `prompt\[0\]\.role` is missing; each message is"),
        ([ASKED, ANSWERED], {}, r"field `prompt` is a conversation of user, assistant, .* the role assistant; end it with"),
        ([ASKED, SYSTEM], {}, r"field `prompt` is a conversation of user, system, which ends with"),
        ([SYSTEM, {"role": "user", "content": [{"text": "x"}]}], {}, r"field `prompt\[1\]\.content` is a list; it must be text"),
        ([SYSTEM, {"role": "user", "content": " "}], {}, r"field `prompt\[1\]\.content` is empty"),
        ([ASKED, {"role": "assistant", "content": None}, ASKED], {}, r"field `prompt\[1\]\.content` is null"),
        ([{"role": "system", "content": "\ud800"}, ASKED], {}, r"field `prompt\[0\]\.content` has half of a surrogate pair"),
        ([SYSTEM, ASKED], {"system_prompt": "Think."}, r".* and task\.system_prompt adds another system message; remove task"),
    ],
)  # fmt: skip
def test_a_conversation_that_cannot_be_rendered_is_named(tmp_path, prompt, options, message):
    path = write_lines(
        tmp_path / "a.jsonl", {"prompt": "1", "answer": "1"}, {"prompt": prompt, "answer": "4"}
    )
    for read in (
        lambda: load_task(in_chat(path, **options), tokenizer=chat_tokenizer()),
        lambda: survey_task_file(in_chat(path, **options), path),
    ):
        with pytest.raises(ValueError, match=rf"^\S+a\.jsonl:line 2: {message}"):
            read()


def test_a_conversation_that_the_template_refuses_is_named_when_it_is_drawn(tmp_path):
    reader = chat_tokenizer(template="{{ messages[0].content }}{{ 1 // (2 - messages | length) }}")
    rows = [{"prompt": "1", "answer": "1"}, {"prompt": [SYSTEM, ASKED], "answer": "4"}]
    task = load_task(in_chat(write_lines(tmp_path / "a.jsonl", *rows)), tokenizer=reader)
    with pytest.raises(
        ValueError, match=r"a\.jsonl:line 2: the chat template of this model refuses .*system, user: Zero"
    ):
        _ = task.train[1]


def test_prompt_ids_do_not_depend_on_the_place(tmp_path, tokenizer):
    records = [{"prompt": str(i), "answer": "1"} for i in range(4)]
    ids = []
    for name, order in (("a", records), ("b", records[::-1])):
        task = load_task(jsonl(write_lines(tmp_path / f"{name}.jsonl", *order)), tokenizer=tokenizer)
        ids.append({p.text: p.prompt_id for p in task.train})
    assert ids[0] == ids[1]


def test_chat_template_is_asked_for_at_load_time(tmp_path, tokenizer):
    path = write_lines(tmp_path / "a.jsonl", GOOD)
    with pytest.raises(ValueError, match="apply_chat_template: false"):
        load_task(Gsm8kTask(type="gsm8k", train_path=path), tokenizer=tokenizer)


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ('{"question": "1", "answer": ', r"line 3: not valid JSON .*one JSON object"),
        ("[1, 2]", r"line 3: a list, not an object"),
        (
            {"question": "1", "solution": "#### 1"},
            r"line 3: field `answer` is missing; this record has `question`, `solution`",
        ),
        ({"question": "1", "answer": None}, r"line 3: field `answer` is null"),
        ({"question": ["1"], "answer": "#### 1"}, r"line 3: field `question` is a list"),
        ({"question": math.nan, "answer": "#### 1"}, r"line 3: field `question` is nan, not a finite number"),
        ({"question": "1", "answer": -math.inf}, r"line 3: field `answer` is -inf, not a finite number"),
        ({"question": " ", "answer": "#### 1"}, r"line 3: field `question` is empty"),
        ({"question": "1", "answer": "eleven"}, r"line 3: field `answer` has no `####`"),
        ({"question": "1", "answer": "#### eleven"}, r"line 3: field `answer` has no number after"),
        (
            {"question": "1", "answer": "#### 10,5"},
            r"line 3: field `answer` has a comma .*'10,5'; write e\.g\.",
        ),
        ({"question": "1", "answer": "#### 1,0000"}, r"line 3: field `answer` has a comma"),
        ({"question": "1", "answer": "#### 12,34,567"}, r"line 3: field `answer` has a comma"),
    ],
)
def test_broken_lines_are_named(tmp_path, tokenizer, bad, message):
    path = write_lines(tmp_path / "train.jsonl", GOOD, "", bad, GOOD)
    with pytest.raises(ValueError, match=rf"train\.jsonl:{message}"):
        load_task(gsm8k(path), tokenizer=tokenizer)


def test_broken_encoding_names_the_line(tmp_path, tokenizer):
    path = tmp_path / "a.jsonl"
    path.write_bytes(json.dumps(GOOD).encode() + b'\n{"question": "\xff"}\n')
    with pytest.raises(ValueError, match=r"a\.jsonl:line 2: not UTF-8"):
        load_task(gsm8k(path), tokenizer=tokenizer)


def test_a_byte_order_mark_is_no_error(tmp_path, tokenizer):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b"\xef\xbb\xbf" + json.dumps(GOOD).encode())
    assert len(load_task(gsm8k(path), tokenizer=tokenizer).train) == 1


def test_missing_empty_unknown_and_broken_files(tmp_path, tokenizer):
    with pytest.raises(ValueError, match=r"gone\.jsonl does not exist"):
        load_task(gsm8k(tmp_path / "gone.jsonl"), tokenizer=tokenizer)
    with pytest.raises(ValueError, match=r"gone\.jsonl does not exist"):
        load_task(
            gsm8k(write_lines(tmp_path / "a.jsonl", GOOD), heldout_path=tmp_path / "gone.jsonl"),
            tokenizer=tokenizer,
        )
    (tmp_path / "locked.jsonl").symlink_to("/proc/self/mem")  # nobody can read its beginning, root neither
    with pytest.raises(
        ValueError, match=r"locked\.jsonl cannot be read \(Input/output error\); let this user"
    ):
        load_task(gsm8k(tmp_path / "locked.jsonl"), tokenizer=tokenizer)
    with pytest.raises(ValueError, match="holds no records"):
        load_task(gsm8k(write_lines(tmp_path / "b.jsonl")), tokenizer=tokenizer)
    with pytest.raises(ValueError, match=r"must end in \.jsonl"):
        load_task(gsm8k(write_lines(tmp_path / "c.csv", "a,b")), tokenizer=tokenizer)
    with pytest.raises(ValueError, match="cannot be read as parquet"):
        load_task(gsm8k(write_lines(tmp_path / "d.parquet", "PAR")), tokenizer=tokenizer)


def test_a_kept_row_is_whole_in_either_kind_of_file(tmp_path, tokenizer):
    row = {"prompt": "1+1", "answer": "2", "level": 3}
    (tmp_path / "a.jsonl").write_text(json.dumps(row) + "\n")
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([row]), tmp_path / "a.parquet")
    for name in ("a.jsonl", "a.parquet"):
        config = JsonlTask(type="jsonl", train_path=tmp_path / name, apply_chat_template=False)
        assert [prompt.row for prompt in load_task(config, tokenizer=tokenizer, keep_rows=True).train] == [
            row
        ]
        first = first_problem(config)
        assert (first.text, first.reference, first.row) == ("1+1", "2", row)


def test_the_first_problem_of_countdown_can_be_solved():
    assert first_problem(CountdownTask(num_numbers=2, max_number=3, max_target=6)).reference.count("=") == 1


def test_parquet_rows_are_named(tmp_path, tokenizer):
    rows = [{"question": "1", "answer": "#### 1"}] * 5000 + [{"question": "1", "answer": None}]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "a.parquet")
    with pytest.raises(ValueError, match=r"a\.parquet:row 5001: field `answer` is null"):
        load_task(gsm8k(tmp_path / "a.parquet"), tokenizer=tokenizer)


def pairs_of(path: Path, **options) -> list:
    return read_pairs(JsonlSftData(type="jsonl", path=path, **options))


def test_read_pairs(tmp_path):
    path = write_lines(tmp_path / "a.jsonl", {"prompt": "1", "response": "2", "other": 3})
    assert pairs_of(path) == [(f"{path}:line 1", "1", "2")]
    turns = write_lines(tmp_path / "turns.jsonl", {"prompt": [SYSTEM, ASKED], "response": "4"})
    assert pairs_of(turns) == [(f"{turns}:line 1", (SYSTEM, ASKED), "4")]
    with pytest.raises(ValueError, match=r"turns\.jsonl:line 1: .*only a chat template"):
        pairs_of(turns, apply_chat_template=False)
    with pytest.raises(
        ValueError,
        match=r"b\.jsonl holds no records; write one per line, with the fields `prompt` and `response`",
    ):
        pairs_of(write_lines(tmp_path / "b.jsonl", "", " "))


ADD = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}
CALLS = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "add", "arguments": {}}}]}
TOLD = {"role": "tool", "content": "4"}
ALL = {"learned_turns": "all"}


def test_pairs_of_trl(tmp_path):
    """``messages``, or ``prompt`` and ``completion`` of messages, with ``tools`` as objects, as JSON, or none."""
    whole = write_lines(
        tmp_path / "a.jsonl",
        {"messages": [SYSTEM, ASKED, CALLS, TOLD, ANSWERED], "tools": [ADD]},
        {"messages": [ASKED, CALLS | {"content": None}], "tools": json.dumps([ADD])},
        {"messages": [ASKED, ANSWERED], "tools": []},
    )
    assert [pair[1:] for pair in pairs_of(whole, messages_field="messages", tools_field="tools")] == [
        (WithTools((SYSTEM, ASKED, CALLS, TOLD), (ADD,)), ANSWERED),
        (WithTools((ASKED,), (ADD,)), CALLS),
        (ASKED["content"], ANSWERED),
    ]
    apart = write_lines(
        tmp_path / "b.jsonl",
        {"prompt": [SYSTEM, ASKED], "completion": [ANSWERED]},
        {"prompt": "2 + 2?", "completion": [ANSWERED]},
    )
    assert [pair[1:] for pair in pairs_of(apart, response_field="completion")] == [
        ((SYSTEM, ASKED), ANSWERED),
        ("2 + 2?", ANSWERED),
    ]


def test_calls_of_several_tools_are_the_same_in_either_kind_of_file(tmp_path):
    """Of which parquet gives each the arguments of all, and each schema the properties of all."""
    rows = [
        {
            "messages": [ASKED, CALLS | {"tool_calls": [{"function": {"name": name, "arguments": given}}]}],
            "tools": [{"function": {"name": name, "parameters": {"properties": {n: {"type": "x"} for n in given}}}}],
        }
        for name, given in (("add", {"a": 2, "b": 2}), ("find", {"of": ["x"]}))
    ]  # fmt: skip
    lines = write_lines(tmp_path / "a.jsonl", *rows)
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "a.parquet")
    found, reader = [], chat_tokenizer("qwen2_5")
    for path in (lines, tmp_path / "a.parquet"):
        pairs = pairs_of(path, messages_field="messages", tools_field="tools")
        found.append([pair[1:] for pair in pairs])
    assert found[0] == found[1]
    told = [reader.decode(encode_response(reader, *pair, [reader.eos_token_id])) for pair in found[1]]
    assert '"arguments": {"of": ["x"]}}' in told[1] and "null" not in "".join(told)


@pytest.mark.parametrize(
    ("record", "options", "message"),
    [
        ({"messages": "4"}, {}, r"field `messages` must be messages .* the last one the response"),
        ({"messages": []}, {}, r"field `messages` must be messages"),
        ({"messages": [ASKED]}, {}, r"field `messages` is a conversation of user; end it with a message of the role assistant"),
        ({"messages": [ANSWERED]}, {}, r"of assistant; the last message, the response to learn, must follow one of the role user or tool"),
        ({"messages": [ASKED, ANSWERED, ANSWERED]}, {}, r"of user, assistant, assistant; the last message, .* must follow"),
        ({"messages": [ASKED, ANSWERED | {"content": " "}]}, {}, r"field `messages\[1\]\.content` is empty"),
        ({"messages": [{"from": "human"}, ANSWERED]}, {}, r"field `messages\[0\]\.role` is missing"),
        ({"messages": [SYSTEM, ANSWERED, ASKED, ANSWERED]}, ALL, r"message 2, a response to learn, must follow one of the role"),
        ({"messages": [ANSWERED, ASKED, ANSWERED]}, ALL, r"message 1, a response to learn, must follow one of the role"),
        ({"messages": [ASKED, ANSWERED, ANSWERED, ASKED, ANSWERED]}, ALL, r"message 3, a response to learn, must follow one"),
        ({"messages": [ASKED, ANSWERED | {"content": ""}, ASKED, ANSWERED]}, ALL, r"field `messages\[1\]\.content` is empty"),
        ({"prompt": "1", "completion": [CALLS, TOLD, ANSWERED]}, {}, r"field `completion` is a list, .*into a separate record"),
        ({"prompt": "1", "completion": [ASKED]}, {}, r"field `completion` is a list, but not of one message of the role assistant"),
        ({"prompt": "1", "completion": [ANSWERED]}, {"apply_chat_template": False}, r"field `completion` is a message, which only a chat"),
        ({"messages": [ASKED, ANSWERED]}, {"tools_field": "tools"}, r"field `tools` is missing; this record has `messages`"),
        ({"messages": [ASKED, ANSWERED], "tools": "add"}, {"tools_field": "tools"}, r"field `tools` is not valid JSON"),
        ({"messages": [ASKED, ANSWERED], "tools": ["add"]}, {"tools_field": "tools"}, r"field `tools` must be a list of JSON schemas"),
    ],
)  # fmt: skip
def test_a_pair_that_cannot_be_learned_is_named(tmp_path, record, options, message):
    fields = {"messages_field": "messages"} if "messages" in record else {"response_field": "completion"}
    with pytest.raises(ValueError, match=rf"^\S+a\.jsonl:line 1: .*{message}"):
        pairs_of(write_lines(tmp_path / "a.jsonl", record), **fields, **options)


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_prompts_with_tools_have_the_tokens_of_transformers(tmp_path, suffix):
    rows = [
        {"prompt": [ASKED], "answer": "4", "tools": json.dumps([ADD])},
        {"prompt": [SYSTEM, ASKED], "answer": "4", "tools": json.dumps([ADD, ADD])},
        {"prompt": [ASKED], "answer": "4", "tools": None},
    ]
    path = tmp_path / f"a.{suffix}"
    if suffix == "parquet":
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    else:
        write_lines(path, *rows)
    reader = chat_tokenizer("qwen3")
    config = in_chat(path, tools_field="tools")
    prompts = load_task(config, tokenizer=reader).train
    assert [p.token_ids for p in prompts] == [
        reader.apply_chat_template(messages, tools=tools, add_generation_prompt=True, return_dict=False)
        for messages, tools in (([ASKED], [ADD]), ([SYSTEM, ASKED], [ADD, ADD]), ([ASKED], None))
    ]
    assert [p.text for p in prompts] == ["2 + 2?"] * 3 and len({p.prompt_id for p in prompts}) == 3
    first, unaware = first_problem(config), load_task(in_chat(path), tokenizer=reader).train
    assert (first.text, first.tools) == ("2 + 2?", (ADD,)) and unaware[0].token_ids == prompts[2].token_ids
    assert survey_task_file(config, path).distinct == 3
    assert list(longer_than(prompts, len(prompts[0].token_ids))) == [1]
