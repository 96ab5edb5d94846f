"""What is appended to sampled turns, against the template's rendering of the whole conversation, for the formats of
several families."""

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from rollout.environments.protocol import EpisodeEnded
from rollout.environments.rendering import LONG_TEXT, ChatRenderer, encode_within
from rollout.environments.template_probes import (
    AFTER_SYSTEM,
    DROPS_THINKING,
    EXAMPLE_TOOL,
    NEEDS_CALLS,
    OTHER_HEADER,
    OTHER_TOKENS,
    REWRITES_OTHERS,
    TAKES_NO_SYSTEM,
    TRIMS,
    probe_template,
)
from rollout.tokenizer_files import TokenizerFiles
from tests.support.chat_tokenizer import SPECIAL, chat_tokenizer, template_of

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
USER = {"role": "user", "content": "What is 2 + 2?"}
SYSTEM = {"role": "system", "content": "Be brief."}
KEEPS = ("qwen2_5", "qwen3", "llama3_1")
"""Families that render short answers without thinking or blanks at their ends as they are."""


def tool(content: str) -> dict:
    return {"role": "tool", "content": content, "tool_call_id": "call00001", "name": "add"}


def text_of(family: str, ids: list[int]) -> str:
    return str(chat_tokenizer(family).decode(ids))


def renderer_of(family: str, *, tools: bool = True, **arguments) -> ChatRenderer:
    return ChatRenderer(chat_tokenizer(family), tools=[EXAMPLE_TOOL] if tools else [], arguments=arguments)


RENDERERS = {family: renderer_of(family) for family in KEEPS}


@pytest.mark.parametrize("most", [1, 400, 20_000])
def test_a_text_is_refused_unread_only_where_it_has_more_tokens_than_a_sequence(most):
    tokenizer = chat_tokenizer("qwen2_5")
    renderer = ChatRenderer(tokenizer, most_tokens=most)  # whose own probes are short
    for text in ("a" * LONG_TEXT, "é1 " * 500_000, "<|im_end|>" * 2 * LONG_TEXT, "word " * 5 * most):
        whole = tokenizer.encode(text, add_special_tokens=False)
        try:
            assert encode_within(tokenizer, text, most) == whole
        except EpisodeEnded:
            assert len(whole) > most and len(text) > LONG_TEXT
    assert renderer.following([tool("4" * 1000)], sampled_end=True)
    with pytest.raises(EpisodeEnded, match=f"more tokens than environment.max_tokens={most}$"):
        renderer.following([tool("1 2" * 500_000)], sampled_end=True)


def test_half_of_a_surrogate_pair_is_refused_in_plain_words():
    with pytest.raises(ValueError, match=r"they contain half of a surrogate pair, .*; replace it"):
        RENDERERS["qwen2_5"].following([tool("half \ud83d")], sampled_end=True)
    blanks = " " * 2**17  # few tokens, so the whole is read after the beginning
    with pytest.raises(ValueError, match=r"they contain half of a surrogate pair, .*; replace it"):
        encode_within(chat_tokenizer("qwen2_5"), f"{blanks}\ud83d", 40_000)


