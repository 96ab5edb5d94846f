"""The tiny model's tokenizer and weights, and how prompts become ids."""

import inspect
import itertools
import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import processors
from transformers import AutoModelForCausalLM, LlamaTokenizer, PreTrainedTokenizerBase

from configs.schema.model import SET_BY_TANDEM
from rollout.records import WithTools, messages_of
from rollout.tiny_model import CHARACTERS, make_tiny_countdown_model
from rollout.tokenization import encode_prompt, encode_response, end_token_ids, find_turns, load_tokenizer
from rollout.tokenizer_files import _jinja_environment, check_template_arguments
from tests.support.chat_tokenizer import chat_tokenizer, template_of

CHATML = "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }};{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "tiny"
    make_tiny_countdown_model(folder, seed=3)
    return folder


def test_transformers_own_tokenizer_of_a_family_writes_the_same_tokens(tokenizer, tmp_path):
    """transformers opens a Qwen2 folder by its own byte-level class."""
    make_tiny_countdown_model(tmp_path / "qwen2", seed=3, family="qwen2")
    of_bytes = load_tokenizer(tmp_path / "qwen2")
    ids = [
        encode_prompt(made, CHARACTERS, system_prompt=None, apply_chat_template=False)
        for made in (tokenizer, of_bytes)
    ]
    assert ids[0] == ids[1] and len(ids[0]) == len(CHARACTERS) and of_bytes.decode(ids[1]) == CHARACTERS


@pytest.fixture(scope="module")
def tokenizer(folder):
    return load_tokenizer(folder)


def test_one_token_per_character_and_back(tokenizer):
    @given(st.text(CHARACTERS, min_size=1, max_size=60))
    def check(text):
        ids = encode_prompt(tokenizer, text, system_prompt=None, apply_chat_template=False)
        assert len(ids) == len(text)
        assert tokenizer.decode([*ids, tokenizer.eos_token_id], skip_special_tokens=True) == text

    check()


def test_unknown_characters_show(tokenizer):
    assert tokenizer.encode("1x2")[1] == tokenizer.unk_token_id


def test_every_id_of_the_model_has_a_token(folder, tokenizer):
    config = json.loads((folder / "config.json").read_text())
    assert config["vocab_size"] == len(tokenizer) == 24
    assert len({tokenizer.decode([i]) for i in range(24)}) == 24


def test_model_folder_loads_with_the_promised_shape(folder):
    model = AutoModelForCausalLM.from_pretrained(folder, local_files_only=True)
    config = model.config
    assert (config.hidden_size, config.num_hidden_layers, config.num_attention_heads) == (128, 4, 4)
    assert (config.num_key_value_heads, config.head_dim, config.intermediate_size) == (2, 32, 384)
    assert config.model_type == "qwen3" and config.tie_word_embeddings
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert sum(p.numel() for p in model.parameters()) == pytest.approx(0.79e6, rel=0.01)
    assert sorted(p.name for p in folder.parent.iterdir()) == ["tiny"]  # nothing partial is left


def test_seed_decides_the_weights_and_leaves_the_callers_alone(folder, tmp_path):
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    for name, seed in (("same", 3), ("other", 4)):
        make_tiny_countdown_model(tmp_path / name, seed=seed)
    assert torch.equal(torch.rand(3), expected)
    weights = (folder / "model.safetensors").read_bytes()
    assert weights == (tmp_path / "same" / "model.safetensors").read_bytes()
    assert weights != (tmp_path / "other" / "model.safetensors").read_bytes()


def test_an_existing_folder_is_not_overwritten(folder):
    with pytest.raises(ValueError, match="exists already"):
        make_tiny_countdown_model(folder, seed=0)


def test_chat_template(folder):
    tokenizer = load_tokenizer(folder)
    with pytest.raises(ValueError, match="apply_chat_template: false"):
        encode_prompt(tokenizer, "1", system_prompt=None, apply_chat_template=True)
    tokenizer.chat_template = CHATML
    ids = encode_prompt(tokenizer, "1+1", system_prompt="2", apply_chat_template=True)
    assert ids == tokenizer.encode("<system>2;<user>1+1;<assistant>")
    ids = encode_prompt(tokenizer, "1+1", system_prompt=None, apply_chat_template=True)
    assert ids == tokenizer.encode("<user>1+1;<assistant>")


def test_arguments_of_the_template_are_those_of_transformers():
    tokenizer = chat_tokenizer("qwen3")
    for arguments in ({}, {"enable_thinking": True}, {"enable_thinking": False}):
        ids = encode_prompt(
            tokenizer,
            "2 + 2?",
            system_prompt="Be brief.",
            apply_chat_template=True,
            chat_template_kwargs=arguments,
        )
        messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "2 + 2?"}]
        whole = tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_dict=False, **arguments
        )
        assert ids == whole
        empty_thinking = arguments.get("enable_thinking") is False
        assert str(tokenizer.decode(ids)).endswith("<think>\n\n</think>\n\n") is empty_thinking


@pytest.mark.parametrize("family", ["qwen2_5", "qwen3", "llama3_1"])
def test_a_response_of_a_template_has_the_tokens_of_transformers(family):
    """Up to the token that ends its turn: the prompt's tokens and these are those of the whole conversation."""
    tokenizer = chat_tokenizer(family)
    ends = [int(tokenizer.eos_token_id)]
    asked = {"role": "user", "content": "2 + 2?"}
    add = {"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": {}}}
    calls = {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"function": {"name": "add", "arguments": {"a": 2}}}],
    }
    told = {"role": "tool", "content": "4"}
    for prompt, response in (
        ((asked,), {"role": "assistant", "content": "4"}),
        (WithTools((asked,), (add,)), calls),
        (WithTools((asked, calls, told), (add,)), {"role": "assistant", "content": "The answer is 4."}),
    ):
        messages = [*map(dict, messages_of(prompt)), response]
        tools = [add] if isinstance(prompt, WithTools) else None
        whole = tokenizer.apply_chat_template(messages, tools=tools, return_dict=False)
        found = encode_prompt(tokenizer, prompt, system_prompt=None, apply_chat_template=True)
        found += encode_response(tokenizer, prompt, response, ends)
        assert found[-1] == ends[0] and found == whole[: len(found)]
        assert not str(tokenizer.decode(whole[len(found) :])).strip()


def llama_tokenizer(template: str, *texts: str, **options) -> LlamaTokenizer:
    """transformers' own class, which puts a blank before a text that stands alone, with a token per character and word."""
    vocabulary = [
        "<unk>",
        "<s>",
        "</s>",
        *(f"<0x{byte:02X}>" for byte in range(256)),
        *sorted({*"".join(texts), "▁"}),
    ]
    merges = [
        (word[:end], word[end]) for text in texts for word in text.split() for end in range(1, len(word))
    ]
    ids = {token: number for number, token in enumerate(dict.fromkeys([*vocabulary, *map("".join, merges)]))}
    tokenizer = LlamaTokenizer(vocab=ids, merges=[*dict.fromkeys(merges)], **options)
    tokenizer.chat_template = template
    return tokenizer


@pytest.mark.parametrize("legacy", [False, True])
@pytest.mark.parametrize("blank", ["", " "])
@pytest.mark.parametrize("header", ["[/INST]", "<|assistant|>\n"])
def test_a_response_has_no_blank_that_nobody_wrote(header, blank, legacy):
    """Of Llama 2's tokenizers: prompt and response have the tokens of the whole, as a message and as a text."""
    template = (
        f"{{% for m in messages %}}{{{{ m.content ~ {header!r} if m.role == 'user' else {blank!r} ~ m.content ~ eos_token }}}}"
        "{% endfor %}"
    )
    tokenizer = llama_tokenizer(template, "2 + 2?", "The sum is 4.", header, legacy=legacy)
    asked, told, ends = said("user", "2 + 2?"), said("assistant", "The sum"), [int(tokenizer.eos_token_id)]
    whole = tokenizer.apply_chat_template([asked, told], return_dict=False)
    prompt_ids = encode_prompt(tokenizer, "2 + 2?", system_prompt=None, apply_chat_template=True)
    for response in (told, f"{blank}The sum"):
        assert prompt_ids + encode_response(tokenizer, "2 + 2?", response, ends) == whole
    text = f"2 + 2?{header}"
    plain = encode_prompt(tokenizer, text, system_prompt=None, apply_chat_template=False)
    plain += encode_response(tokenizer, text, f"{blank}The sum", ends, apply_chat_template=False)
    assert plain == [*tokenizer.encode(f"{text}{blank}The sum"), *ends]