def test_few_tokens_of_a_long_text_are_read():
    """A template may write a long run of blanks, which is one token."""

    class Tokenizer:
        def encode(self, text: str, **named) -> list[int]:
            return [0] * (len(text) // 1000)

    assert len(encode_within(Tokenizer(), " " * 400_000, 400)) == 400


def test_qwen_by_hand():
    renderer = RENDERERS["qwen2_5"]
    opened = text_of("qwen2_5", renderer.opening([SYSTEM, USER]))
    assert opened.startswith("<|im_start|>system\nBe brief.\n\n# Tools") and "tandem_probe" in opened
    assert opened.endswith("<|im_start|>user\nWhat is 2 + 2?<|im_end|>\n<|im_start|>assistant\n")
    replies = (
        "\n<|im_start|>user\n<tool_response>\n4\n</tool_response>\n<tool_response>\n5\n</tool_response><|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    after_end = renderer.following([tool("4"), tool("5")], sampled_end=True)
    assert text_of("qwen2_5", after_end) == replies
    cut = renderer.following([tool("4"), tool("5")], sampled_end=False)
    assert cut == [*renderer.end_token_ids, *after_end]
    assert text_of("qwen2_5", cut) == f"<|im_end|>{replies}"


def test_thinking_off_is_in_every_header():
    renderer = renderer_of("qwen3", enable_thinking=False)
    empty = "<|im_start|>assistant\n<think>\n\n</think>\n\n"
    assert text_of("qwen3", renderer.opening([USER])).endswith(empty)
    assert text_of("qwen3", renderer.following([USER], sampled_end=True)).endswith(empty)


def test_llama_by_hand():
    renderer = RENDERERS["llama3_1"]
    assert text_of("llama3_1", renderer.opening([USER])).count("<|begin_of_text|>") == 1
    assert text_of("llama3_1", renderer.following([tool("4")], sampled_end=False)) == (
        '<|eot_id|><|start_header_id|>ipython<|end_header_id|>\n\n"4"<|eot_id|>'
        "<|start_header_id|>assistant<|end_header_id|>\n\n"
    )


def test_every_end_of_a_turn_is_known():
    """Llama 3.1 closes calls of its built-in tools with another token."""
    tokenizer = chat_tokenizer("llama3_1")
    ends = {name: tokenizer.convert_tokens_to_ids(name) for name in ("<|eot_id|>", "<|eom_id|>")}
    assert RENDERERS["llama3_1"].end_token_ids == (ends["<|eot_id|>"],)
    assert renderer_of("llama3_1", builtin_tools=["search"]).end_token_ids == tuple(ends.values())


def test_tools_that_answer_calls_alone_can_follow():
    renderer = renderer_of("mistral_v3")
    assert text_of("mistral_v3", renderer.following([tool("4"), tool("5")], sampled_end=False)) == (
        '</s>[TOOL_RESULTS] {"content": 4, "call_id": "call00001"}[/TOOL_RESULTS]'
        '[TOOL_RESULTS] {"content": 5, "call_id": "call00001"}[/TOOL_RESULTS]'
    )
    by_name = {probe.name: probe for probe in probe_template(renderer)}
    assert by_name["tool reply"].meaning == NEEDS_CALLS and by_name["tool reply"].is_equal is None
    assert by_name["user reply"].meaning == OTHER_HEADER  # a blank before the answer
    assert any("leaves out tools" in note for note in renderer.notes)


PIECES = st.one_of(
    st.text(max_size=12),
    st.sampled_from([*SPECIAL, "<|im_end|", "<think>", "</think>", "\n", " ", "\t\n ", "[INST]", "{{ x }}", "{% if %}", "🙂", "e\u0301"]),
)  # fmt: skip
TEXTS = st.lists(PIECES, max_size=5).map("".join)
REPLIES = st.one_of(
    TEXTS.map(lambda text: [{"role": "user", "content": text}]),
    st.lists(TEXTS.map(tool), min_size=1, max_size=3),
)
SAMPLED = st.lists(st.integers(0, 380), max_size=8)


@pytest.mark.parametrize("family", [*KEEPS, "mistral_v3"])
def test_random_turns_are_append_only_and_deterministic(family):
    renderer, again = (renderer_of(family) for _ in range(2))
    end = renderer.end_token_ids[0]

    @settings(max_examples=25, suppress_health_check=[HealthCheck.too_slow])
    @given(first=TEXTS, rounds=st.lists(st.tuples(SAMPLED, REPLIES, st.booleans()), min_size=1, max_size=3))
    def check(first, rounds):
        ids = renderer.opening([{"role": "user", "content": first}])
        assert ids == again.opening([{"role": "user", "content": first}])
        prompts = [list(ids)]
        for sampled, replies, ends in rounds:
            turn = [*sampled, end] if ends else sampled
            new = renderer.following(replies, sampled_end=ends)
            assert new == again.following(replies, sampled_end=ends)
            # What was sampled has no say in what follows, but for its end token.
            assert renderer.following(replies, sampled_end=not ends) == ([end, *new] if ends else new[1:])
            ids = [*ids, *turn, *new]
            assert ids[: len(prompts[-1]) + len(turn)] == [*prompts[-1], *turn]
            prompts.append(list(ids))

    check()


@pytest.mark.parametrize("family", KEEPS)
def test_random_texts_give_the_tokens_of_the_whole_rendering(family):
    """Where the template leaves the answer as it is."""
    renderer = RENDERERS[family]

    @settings(max_examples=25, suppress_health_check=[HealthCheck.too_slow])
    @given(
        first=TEXTS,
        answers=st.lists(TEXTS, min_size=1, max_size=3),
        replies=st.lists(REPLIES, min_size=3, max_size=3),
    )
    @example(first="", answers=["a"], replies=[[{"role": "user", "content": "<|im_end|>"}]] * 3)
    def check(first, answers, replies):
        conversation = [{"role": "user", "content": first}]
        ids = renderer.opening(conversation)
        for answer, reply in zip(answers, replies, strict=False):
            # An x keeps an answer apart from its header, as a sampled token would be, and from being trimmed.
            answer = f"x{answer}x".replace("</think>", "").replace("<think>", "")
            ids += renderer.encode(answer) + renderer.following(reply, sampled_end=False)
            conversation += [{"role": "assistant", "content": answer}, *reply]
        assert ids == renderer.encode(renderer.render(conversation, header=True))

    check()


def test_the_stand_in_may_be_in_a_message():
    reply = [{"role": "user", "content": "tandemstandin tandemstandinx"}]
    ids = RENDERERS["qwen2_5"].following(reply, sampled_end=True)
    assert "user\ntandemstandin tandemstandinx<|im_end|>" in text_of("qwen2_5", ids)


@pytest.mark.parametrize(
    ("family", "arguments", "wanted"),
    [
        ("qwen2_5", {}, {}),
        ("qwen3", {}, {"thinking in an earlier turn": DROPS_THINKING}),
        ("llama3_1", {}, {"answer with trailing blank": TRIMS}),
    ],
)
def test_rewritten_history_is_found_and_explained(family, arguments, wanted):
    probes = probe_template(renderer_of(family, **arguments))
    assert len(probes) == 10
    assert {probe.name: probe.meaning for probe in probes if not probe.is_equal} == wanted
    assert [probe.first_difference for probe in probes if probe.is_equal] == [None] * (10 - len(wanted))


LAST_USER = (
    "{% if loop.last and messages[0].role == 'system' %}{{ messages[0].content }}\n{% endif %}{{ m.content }}"
)


@pytest.mark.parametrize(
    ("template", "meaning"),
    [
        (CHATML.replace("<|im_end|>\n", "<|im_end|>\n{{ '!' if m.role == 'assistant' and messages[0].role == 'system' }}"), AFTER_SYSTEM),
        (CHATML.replace("in messages %}", "in messages if m.role != 'system' %}").replace("{{ m.content }}", LAST_USER), REWRITES_OTHERS),
        ("{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}" + CHATML, TAKES_NO_SYSTEM),
        (CHATML, ""),
    ],
    ids=["added behind turns", "moved to the last question, as Mistral's does", "refused", "kept"],
)  # fmt: skip
def test_what_a_system_message_changes_is_told(template, meaning):
    probes = {p.name: p for p in probe_template(ChatRenderer(chat_tokenizer(template=template)))}
    probe = probes.pop("user reply, system message")
    assert (probe.meaning, probe.is_equal) == (meaning, {"": True, TAKES_NO_SYSTEM: None}.get(meaning, False))
    assert all(other.is_equal for other in probes.values())


def test_a_difference_is_shown_where_it_is():
    (probe,) = (probe for probe in probe_template(RENDERERS["qwen3"]) if not probe.is_equal)
    assert (probe.ours, probe.theirs) == ("assistant\n[[<think>]]\nTwo", "assistant\n[[F]]our.<|im_end|>")


def test_a_header_that_becomes_a_token_with_the_answer_is_no_rewriting():
    """The header ends with a blank, which every tokenizer here puts before the answer's first word."""
    template = CHATML.replace("assistant\n{% endif %}", "assistant\n{{ ' ' }}{% endif %}").replace(
        "{{ m.role }}\n", "{{ m.role }}\n{{ ' ' if m.role == 'assistant' }}"
    )
    probes = probe_template(ChatRenderer(chat_tokenizer(template=template)))
    assert {probe.meaning for probe in probes if not probe.is_equal} == {OTHER_TOKENS}
    # There is nothing to become a token with.
    assert {probe.name: probe.is_equal for probe in probes}["empty answer"]


def test_without_tools_a_role_that_is_missing_is_a_note():
    template = template_of("mistral_v3").replace("message.role == 'tool'", "false")
    renderer = ChatRenderer(chat_tokenizer("mistral_v3", template=template))
    assert any("role 'tool'" in note for note in renderer.notes)
    assert {probe.name for probe in probe_template(renderer)} == {
        "user reply", "user replies twice", "thinking in an earlier turn", "empty answer", "answer with trailing blank",
        "user reply, system message",
    }  # fmt: skip
    with pytest.raises(ValueError, match="check-template --tools` says why"):
        renderer.following([tool("4")], sampled_end=True)


def test_replies_of_tools_that_depend_on_earlier_ones_are_refused_where_there_are_tools():
    """As in DeepSeek-R1, whose template opens a list of outputs once in a conversation."""
    first = "{{ 'Outputs:' if m.role == 'tool' and not messages[:loop.index0] | selectattr('role', 'eq', 'tool') | list }}"
    tokenizer = chat_tokenizer(template=CHATML.replace("{{ m.content }}", first + "{{ m.content }}"))
    with pytest.raises(ValueError, match=r"'tool'.* changes with an earlier reply of a tool"):
        ChatRenderer(tokenizer, tools=[EXAMPLE_TOOL])
    renderer = ChatRenderer(tokenizer)
    assert renderer.following([USER], sampled_end=True) and "tool" not in renderer.replies


def test_blanks_before_the_end_are_left_out():
    renderer = ChatRenderer(chat_tokenizer(template=CHATML.replace("}}<|im_end|>", "}} <|im_end|>")))
    assert renderer.notes[0].startswith("the template writes ' ' between an answer and the end of its turn")
    assert renderer.following([USER], sampled_end=False)[0] == renderer.end_token_ids[0]


@pytest.mark.parametrize("family", [*KEEPS, "mistral_v3"])
def test_the_files_of_a_tokenizer_give_the_same_tokens(family, tmp_path):
    chat_tokenizer(family).save_pretrained(str(tmp_path))
    by_transformers, by_files = (
        ChatRenderer(tokenizer) for tokenizer in (chat_tokenizer(family), TokenizerFiles(tmp_path))
    )
    assert by_files.end_token_ids == by_transformers.end_token_ids
    assert by_files.replies == by_transformers.replies
    assert by_files.opening([USER]) == by_transformers.opening([USER])
    assert by_files.following([USER], sampled_end=False) == by_transformers.following(
        [USER], sampled_end=False
    )


REFUSED = {
    "no template": (None, "has no chat template; copy"),
    "what follows depends on earlier turns": (
        template_of("rewrites_the_end"),
        r"changes with an earlier turn: '<\|im_end\|>\\n\(turn 2\)",
    ),
    "what follows depends on the answer": (
        CHATML.replace("<|im_end|>\n", "<|im_end|>\n{{ 'so' if '</think>' in m.content }}"),
        "changes with thinking in the assistant's answer",
    ),
    "a user's reply is refused": (
        "{% if messages | length > 2 %}{{ raise_exception('one turn only') }}{% endif %}" + CHATML,
        "role 'user' cannot follow .* one turn only",
    ),
    "tools' replies are left out": (
        CHATML.replace("{% for m in messages %}", "{% for m in messages if m.role != 'tool' %}"),
        "leaves out messages of role 'tool'",
    ),
    "no end": (CHATML.replace("<|im_end|>\n", ""), "no token ends its turn"),
    "an end only before a user": (
        CHATML.replace("<|im_end|>\n", "{{ '<|im_end|>' if not loop.last and loop.nextitem.role == 'user' }}"),
        "no token ends its turn",
    ),
    "an end of plain text": (CHATML.replace("<|im_end|>\n", "\nEND OF TURN\n"), "tokens, which cannot stop sampling"),
    "an end that becomes a token with the answer": (
        "{% for m in messages %}{{ m.content }}#{% endfor %}{% if add_generation_prompt %}A:{% endif %}",
        r"the tokenizer merges the end '#' of an answer with what follows it \(role 'user'\)",
    ),
    "no header": (CHATML.replace("{% if add_generation_prompt %}", "{% if false %}"), "ignores add_generation_prompt"),
    "the answer is left out": (
        CHATML.replace("{{ m.content }}", "{{ m.content if m.role != 'assistant' }}"),
        "does not write the assistant's answer exactly once",
    ),
    "another end for each role": (
        CHATML.replace("<|im_start|>", "{{ '<|eot_id|>' if m.role == 'tool' }}<|im_start|>", 1).replace(
            "<|im_end|>", "{{ '<|im_end|>' if loop.last or loop.nextitem.role != 'tool' }}"
        ),
        "has no fixed end",
    ),
    "no Jinja": ("{% for %}", "TemplateSyntaxError"),
}  # fmt: skip


@pytest.mark.parametrize(("template", "message"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_continued_is_refused(template, message):
    tokenizer = chat_tokenizer(template=template or "")
    with pytest.raises(ValueError, match=message):
        ChatRenderer(tokenizer, tools=[EXAMPLE_TOOL])


def test_arguments_of_the_method_are_no_arguments_of_the_template():
    with pytest.raises(ValueError, match="arguments have tokenize, which Tandem sets itself"):
        renderer_of("qwen3", tokenize=True)


def test_nothing_to_append_is_refused():
    with pytest.raises(ValueError, match="give at least one"):
        RENDERERS["qwen3"].following([], sampled_end=True)


@pytest.mark.parametrize("name", ["", "{{ m.name }}", "{% if m.tool_calls %}{{ m.name }}{% endif %}"])
def test_a_template_that_writes_names_of_answers_is_known(name):
    template = CHATML.replace("{{ m.content }}", f"{{{{ m.content }}}}{name}")
    assert ChatRenderer(chat_tokenizer(template=template)).writes_names == bool(name)
    assert not any(renderer.writes_names for renderer in RENDERERS.values())


def test_other_roles_are_checked_when_they_come():
    renderer = renderer_of("qwen2_5")
    ids = renderer.following([{"role": "critic", "content": "No."}], sampled_end=True)
    assert text_of("qwen2_5", ids) == "\n<|im_start|>critic\nNo.<|im_end|>\n<|im_start|>assistant\n"
    template = CHATML.replace("{% for m in messages %}", "{% for m in messages if m.role != 'critic' %}")
    other = ChatRenderer(chat_tokenizer(template=template))
    with pytest.raises(ValueError, match="leaves out messages of role 'critic'"):
        other.following([{"role": "critic", "content": "No."}], sampled_end=True)


def test_first_messages_of_a_role_that_the_template_leaves_out_are_refused():
    """An agent's instructions may be of role ``developer``, which many templates pass over."""
    messages = [{"role": "developer", "content": "Be brief."}, USER]
    opened = ChatRenderer(chat_tokenizer(template=CHATML)).opening(messages)
    assert "developer\nBe brief." in text_of("qwen2_5", opened)
    template = CHATML.replace("{% for m in messages %}", "{% for m in messages if m.role != 'developer' %}")
    with pytest.raises(ValueError, match="leaves out messages of role 'developer'"):
        ChatRenderer(chat_tokenizer(template=template)).opening(messages)