@pytest.mark.parametrize("legacy", [False, True])
@pytest.mark.parametrize("blank", ["", " "])
@pytest.mark.parametrize("header", ["[/INST]", "<|assistant|>\n"])
def test_every_turn_of_llama_s_tokenizers_is_found_as_it_is_sampled(header, blank, legacy):
    template = (
        f"{{% for m in messages %}}{{{{ m.content ~ {header!r} if m.role == 'user' else {blank!r} ~ m.content ~ eos_token }}}}"
        "{% endfor %}"
    )
    tokenizer = llama_tokenizer(template, "2 + 2?", "The sum is 4.", header, legacy=legacy)
    prompt = in_turn("2 + 2?", "The sum", "? 2", "4.", "2 + 2?")
    ids, turns = turns_in(tokenizer, prompt)
    assert len(turns) == 2
    for number, turn in zip((1, 3), turns, strict=True):
        learned = encode_response(tokenizer, prompt[:number], prompt[number], [int(tokenizer.eos_token_id)])
        assert ids[turn.start : turn.stop] == learned


def test_a_response_that_the_template_hides_or_rewrites_is_refused():
    response = {"role": "assistant", "content": "4", "tool_calls": [{"function": {"name": "add"}}]}
    body = "{% for m in messages %}{{ m.role }}{{ m.content }}{% endfor %}{{ 'assistant' if add_generation_prompt }}"
    calls = "{% for m in messages %}{{ m.tool_calls }}{% endfor %}"
    for template, message in (
        (body, "leaves out the response, or its tool calls"),
        ("{{ messages | length }}" + body + calls, "renders the prompt differently if a response follows"),
    ):
        with pytest.raises(ValueError, match=message):
            encode_response(chat_tokenizer(template=template), "2 + 2?", response, [0])
    told = {"role": "assistant", "content": "4"}
    tokenizer = chat_tokenizer(template=body)
    assert encode_response(tokenizer, "2 + 2?", told, [479]) == [*tokenizer.encode("4"), 479]
    assert encode_response(tokenizer, "2 + 2?", "4", [479]) == [*tokenizer.encode("4"), 479]


@pytest.mark.parametrize("family", ["qwen2_5", "qwen3", "llama3_1", "mistral_v3"])
def test_arguments_of_a_call_that_a_template_would_quote_are_refused(family):
    """OpenAI's form has them as a text. A template that writes a text as it stands takes it."""
    call = {"type": "function", "id": "abcdefghi", "function": {"name": "add", "arguments": '{"a": "é"}'}}
    response = said("assistant", "", tool_calls=[call])
    with pytest.raises(
        ValueError, match=r"puts the arguments .* into quotes.*; write the arguments as an object$"
    ):
        encode_response(chat_tokenizer(family), "2 + 2?", response, [0])
    as_it_stands = "{% for m in messages %}{% for c in m.tool_calls %}{{ c.function.name ~ c.function.arguments }}{% endfor %}{% endfor %}"
    tokenizer = chat_tokenizer(template=as_it_stands)
    assert tokenizer.decode(encode_response(tokenizer, "2 + 2?", response, [479])[:-1]) == 'add{"a": "é"}'


MARKED = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}{% generation %}{{ m.content }}<|im_end|>"
    "{% endgeneration %}{% else %}{{ m.content }}<|im_end|>{% endif %}\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""Says itself which tokens are the assistant's."""
ADD = {"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": {}}}


def turns_in(tokenizer, prompt) -> tuple[list[int], list[range]]:
    """The tokens of a prompt, and the places of the assistant's turns."""
    ids = encode_prompt(tokenizer, prompt, system_prompt=None, apply_chat_template=True)
    return ids, find_turns(tokenizer, prompt, ids, [int(tokenizer.eos_token_id)])


def said(role: str, content: str, **fields) -> dict:
    return {"role": role, "content": content, **fields}


def in_turn(*contents: str) -> tuple[dict, ...]:
    """A conversation of the user and the assistant."""
    return tuple(said(("user", "assistant")[place % 2], content) for place, content in enumerate(contents))


def test_turns_of_a_conversation_by_hand(tokenizer):
    """A character a token; a question ends with the header of the answer, and each answer with <eos>."""
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m.content }}{{ '=' if m.role == 'user' else eos_token }}{% endfor %}"
    )
    ids, turns = turns_in(tokenizer, in_turn("1+1", "2", "5*4", "20", "1"))
    assert tokenizer.decode(ids) == "1+1=2<eos>5*4=20<eos>1="
    assert turns == [range(4, 6), range(10, 13)]


texts = st.text("4 a.\n<é", max_size=6).map("x{}".format)
CALLS = [{"function": {"name": "add", "arguments": {"a": 2}}}]
rounds = st.one_of(
    st.builds(lambda answer, reply: [said("assistant", answer), said("user", reply)], texts, texts),
    st.builds(lambda answer, reply: [said("assistant", answer, tool_calls=CALLS), said("tool", reply)], texts, texts),
)  # fmt: skip


@pytest.mark.parametrize("family", ["qwen2_5", "llama3_1"])
@settings(deadline=None, max_examples=40)
@given(asked=texts, later=st.lists(rounds, max_size=4))
def test_a_turn_of_a_conversation_is_the_response_of_a_shorter_one(family, asked, later):
    """In its tokens, and in those before it."""
    tokenizer, messages = chat_tokenizer(family), (said("user", asked), *itertools.chain(*later))
    ids, turns = turns_in(tokenizer, WithTools(messages, (ADD,)))
    places = [place for place, message in enumerate(messages) if message["role"] == "assistant"]
    for place, turn in zip(places, turns, strict=True):
        shorter = WithTools(messages[:place], (ADD,))
        before = encode_prompt(tokenizer, shorter, system_prompt=None, apply_chat_template=True)
        response = encode_response(tokenizer, shorter, messages[place], [int(tokenizer.eos_token_id)])
        assert ids[: turn.start] == before and ids[turn.start : turn.stop] == response


def test_turns_are_those_that_a_template_marks():
    tokenizer = chat_tokenizer(template=MARKED)
    messages = in_turn("2 + 2?", "4 ", "Are you\nsure?", "Yes.\n", "?")
    _, turns = turns_in(tokenizer, messages)
    marked = tokenizer.apply_chat_template(
        list(messages), return_dict=True, return_assistant_tokens_mask=True, add_generation_prompt=True
    )["assistant_masks"]
    assert len(turns) == 2
    assert [place for turn in turns for place in turn] == [
        place for place, is_on in enumerate(marked) if is_on
    ]


@pytest.mark.parametrize(
    ("template", "last_end"),
    [
        # An end of the whole conversation, which is an end token too (Phi-3).
        ("{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
         "{{ '<|im_start|>assistant\n' if add_generation_prompt else '<|endoftext|>' }}", "<|im_end|>"),
        # No end: the next message's header is what the model samples (GLM).
        ("{% for m in messages %}{{ {'user': '<|im_end|>', 'assistant': '<|im_start|>'}[m.role] }}{{ m.content }}{% endfor %}"
         "{{ '<|im_start|>' if add_generation_prompt }}", "<|endoftext|>"),
    ],
    ids=["phi3", "glm"],
)  # fmt: skip
def test_turns_of_templates_with_another_end(template, last_end):
    tokenizer = chat_tokenizer(template=template)
    ends = [tokenizer.convert_tokens_to_ids(text) for text in ("<|endoftext|>", "<|im_end|>")]
    prompt = in_turn("2 + 2?", "4", "2 + 3?", "5", "?")
    ids = encode_prompt(tokenizer, prompt, system_prompt=None, apply_chat_template=True)
    turns = find_turns(tokenizer, prompt, ids, ends)
    assert [tokenizer.decode(ids[turn.start : turn.stop]) for turn in turns] == ["4<|im_end|>", "5<|im_end|>"]
    last = encode_response(tokenizer, prompt, said("assistant", "6"), ends)
    assert tokenizer.decode(last) == f"6{last_end}"


CHATML_TOKENS = MARKED.replace("{% generation %}", "").replace("{% endgeneration %}", "")


@pytest.mark.parametrize(
    ("template", "answer", "message"),
    [
        (template_of("qwen3"), "4", r"writes '.*assistant\\n<think>.*' if it is the last one, and '.*assistant\\n4<.*' if others"),
        (template_of("qwen3"), "<think>\nTwo.\n</think>\n\n4", r"assistant\\n4<\|im_end\|>.*; use a template that keeps earlier turns"),
        ("{{ messages[-1].role }}" + CHATML_TOKENS, "4", "renders the prompt differently if a response follows"),
        ("{{ messages | length > 2 }}" + CHATML_TOKENS, "4", r"writes 'False.*' if it is the last one, and 'True"),
        (CHATML_TOKENS.replace("m.content }}", "m.content | trim if loop.last else m.content }}"), "4 ", "writes '.*4<.*4 <"),
        (CHATML_TOKENS, "\n4", r"assistant\\n' and '\\n4<\|im_end\|>' become other tokens together than apart"),
        (CHATML_TOKENS.replace("<|im_end|>", "</s>"), "4", r"none of the model's end tokens \(<\|im_end\|>\); add its own to eos"),
    ],
    ids=["empty thinking", "thinking", "the end", "the start", "a blank", "a line break", "no end token"],
)  # fmt: skip
def test_a_turn_that_the_model_would_not_sample_so_is_refused(template, answer, message):
    prompt = in_turn("2 + 2?", answer, "Sure?")
    with pytest.raises(
        ValueError,
        match=f"(?s)^message 2, of the assistant: .*{message}.*, or set data.learned_turns=last$",
    ):
        turns_in(chat_tokenizer(template=template), prompt)


def test_what_tandem_sets_itself_are_the_parameters_of_transformers():
    taken = inspect.signature(PreTrainedTokenizerBase.apply_chat_template).parameters.keys()
    assert taken - {"self", "kwargs"} == SET_BY_TANDEM - {"messages"}


names = st.sampled_from(["a", "b", "c", "range"])
pieces = st.recursive(
    names.map("{{{{ {} }}}}".format),
    lambda inner: st.one_of(
        st.tuples(inner, inner).map("".join),
        st.builds("{{% if {} is defined %}}{}{{% endif %}}".format, names, inner),
        st.builds("{{% set {} = 5 %}}{}".format, names, inner),
        st.builds("{{% for {} in [1, 2] %}}{}{{% endfor %}}".format, names, inner),
        st.builds("{{% macro m({}) %}}{}{{% endmacro %}}{{{{ m(1) }}}}".format, names, inner),
        st.builds("{{% if false %}}{}{{% else %}}{}{{% endif %}}".format, inner, inner),
        st.builds("{{% set n = namespace(x={}) %}}{{{{ n.x }}}}{}".format, names, inner),
    ),
    max_leaves=6,
)


@settings(deadline=None)
@given(template=pieces, name=names, value=st.sampled_from([0, "x", False]))
def test_an_argument_that_is_called_unread_changes_nothing(template, name, value):
    tokenizer = SimpleNamespace(chat_template=template, name_or_path="")
    try:
        check_template_arguments(tokenizer, {name: value})
    except ValueError as error:
        assert "never reads" in str(error)
        made = _jinja_environment().from_string(template)
        assert made.render() == made.render({name: value})


@pytest.mark.parametrize(
    ("template", "read"),
    [
        (template_of("qwen3"), "it reads content, enable_thinking, thinking:"),
        (template_of("qwen2_5"), "it reads no argument:"),
        ({"default": "{{ date }}", "tool_use": "{{ eos_token }}{{ tools }}"}, "it reads date:"),
        ("{% if %}", "it reads no argument:"),
    ],
)
def test_the_arguments_of_a_template_are_named(template, read):
    tokenizer = SimpleNamespace(chat_template=template, name_or_path="")
    with pytest.raises(ValueError, match=f"never reads enable_thinkin, so .*; {read}"):
        check_template_arguments(tokenizer, {"enable_thinkin": False})


def test_system_prompt_needs_a_template_and_a_prompt_needs_tokens(tokenizer):
    with pytest.raises(ValueError, match="apply_chat_template: true"):
        encode_prompt(tokenizer, "1", system_prompt="2", apply_chat_template=False)
    with pytest.raises(ValueError, match="no tokens"):
        encode_prompt(tokenizer, "", system_prompt=None, apply_chat_template=False)


def test_the_end_that_a_tokenizer_adds_is_no_part_of_a_prompt():
    tokenizer = chat_tokenizer("llama3_1")
    bos, eos = (tokenizer.convert_tokens_to_ids(name) for name in ("<|begin_of_text|>", "<|eot_id|>"))
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<|begin_of_text|> $A <|eot_id|>",
        special_tokens=[("<|begin_of_text|>", bos), ("<|eot_id|>", eos)],
    )
    plain = tokenizer.encode("2 + 2 =", add_special_tokens=False)
    assert tokenizer.encode("2 + 2 =") == [bos, *plain, eos]
    for text, ids in (("2 + 2 =", plain), ("2 + 2 =<|eot_id|>", [*plain, eos])):
        assert encode_prompt(tokenizer, text, system_prompt=None, apply_chat_template=False) == [bos, *ids]


def test_missing_folder_missing_and_broken_tokenizer(folder, tmp_path):
    with pytest.raises(ValueError, match=r"gone does not exist; set model\.path"):
        load_tokenizer(tmp_path / "gone")
    shutil.copy(folder / "config.json", tmp_path)
    with pytest.raises(ValueError, match="holds no tokenizer"):
        load_tokenizer(tmp_path)
    shutil.copy(folder / "tokenizer_config.json", tmp_path)
    known = json.loads((folder / "tokenizer.json").read_text())
    unknown = json.dumps(known | {"model": {"type": "NoSuchModel", "vocab": {}}})
    for content in ("{ broken", "[]", unknown):
        (tmp_path / "tokenizer.json").write_text(content)
        with pytest.raises(ValueError, match="cannot be loaded"):
            load_tokenizer(tmp_path)


def test_end_tokens_come_from_everywhere(folder, tokenizer, tmp_path):
    assert end_token_ids(tokenizer, folder) == [0]
    (tmp_path / "config.json").write_text('{"eos_token_id": 7}')
    assert end_token_ids(tokenizer, tmp_path) == [0, 7]
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [9, 0]}')
    assert end_token_ids(tokenizer, tmp_path) == [0, 7, 9]
    other = load_tokenizer(folder)
    other.eos_token = "7"  # an id above some of the others
    assert end_token_ids(other, tmp_path) == [other.convert_tokens_to_ids("7"), 0, 7, 9]
    (tmp_path / "config.json").write_text('{"eos_token_id": null}')
    assert end_token_ids(tokenizer, tmp_path) == [0, 9]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"eos_token_id": "x"}', "must be an integer"),
        ("{", "not valid JSON"),
        ("[]", "holds a list, not an"),
    ],
)
def test_broken_end_tokens_are_named(tokenizer, tmp_path, content, message):
    (tmp_path / "generation_config.json").write_text(content)
    with pytest.raises(ValueError, match=rf"generation_config\.json.*{message}"):
        end_token_ids(tokenizer, tmp_path)


def test_no_end_token_anywhere(folder, tmp_path):
    tokenizer = load_tokenizer(folder)
    tokenizer.eos_token = None
    with pytest.raises(ValueError, match="no end-of-sequence token"):
        end_token_ids(tokenizer, tmp_path)
