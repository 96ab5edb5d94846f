"""Errors in a model's folder or in data are reported before anything starts: in process, on files made here.

Each case breaks one thing of a sound run; the problem names the field, what is wrong and what to do.
"""

import gzip
import json
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
import yaml

from configs.errors import ConfigError, Problem
from configs.loader import parse_config
from configs.schema import RunConfig, SftConfig
from launch.checks import config as checks
from launch.checks import inputs as input_checks
from rollout.records import WithTools
from rollout.tasks import records
from rollout.tasks.countdown import check_characters
from rollout.tiny_model import make_tiny_countdown_model
from rollout.tokenization import encode_prompt, end_token_ids, load_tokenizer
from rollout.tokenizer_files import TokenizerFiles, check_template_arguments
from tests.parallel.weights.test_hf_headers import TINY
from tests.support.chat_tokenizer import chat_tokenizer
from tests.support.model_folders import CHATML, make_model_folder, write_tokenizer

MODEL = TINY | {"max_position_embeddings": 256}
RUN = {
    "model": {"path": "model"}, "task": {"type": "jsonl", "train_path": "train.jsonl", "heldout_path": "heldout.jsonl"},
    "rollout": {"max_new_tokens": 56, "prompts_per_step": 2}, "reward": {"type": "gsm8k"}, "layout": {"dp": 1},
}  # fmt: skip
SFT = {
    "kind": "sft", "model": {"path": "model"}, "data": {"type": "jsonl", "path": "pairs.jsonl"}, "output": "new", "layout": {"dp": 1},
}  # fmt: skip
THINKS = (
    CHATML
    + "{% if enable_thinking is defined and enable_thinking is not boolean %}{{ raise_exception('enable_thinking is no truth') }}"
    "{% endif %}{% if add_generation_prompt and enable_thinking is false %}{{ '0' * 9 }}{% endif %}"
)
"""A template with an argument, which adds nine tokens where it is false."""
ASKED = {"role": "user", "content": "1 + 1"}
CONVERSATION = {"prompt": [{"role": "system", "content": "Be brief."}, ASKED], "answer": "2"}
ANSWERED = {"role": "assistant", "content": "2"}
TOOL = {"type": "function", "function": {"name": "add"}}
CALLED = {
    "role": "assistant",
    "content": None,
    "tool_calls": [{"function": {"name": "add", "arguments": {}}}],
}
REPLIED = {"role": "tool", "content": "2"}
Damage = Callable[[], object]


def write_jsonl(path: str, *rows: dict) -> None:
    Path(path).write_text("".join(f"{json.dumps(row)}\n" for row in rows))


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    make_model_folder(tmp_path / "model", MODEL)
    write_jsonl("train.jsonl", *({"prompt": f"{i} + {i}", "answer": str(2 * i)} for i in range(4)))
    write_jsonl("heldout.jsonl", {"prompt": "9 + 9", "answer": "18"})
    write_jsonl("pairs.jsonl", {"prompt": "1 + 1", "response": "2"})
    Path("run.yaml").write_text(yaml.safe_dump(RUN))
    Path("sft.yaml").write_text(yaml.safe_dump(SFT))
    return tmp_path


def problems(*overrides: str, config: str = "run.yaml") -> list[Problem]:
    kind = SftConfig if config == "sft.yaml" else RunConfig
    try:
        checks.load_checked(parse_config(config, overrides), kind)
    except ConfigError as error:
        return list(error.problems)
    return []


def test_a_temporary_folder_that_is_too_long_for_sockets_is_told_of_a_run_on_this_machine(monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", "/t".ljust(96, "x"))
    parsed = parse_config("run.yaml", [])
    with pytest.raises(ConfigError, match="set TMPDIR to a folder with at most 95"):
        checks.load_checked(parsed, RunConfig, runs=checks.EVALUATION)
    checks.load_checked(parsed, RunConfig, runs=checks.EVALUATION, in_job=True)


def in_model(name: str, content: str | bytes | dict) -> Damage:
    def write() -> None:
        data = json.dumps(content) if isinstance(content, dict) else content
        (Path("model") / name).write_bytes(data if isinstance(data, bytes) else data.encode())

    return write


def template(text: str | list) -> Damage:
    return in_model(
        "tokenizer_config.json", {"eos_token": "<eos>", "unk_token": "<unk>", "chat_template": text}
    )


def train(content: bytes | str) -> Damage:
    return lambda: Path("train.jsonl").write_bytes(
        content if isinstance(content, bytes) else content.encode()
    )


GOOD = '{"prompt": "1", "answer": "1"}\n'


@dataclass(frozen=True, kw_only=True)
class Case:
    damage: Damage = lambda: None
    overrides: tuple[str, ...] = ()
    config: str = "run.yaml"
    field: str
    error: str
    fix: str = ""


BY_SOURCE = "reward={type: by_field, field: source, rewards: {math: {type: gsm8k}, code: {type: code}}}"
SOURCES = '{"prompt": "1", "answer": "1", "source": "math"}\n{"prompt": "1", "answer": "1", "source": "code", "tests": "assert 1"}\n'
CASES = {
    # ---- sources of the data
    "a record without a source": Case(
        damage=train(SOURCES + GOOD), overrides=(BY_SOURCE, "task.heldout_path=null"), field="task.train_path",
        error="train.jsonl:line 3: field `source` is missing", fix="name it in the config",
    ),
    "a source without a reward": Case(
        damage=train(SOURCES.replace("math", "poems")), overrides=(BY_SOURCE, "task.heldout_path=null"), field="reward.rewards",
        error="train.jsonl:line 1: field `source` is 'poems', but reward.rewards has rewards only for 'math', 'code'",
        fix="add one, or drop such records",
    ),
    "a program without tests in a source of programs": Case(
        damage=train(SOURCES.replace("tests", "test")), overrides=(BY_SOURCE, "task.heldout_path=null"), field="task.train_path",
        error="train.jsonl:line 2: field `tests` is missing",
    ),
    "a whole solution without its mark": Case(
        damage=train('{"prompt": "1", "answer": "1 #### 2"}\n{"prompt": "1", "answer": "1 + 1 = 2"}\n'), field="task.train_path",
        error="train.jsonl:line 2: field `answer` holds several numbers, but the reward gsm8k needs exactly one",
        fix="`#### 72` at the end",
    ),
    "a half as the answer of one source": Case(
        damage=train(SOURCES.replace('"answer": "1", "source": "math"', '"answer": "1/2", "source": "math"')),
        overrides=(BY_SOURCE, "task.heldout_path=null"), field="task.train_path", error="train.jsonl:line 1: field `answer` holds several",
    ),
    "answers that are no problems of Countdown": Case(
        damage=train(GOOD), overrides=("reward={type: countdown}", "task.heldout_path=null"), field="task.train_path",
        error="train.jsonl:line 1: field `answer` '1' is not a Countdown problem", fix="write it like `2 13 14=3`",
    ),
    # ---- tokenizer
    "no tokenizer": Case(
        damage=lambda: Path("model/tokenizer.json").unlink(), field="model.path", error="the folder has no tokenizer.json or",
        fix="download what is missing",
    ),
    "broken tokenizer": Case(
        damage=in_model("tokenizer.json", "{ broken"), field="model.path", error="tokenizer.json is no readable tokenizer: key must be a",
        fix="download or copy it again",
    ),
    "empty tokenizer": Case(damage=in_model("tokenizer.json", ""), field="model.path", error="it is empty"),
    "tokenizer of an LFS pointer": Case(
        damage=in_model("tokenizer.json", "version https://git-lfs.github.com/spec/v1\n"), field="model.path", error="a pointer of Git LFS"
    ),
    "tokenizer that is a picture": Case(
        damage=in_model("tokenizer.json", b"\x89PNG\xff"), field="model.path", error="is no readable tokenizer: 'utf-8' codec can't decode"
    ),
    "broken tokenizer_config": Case(
        damage=in_model("tokenizer_config.json", "{"), field="model.path", error="tokenizer_config.json is not valid JSON"
    ),
    "tokenizer_config of a list": Case(
        damage=in_model("tokenizer_config.json", "[]"), field="model.path", error="holds a list, not an object"
    ),
    "tokenizer larger than the vocabulary": Case(
        damage=lambda: write_tokenizer(Path("model"), tokens=40), field="model.path",
        error="has 40 tokens, but the model's vocab_size is 32", fix="use the tokenizer that belongs to the model",
    ),
    "token added beyond the vocabulary": Case(
        damage=lambda: (write_tokenizer(Path("model"), tokens=32), template(CHATML)(), _add_pad_token()), field="model.path",
        error="has 33 tokens, but the model's vocab_size is 32",
    ),
    "no end token": Case(
        damage=in_model("tokenizer_config.json", {"chat_template": CHATML}), field="model.path", error="names no end-of-sequence token",
        fix="set eos_token_id in its generation_config.json",
    ),
    "broken generation_config": Case(
        damage=in_model("generation_config.json", "{"), field="model.path", error="generation_config.json is not valid JSON"
    ),
    "tokenizer without the task's characters": Case(
        damage=lambda: (p := Path("model/tokenizer.json")).write_text(p.read_text().replace('"*":', '"x":')),
        overrides=("task={type: countdown}", "reward=null"), field="model.path", error="cannot write ['*'] that Countdown needs",
        fix="use a model whose vocabulary has them",
    ),
    # ---- template
    "no template": Case(
        damage=lambda: write_tokenizer(Path("model"), chat_template=None), field="task.apply_chat_template", error="has no chat template",
        fix="set apply_chat_template: false",
    ),
    "no template for an environment's messages": Case(
        damage=lambda: write_tokenizer(Path("model"), chat_template=None),
        overrides=("task.apply_chat_template=false", "environment={type: agent, command: [sh]}"), field="environment.template",
        error="has no chat template", fix="or set environment.template=plain",
    ),
    "a template that cannot be continued": Case(
        damage=template(CHATML.replace("{% if add_generation_prompt %}", "{% if false %}")),
        overrides=("environment={type: agent, command: [sh]}",), field="environment.template", error="ignores add_generation_prompt",
        fix="or set environment.template=plain",
    ),
    "template that is no Jinja": Case(
        damage=template("{% for m in messages %}"), field="task.apply_chat_template",
        error="is no Jinja template: Unexpected end of template",
        fix="restore the template that came with the model, or set task.apply_chat_template=false",
    ),
    "template that fails": Case(
        damage=template("{{ messages[0]['role'] / 2 }}"), field="task.apply_chat_template", error="cannot be rendered: TypeError"
    ),
    "template that reaches out": Case(
        damage=template("{{ ''.__class__.__mro__[1].__subclasses__() }}"), field="task.apply_chat_template", error="SecurityError"
    ),
    "template that refuses a system message": Case(
        damage=template("{% if messages[0].role == 'system' %}{{ raise_exception('no system role') }}{% endif %}" + CHATML),
        overrides=("task.system_prompt=Think.",), field="task.apply_chat_template", error="no system role", fix="remove task.system_prompt",
    ),
    "template that leaves out the system message": Case(
        damage=template("{{ messages[-1]['content'] }}"), overrides=("task.system_prompt=Think.",), field="task.apply_chat_template",
        error="leaves out task.system_prompt",
    ),
    "template that leaves out the prompt": Case(
        damage=template("Hello."), field="task.apply_chat_template", error="leaves out the prompt"
    ),
    "template of a warm start": Case(
        damage=template("Hello."), config="sft.yaml", field="data.apply_chat_template", error="leaves out the prompt",
        fix="set data.apply_chat_template=false",
    ),
    "system prompt without a template": Case(
        overrides=("task.system_prompt=Think.", "task.apply_chat_template=false"), field="task.system_prompt",
        error="system_prompt needs a chat template", fix="set it to true",
    ),
    "an argument that the template never reads": Case(
        damage=template(THINKS), overrides=("model.chat_template_kwargs={enable_thinkin: false}",), field="model.chat_template_kwargs",
        error="the chat template of model never reads enable_thinkin, so", fix="it reads enable_thinking: correct or remove the name",
    ),
    "an argument of a template without any": Case(
        overrides=("model.chat_template_kwargs={enable_thinking: false}",), field="model.chat_template_kwargs",
        error="never reads enable_thinking",
        fix="it reads no argument: correct or remove the name",
    ),
    "an argument that the template cannot take": Case(
        damage=template(THINKS), overrides=("model.chat_template_kwargs={enable_thinking: {}}",), field="model.chat_template_kwargs",
        error="cannot be rendered: TemplateError: enable_thinking is no truth", fix="correct or remove them",
    ),
    "an argument of a warm start": Case(
        overrides=("model.chat_template_kwargs={thinking: 1}",), config="sft.yaml", field="model.chat_template_kwargs",
        error="never reads thinking",
    ),
    "an argument of an environment alone": Case(
        damage=lambda: Path("game.py").write_text("class Game:\n    def reset(self, problem): ...\n    def step(self, message): ...\n"),
        overrides=("model.chat_template_kwargs={thinking: 1}", "task.apply_chat_template=false",
                   "environment={type: chat, environment: 'game:Game'}"), field="model.chat_template_kwargs", error="never reads thinking",
    ),
    "tokenizer of a reward model": Case(
        damage=lambda: (shutil.copytree("model", "judge"), Path("judge/tokenizer.json").write_text("{")),
        overrides=("reward={type: model, urls: ['http://127.0.0.1:1'], text: {type: chat, tokenizer: judge}}",), field="reward",
        error="judge/tokenizer.json is no readable tokenizer",
    ),
    # ---- lengths
    "a long prompt": Case(
        damage=train(GOOD + '{"prompt": "%s", "answer": "1"}\n' % ("1" * 230)), overrides=("task.apply_chat_template=false",),
        field="task.train_path", error="the longest prompt, train.jsonl:line 2, has 230 tokens, but only 198 leave room for",
        fix="remove prompts of more than 198 tokens",
    ),
    "prompts all too long": Case(
        damage=train('{"prompt": "%s", "answer": "1"}\n' % ("1" * 230) * 3), overrides=("task.apply_chat_template=false",),
        field="task.train_path", error="the longest of at least 3 such prompts, train.jsonl:line 1, has 230 tokens",
    ),
    "a long held-out prompt": Case(
        damage=lambda: write_jsonl("heldout.jsonl", {"prompt": "2" * 201, "answer": "1"}), overrides=("task.apply_chat_template=false",),
        field="task.heldout_path", error="heldout.jsonl:line 1, has 201 tokens",
    ),
    "a long system prompt": Case(
        overrides=(f"task.system_prompt={'1' * 180}x",), field="task.train_path", error="has 2", fix="lower rollout.max_new_tokens",
    ),
    "a generated prompt without room": Case(
        overrides=("task={type: countdown}", "reward=null", "rollout.max_new_tokens=245"), field="rollout.max_new_tokens",
        error="training prompt '20 20 20=60:' has 12 tokens, but only 9 leave room",
    ),
    "a generated held-out prompt without room": Case(
        overrides=("task={type: countdown}", "reward=null", "evaluation.max_new_tokens=245"), field="evaluation.max_new_tokens",
        error="held-out prompt '20 20 20=60:' has 12 tokens, but only 9 leave room for evaluation.max_new_tokens=245",
        fix="lower evaluation.max_new_tokens",
    ),
    "a long example of a warm start": Case(
        damage=lambda: write_jsonl("pairs.jsonl", {"prompt": "1", "response": "2"}, {"prompt": "1" * 200, "response": "2" * 60}),
        overrides=("data.apply_chat_template=false",), config="sft.yaml", field="data.path", error="pairs.jsonl:line 2: takes 260 tokens",
        fix="shorten or drop it",
    ),
    # ---- data
    "gzip": Case(damage=train(gzip.compress(GOOD.encode())), field="task.train_path", error="is compressed by gzip", fix="`gunzip`"),
    "gzip by name": Case(
        damage=lambda: Path("t.jsonl.gz").write_bytes(gzip.compress(b"{}")), overrides=("task.train_path=t.jsonl.gz",),
        field="task.train_path", error="is compressed by gzip", fix="`gunzip`",
    ),
    "zstd": Case(damage=train(b"\x28\xb5\x2f\xfd\x00"), field="task.train_path", error="is compressed by zstd"),
    "zip": Case(damage=train(b"PK\x03\x04\x00"), field="task.train_path", error="a zip archive or a spreadsheet"),
    "parquet by another name": Case(
        damage=train(b"PAR1\x00"), field="task.train_path", error="is parquet", fix="a name that ends in .parquet"
    ),
    "UTF-16": Case(damage=train(GOOD.encode("utf-16")), field="task.train_path", error="is UTF-16 text", fix="save it as UTF-8"),
    "LFS pointer": Case(
        damage=train("version https://git-lfs.github.com/spec/v1\n"), field="task.train_path", error="a pointer of Git LFS",
        fix="git lfs pull",
    ),
    "an array": Case(damage=train('[\n{"prompt": "1"}\n]\n'), field="task.train_path", error="line 1: not valid JSON", fix="jq -c '.[]'"),
    "JSON by name": Case(
        damage=lambda: Path("t.json").write_text("[]"), overrides=("task.train_path=t.json",), field="task.train_path",
        error="of an unknown type", fix="jq -c '.[]'",
    ),
    "half a character": Case(
        damage=train(GOOD + '{"prompt": "a\\ud800", "answer": "1"}\n'), field="task.train_path",
        error="train.jsonl:line 2: field `prompt` has half of a surrogate pair (\\ud800, at position 2)",
        fix="write the whole pair, or drop it",
    ),
    "a prompt that is a number": Case(
        damage=train(GOOD + '{"prompt": 5, "answer": "1"}\n'), field="task.train_path",
        error="train.jsonl:line 2: field `prompt` is the number 5, not text", fix='write it as text ("5"), or name the field of the prompt',
    ),
    "a message that is a number": Case(
        damage=train('{"prompt": [{"role": "user", "content": 5}], "answer": 1}\n'), field="task.train_path",
        error="train.jsonl:line 1: field `prompt[0].content` is the number 5, not text", fix='write it as text ("5")',
    ),
    "a prompt of a warm start that is a number": Case(
        damage=lambda: write_jsonl("pairs.jsonl", {"prompt": 5, "response": "1"}), config="sft.yaml", field="data.path",
        error="pairs.jsonl:line 1: field `prompt` is the number 5, not text",
    ),
    "half a character of an answer": Case(
        damage=train('{"prompt": "1", "answer": "\\udc00"}\n'), field="task.train_path",
        error="line 1: field `answer` has half of a surrogate pair",
    ),
    "half a character of a warm start": Case(
        damage=lambda: Path("pairs.jsonl").write_text('{"prompt": "1", "response": "\\ud800"}\n'), config="sft.yaml", field="data.path",
        error="pairs.jsonl:line 1: field `response` has half of a surrogate pair",
    ),
    "deeply nested": Case(
        damage=train('{"prompt": "1", "answer": "1", "more": ' + "[" * 100_000 + "]" * 100_000 + "}\n"), field="task.train_path",
        error="line 1: nested too deeply",
    ),
    "nothing": Case(damage=train(""), field="task.train_path", error="holds no records"),
    "blank lines": Case(damage=train("\n \n"), field="task.train_path", error="holds no records"),
    "a folder of data": Case(
        damage=lambda: (Path("data").mkdir(), shutil.copy("train.jsonl", "data")), overrides=("task.train_path=data",),
        field="task.train_path", error="this is a folder", fix="name a file in it, such as data/train.jsonl",
    ),
    # ---- conversations
    "a conversation without a template": Case(
        damage=lambda: write_jsonl("train.jsonl", CONVERSATION), overrides=("task.apply_chat_template=false",), field="task.train_path",
        error="train.jsonl:line 1: field `prompt` is a conversation of system, user, which only a chat template can render",
        fix="set apply_chat_template: true",
    ),
    "a conversation that the model ends": Case(
        damage=lambda: write_jsonl("heldout.jsonl", {**CONVERSATION, "prompt": [{"role": "assistant", "content": "1"}]}),
        field="task.heldout_path", error="heldout.jsonl:line 1: field `prompt` is a conversation of assistant, which ends with",
        fix="end it with the message to answer, of the role user or tool",
    ),
    "a conversation that the template refuses": Case(
        damage=lambda: (
            template("{% if messages[0].role == 'system' %}{{ raise_exception('no system role') }}{% endif %}" + CHATML)(),
            write_jsonl("train.jsonl", {"prompt": "1", "answer": "1"}, CONVERSATION, CONVERSATION),
        ), field="task.train_path", error="train.jsonl:line 2: a conversation of system, user: the chat template of model cannot be",
        fix="drop such records",
    ),
    "a conversation of which the template drops a message": Case(
        damage=lambda: (template("{{ messages[-1].content }}")(), write_jsonl("train.jsonl", CONVERSATION)), field="task.train_path",
        error="line 1: a conversation of system, user: the chat template of model leaves out message 1, of role system",
    ),
    "a conversation of a warm start that the template refuses": Case(
        damage=lambda: (template("{{ messages[-1].content }}")(), write_jsonl("pairs.jsonl", CONVERSATION | {"response": "1"})),
        config="sft.yaml", field="data.path", error="pairs.jsonl:line 1: a conversation of system, user: the chat template of",
    ),
    "a conversation that a reward model's template refuses": Case(
        damage=lambda: (
            shutil.copytree("model", "judge"), in_model("../judge/chat_template.jinja", "{{ 1 // (3 - messages | length) }}")(),
            write_jsonl("train.jsonl", CONVERSATION),
        ), overrides=("reward={type: model, urls: ['http://127.0.0.1:1'], text: {type: chat, tokenizer: judge}}",), field="reward",
        error="train.jsonl:line 1: a conversation of system, user, assistant: the chat template of judge cannot", fix="{type: plain}",
    ),
    "tool calls that a reward model's template leaves out": Case(
        damage=lambda: (
            shutil.copytree("model", "judge"), in_model("../judge/chat_template.jinja", CHATML)(),
            template("{% for m in messages %}{{ m.tool_calls }}{% endfor %}" + CHATML)(),
            write_jsonl("train.jsonl", {"prompt": [ASKED, CALLED, REPLIED, ASKED], "answer": "1"}),
        ), overrides=(
            "reward={type: model, urls: ['http://127.0.0.1:1'], text: {type: chat, tokenizer: judge}}", "task.heldout_path=null",
        ), field="reward",
        error="the chat template of judge leaves out the tool calls of message 2 (the name of call 1)",
        fix="or use text: {type: plain}, which has only the contents, or drop such records",
    ),
    "a long conversation": Case(
        damage=lambda: write_jsonl("train.jsonl", CONVERSATION, CONVERSATION | {"prompt": [*CONVERSATION["prompt"][:1] * 9, ASKED]}),
        field="task.train_path", error="the longest prompt, train.jsonl:line 2, has",
    ),
    "a conversation that ends with a question": Case(
        damage=lambda: write_jsonl("pairs.jsonl", {"messages": [ASKED]}), overrides=("data.messages_field=messages",),
        config="sft.yaml", field="data.path", error="pairs.jsonl:line 1: field `messages` is a conversation of user",
        fix="end it with a message of the role assistant",
    ),
    "a response that the template rewrites": Case(
        damage=lambda: (
            template("{{ messages | length }}" + CHATML)(), write_jsonl("pairs.jsonl", {"prompt": "1", "completion": [ANSWERED]})
        ), overrides=("data.response_field=completion",), config="sft.yaml", field="data.path",
        error="pairs.jsonl:line 1: the chat template of model renders the prompt differently if a response follows", fix="as a text",
    ),
    "an earlier turn that the template rewrites": Case(
        damage=lambda: (
            template("{% for m in messages %}{{ m.content if loop.last or m.role != 'assistant' else '1' }}{{ eos_token }}{% endfor %}")(),
            write_jsonl("pairs.jsonl", {"messages": [ASKED, ANSWERED]}, {"messages": [ASKED, ANSWERED, ASKED, ANSWERED]}),
        ), overrides=("data.messages_field=messages", "data.learned_turns=all"), config="sft.yaml", field="data.learned_turns",
        error="pairs.jsonl:line 2: message 2, of the assistant: the chat template of model writes '1 + 1<eos>2<eos>' if it is the last",
        fix="use a template that keeps earlier turns, or set data.learned_turns=last, or drop such records",
    ),
    "earlier tool calls that the template leaves out": Case(
        damage=lambda: write_jsonl("pairs.jsonl", {"messages": [ASKED, CALLED, REPLIED, ANSWERED]}),
        overrides=("data.messages_field=messages",), config="sft.yaml", field="data.path",
        error="pairs.jsonl:line 1: a conversation of user, assistant, tool: the chat template of model leaves out the tool calls of mes",
        fix="use a template that writes them, or write them into the message's content and remove tool_calls, or drop such records",
    ),
    "tools that the template leaves out": Case(
        damage=lambda: write_jsonl("train.jsonl", {"prompt": "1", "answer": "1", "tools": [TOOL]}),
        overrides=("task.tools_field=tools", "task.heldout_path=null"), field="task.train_path",
        error="line 1: a conversation of user: the chat template of model leaves out the tools", fix="describe them in a message",
    ),
    # ---- names of the hub
    "model of the hub": Case(
        overrides=("model.path=Qwen/Qwen2.5-0.5B",), field="model.path", error="no such folder",
        fix="nothing is downloaded automatically: `hf download Qwen/Qwen2.5-0.5B --local-dir models/Qwen2.5-0.5B`, then "
        "model.path=models/Qwen2.5-0.5B (models that are here: model)",
    ),
    "data of the hub": Case(
        overrides=("task.train_path=openai/gsm8k",), field="task.train_path", error="no such file",
        fix="`hf download openai/gsm8k --repo-type dataset --local-dir data/gsm8k`",
    ),
    "model of a recipe": Case(
        overrides=("model.path=models/Qwen3-8B",), field="model.path", error="no such folder",
        fix="nothing is downloaded automatically: `hf download Qwen/Qwen3-8B --local-dir models/Qwen3-8B` (models that are here: model)",
    ),
    "model of a recipe, of which only config.json is here": Case(
        damage=lambda: (Path("Qwen3-8B").mkdir(), Path("Qwen3-8B/config.json").write_text(Path("model/config.json").read_text())),
        overrides=("model.path=Qwen3-8B",), field="model.path", error="the folder has no model.safetensors",
        fix="download what is missing: `hf download Qwen/Qwen3-8B --local-dir Qwen3-8B`",
    ),
    "another model than is here": Case(
        overrides=("model.path=models/tiny",), field="model.path", error="no such folder", fix="(models that are here: model)"
    ),
}  # fmt: skip


def _add_pad_token() -> None:
    path = Path("model/tokenizer_config.json")
    path.write_text(json.dumps(json.loads(path.read_text()) | {"pad_token": {"content": "<new>"}}))


@pytest.mark.parametrize("config", ["run.yaml", "sft.yaml"])
def test_sound_inputs_have_no_problems(config):
    assert problems(config=config) == []


def test_conversations_of_a_sound_file_have_no_problems():
    turns = [*CONVERSATION["prompt"], {"role": "assistant", "content": "2"}, {"role": "user", "content": "3"}]
    write_jsonl("train.jsonl", CONVERSATION, {"prompt": turns, "answer": "3"})
    assert problems() == []


@pytest.mark.parametrize("name", CASES)
def test_a_broken_input_is_named(name):
    case = CASES[name]
    case.damage()
    found = problems(*case.overrides, config=case.config)
    assert any(
        case.field in p.field.split(", ") and case.error in p.error and case.fix in p.fix for p in found
    ), [str(p) for p in found]
    assert len(found) == 1 or case.field == "model.path" or "system prompt" in name, "one thing is broken"


def test_every_broken_line_is_told_or_counted():
    train(
        GOOD + "{broken\n" + "[]\n" + '{"prompt": 5, "answer": "1"}\n' + '{"prompt": "1"}\n' * 3 + "{broken"
    )()
    (problem,) = problems()
    assert str(problem).splitlines() == [
        "run.yaml:12", "  field: task.train_path", "  value: train.jsonl (run.yaml:12)",
        "  error: train.jsonl:line 2: not valid JSON (Expecting property name enclosed in double quotes: line 1 column 2 (char 1)); "
        "each line must be one JSON object (correct or remove it)",
        '         train.jsonl:line 3: a list, not an object (write each line like {"field": "text", ...})',
        '         train.jsonl:line 4: field `prompt` is the number 5, not text (write it as text ("5"), or name the field of the prompt in '
        "the config)",
        "         train.jsonl:line 5: field `answer` is missing (this record has `prompt`. Rename the field, or name it in the config)",
        "         train.jsonl:line 6: field `answer` is missing (this record has `prompt`. Rename the field, or name it in the config)",
        "         and 2 more",
        "  fix:   correct these records, or remove them",
    ]  # fmt: skip


def test_a_fix_of_all_broken_lines_is_told_once():
    train(GOOD + '{"prompt": "1"}\n' * 2)()
    (problem,) = problems()
    assert problem.error.splitlines() == [f"train.jsonl:line {n}: field `answer` is missing" for n in (2, 3)]
    assert problem.fix == "this record has `prompt`. Rename the field, or name it in the config"


def test_every_field_that_a_reward_refuses_is_told_or_counted():
    train('{"prompt": "1", "answer": "none"}\n' * 7)()
    (problem,) = problems()
    assert [line.split(": ")[0] for line in problem.error.splitlines()] == [
        *(f"train.jsonl:line {number}" for number in range(1, 6)),
        "and 2 more",
    ]


def test_arguments_of_the_template_count_in_the_length_of_a_prompt():
    template(THINKS)()
    around = (
        len(encode_prompt(TokenizerFiles(Path("model")), "1", system_prompt=None, apply_chat_template=True))
        - 1
    )
    train('{"prompt": "%s", "answer": "1"}\n' % ("1" * (198 - around)))()
    assert problems("rollout.prompts_per_step=1") == []
    assert problems("model.chat_template_kwargs={enable_thinking: true}") == []
    (problem,) = problems("model.chat_template_kwargs={enable_thinking: false}")
    assert problem.field.startswith("task.train_path") and "has 207 tokens" in problem.error


def test_everything_is_said_at_once():
    CASES["broken tokenizer"].damage()
    CASES["half a character"].damage()
    Path("heldout.jsonl").write_text("")
    with Path("model/model.safetensors").open("r+b") as file:
        file.truncate(100)
    assert [problem.field for problem in problems()] == [
        "model.path",
        "model.path",
        "task.train_path",
        "task.heldout_path",
    ]


def test_sound_sources_are_read_and_a_reward_for_none_of_them_is_said(capsys):
    Path("train.jsonl").write_text(SOURCES)
    assert problems(BY_SOURCE, "task.heldout_path=null") == []
    assert "no record of" not in capsys.readouterr().out
    assert problems(BY_SOURCE, "reward.rewards.poems={type: gsm8k}", "task.heldout_path=null") == []
    assert "reward.rewards: no record of train.jsonl has `source` 'poems'" in capsys.readouterr().out


def test_prompts_that_are_left_out_are_counted_before_a_start(capsys):
    long = {"prompt": "1" * 230, "answer": "1"}
    write_jsonl("train.jsonl", {"prompt": "1", "answer": "1"}, long, long | {"prompt": "1" * 240})
    leave_out = ("task.apply_chat_template=false", "task.too_long_prompts=leave_out")
    assert problems(*leave_out) == []
    assert (
        "# task.train_path: at least 2 of 3 prompts have more than 198 tokens and are left out; the longest, "
        "train.jsonl:line 3, has 240"
    ) in capsys.readouterr().out
    write_jsonl("train.jsonl", long)
    (problem,) = problems(*leave_out)
    assert problem.field.startswith("task.train_path") and "230 tokens" in problem.error


@pytest.mark.parametrize(
    ("source", "weights", "error", "fix"),
    [
        (
            {"in": "code"}, "a/math: 3, chat: 1", "train.jsonl:line 3: field `of.in` is 'code', which is not in weights (a/math, chat)",
            "give it a weight, 0 to leave it out",
        ),
        (
            {"in": "code"}, "a/math: 3, code: 1, coder: 2", "weights has 'coder', of which train.jsonl has no record",
            "did you mean `code`? the names in `of.in`: a/math, code",
        ),
        ({}, "a/math: 3", "train.jsonl:line 3: field `of.in` is missing", "name it in the config"),
        ({"in": None}, "a/math: 3", "train.jsonl:line 3: field `of.in` is null", "write the name of the record's source there"),
        ({"in": ["code"]}, "a/math: 3", "train.jsonl:line 3: field `of.in` is a list", "write the name of the record's source there"),
        ({"in": 2.5}, "a/math: 3, 'True': 1", "field `of.in` is '2.5', which is not in weights", "give it a weight"),
    ],
)  # fmt: skip
def test_the_sources_of_a_mixture_are_those_of_the_records(source, weights, error, fix):
    """The held-out file has none."""
    row = {"prompt": "1 + 1", "answer": "2"}
    rows = [row | {"of": {"in": "a/math"}}, row | {"of": {"in": "a/math"}}, row | {"of": source}]
    write_jsonl("train.jsonl", *rows)
    mixture = "sampler={type: mixture, field: of.in, weights: {%s}}"
    (problem,) = problems(mixture % weights)
    assert problem.field == "sampler" and error in problem.error and fix in (problem.fix or "")
    write_jsonl("train.jsonl", *rows[:2], row | {"of": {"in": True}})
    assert problems(mixture % "a/math: 3, 'True': 1") == []


def test_every_heldout_set_is_checked_like_the_first(capsys):
    sets = ("task.heldout_sets.hard=hard.jsonl",)
    assert [(p.field, p.error) for p in problems(*sets)] == [
        ("task.heldout_sets.hard", f"no such file: {Path('hard.jsonl').absolute()}")
    ]
    write_jsonl("hard.jsonl", {"prompt": "3 + 3", "answer": "6"}, {"prompt": "7"})
    assert [problem.field for problem in problems(*sets)] == ["task.heldout_sets.hard"]
    write_jsonl("hard.jsonl", {"prompt": "3 + 3", "answer": "6"})
    assert problems(*sets) == []
    assert (
        "# task.heldout_sets.hard: 1 of the 1 held-out prompts are also trained on" in capsys.readouterr().out
    )
    (problem,) = problems(*sets, "task.heldout_path=null")
    assert problem.field == "task.heldout_sets, task.heldout_path" and "name one of the files" in (
        problem.fix or ""
    )


def test_what_is_rarely_meant_is_said(capsys):
    row = {"prompt": "1", "answer": "1"}
    write_jsonl("train.jsonl", row, row, row)
    write_jsonl("heldout.jsonl", row, {"prompt": "2", "answer": "2"})
    assert problems("rollout.prompts_per_step=5") == []
    said = capsys.readouterr().out
    assert "# task.train_path: 2 of 3 prompts of train.jsonl repeat an earlier one" in said
    assert "# task.heldout_path: 1 of the 2 held-out prompts are also trained on" in said
    assert "# task.train_path: its 3 prompts are fewer than rollout.prompts_per_step=5" in said


@pytest.mark.parametrize(
    ("ends", "overrides", "is_said"),
    [
        ([], (), True),
        (["<|endoftext|>"], (), True),
        (["<|im_end|>", "<|endoftext|>"], (), False),
        ([], ("rollout.stop=[<|im_end|>]",), False),
        ([], ("task.apply_chat_template=false",), False),
        ([], ("environment={type: agent, command: [echo]}",), False),  # stops at the template's end
    ],
)
def test_an_answer_that_the_template_closes_where_no_response_ends_is_said(capsys, ends, overrides, is_said):
    """As with a base model whose template is that of the chat model: a response would run on to max_new_tokens."""
    shutil.rmtree("model")
    model = make_model_folder(Path("model"), MODEL | {"vocab_size": 512})
    tokenizer = chat_tokenizer("qwen2_5")
    tokenizer.eos_token = "<|endoftext|>"
    tokenizer.save_pretrained(model)
    ids = tokenizer.convert_tokens_to_ids(ends)
    (model / "generation_config.json").write_text(json.dumps({"eos_token_id": ids} if ends else {}))
    assert problems(*overrides) == []
    end, own = tokenizer.convert_tokens_to_ids(["<|im_end|>", "<|endoftext|>"])
    note = f"# model.path: the chat template closes an answer with '<|im_end|>' ({end}), but responses end only at '<|endoftext|>' ({own})"
    said = capsys.readouterr().out
    assert (note in said) == is_said and (f"add {end} to eos_token_id in" in said) == is_said


@pytest.mark.parametrize(("every", "is_said"), [(0, False), (5, False), (6, True)])
def test_evaluations_that_no_step_is_due_for_are_said(capsys, every, is_said):
    assert problems("steps=5", f"evaluation.every={every}", "evaluation.at_ends=false") == []
    note = f"# evaluation: every={every} with at_ends=false evaluates nothing in steps=5"
    assert (note in capsys.readouterr().out) == is_said


def test_what_trl_does_and_a_warm_start_does_not_is_said(capsys):
    write_jsonl("pairs.jsonl", {"messages": [ASKED, ANSWERED, ASKED, ANSWERED], "tools": [TOOL]})
    assert problems("data.messages_field=messages", config="sft.yaml") == []
    said = capsys.readouterr().out
    assert (
        "earlier ones of the assistant, such as in pairs.jsonl:line 1, are context. data.learned_turns=all"
        in said
    )
    assert "its records have `tools`, which no prompt shows; data.tools_field=tools gives them" in said
    template("{% for m in messages %}{{ m.content }}{{ eos_token }}{% endfor %}")()
    assert problems("data.messages_field=messages", "data.learned_turns=all", config="sft.yaml") == []
    assert "are context" not in capsys.readouterr().out


CALLS = "{% for c in m.tool_calls or [] %}{% set c = c.function or c %}{{ c.name }}CALL{% endfor %}"
"""Writes the name of each call, and then CALL."""


@pytest.mark.parametrize("arguments", [{}, {"a": 1}, '{"a": 1}', {"a": {"b": [True, None, "x"]}}, None])
@pytest.mark.parametrize("is_flat", [False, True])
@pytest.mark.parametrize(
    "call", ["{{ c.arguments | tojson }}", "{{ raise_exception('no') if c.arguments == {'a': 7} }}{{ c }}"]
)
def test_a_template_that_reads_earlier_tool_calls_is_taken(call, arguments, is_flat):
    template(
        "{% for m in messages %}{{ m.content }}" + CALLS.replace("CALL", call) + "{{ eos_token }}{% endfor %}"
    )()
    made = {"name": "add", "arguments": arguments}
    called = CALLED | {"tool_calls": [made if is_flat else {"function": made}] * 2}
    write_jsonl("pairs.jsonl", {"messages": [ASKED, called, REPLIED, ANSWERED]})
    assert problems("data.messages_field=messages", config="sft.yaml") == []


@pytest.mark.parametrize("arguments", [{"a": 1, "b": "x"}, '{"a": 1, "b": "x"}'])
@pytest.mark.parametrize(
    ("written", "lost"),
    [
        ("{% if m.tool_calls %}[called]{% endif %}", "the name of call 1"),
        ("{{ m.tool_calls | length }}", "the name of call 1"),
        ("{{ m.tool_calls[0].function if m.tool_calls }}", "the name of call 2"),
        (CALLS.replace("CALL", ""), "the arguments of call 1"),
        ("{% if m.role == 'assistant' and not (m.content or m.tool_calls) %}{{ 1 // 0 }}{% endif %}", "the name of call 1"),
    ],
)  # fmt: skip
def test_a_template_that_loses_a_part_of_earlier_tool_calls_is_told(written, lost, arguments):
    template("{% for m in messages %}{{ m.content }}" + written + "{{ eos_token }}{% endfor %}")()
    once = CALLED | {"tool_calls": [{"function": {"name": "add", "arguments": arguments}}]}
    twice = once | {"tool_calls": once["tool_calls"] * 2}
    write_jsonl("pairs.jsonl", *({"messages": [ASKED, calls, REPLIED, ANSWERED]} for calls in (once, twice)))
    (problem,) = problems("data.messages_field=messages", config="sft.yaml")
    assert problem.error.endswith(f"leaves out the tool calls of message 2 ({lost})")


# ----------------------------------------------------------------------------------------------------------
# reading, once


def test_a_file_is_read_once_until_it_changes(monkeypatch):
    read = []
    original = records._read_lines
    monkeypatch.setattr(
        records, "_read_lines", lambda path, *more: read.append(str(path)) or original(path, *more)
    )
    reads_no_field = "reward={type: model, urls: ['http://127.0.0.1:1']}"
    problems(reads_no_field)
    problems(reads_no_field)
    assert read == ["train.jsonl", "heldout.jsonl"]
    train(GOOD * 3)()
    problems(reads_no_field)
    assert read == ["train.jsonl", "heldout.jsonl", "train.jsonl"]


def test_the_reading_of_a_large_file_is_told(monkeypatch, capsys):
    monkeypatch.setattr(records, "_LINES_BETWEEN_REPORTS", 2)
    monkeypatch.setattr(input_checks, "_FIRST_LINE_S", 0.0)
    monkeypatch.setattr(input_checks, "_LATER_LINES_S", 0.0)
    problems()
    lines = capsys.readouterr().err.splitlines()
    assert (
        lines[-1] == "reading train.jsonl: 100%"
        and lines[0].startswith("reading train.jsonl: ")
        and len(lines) == 2
    )


def test_parquet_is_read_by_the_columns_that_are_needed(monkeypatch):
    rows = [{"prompt": "1", "answer": "1", "other": "x" * 10}] * 3
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), "train.parquet")
    assert [
        record for _, record in records.read_records(Path("train.parquet"), roots={"prompt", "answer"})
    ] == [{"prompt": "1", "answer": "1"}] * 3
    assert next(records.read_records(Path("train.parquet"))) == (1, rows[0])
    assert problems("task.train_path=train.parquet") == []


# ------------------------------------------------------------------------------- the tokenizer's files, as
# transformers reads them


WITH_TOKENS = (
    "{{ bos_token }}{% for m in messages %}{{ m.role }}={{ m.content | trim }}{{ eos_token }}{% endfor %}"
)


@pytest.mark.parametrize("text", [CHATML, WITH_TOKENS, THINKS])
def test_the_files_give_what_transformers_gives(tmp_path, text):
    make_tiny_countdown_model(tmp_path / "tiny", seed=0)
    (tmp_path / "tiny" / "chat_template.jinja").write_text(text)
    ours, theirs = TokenizerFiles(tmp_path / "tiny"), load_tokenizer(tmp_path / "tiny")
    assert (
        ours.num_ids == len(theirs)
        and ours.eos_token_id == theirs.eos_token_id
        and ours.unk_token_id == theirs.unk_token_id
    )
    for system_prompt, arguments in ((None, {}), ("9 - 8 =", {"enable_thinking": False, "eos_token": "4"})):
        ids = [
            encode_prompt(
                t,
                "1 + 2?",
                system_prompt=system_prompt,
                apply_chat_template=True,
                chat_template_kwargs=arguments,
            )
            for t in (ours, theirs)
        ]
        assert ids[0] == ids[1]
    assert ours.encode("3*(4-5)") == theirs.encode("3*(4-5)", add_special_tokens=False)
    assert end_token_ids(ours, tmp_path / "tiny") == end_token_ids(theirs, tmp_path / "tiny")
    check_characters(ours)


def test_the_default_of_several_templates_is_taken(tmp_path):
    template(
        [{"name": "tools", "template": "no"}, {"name": "default", "template": "{{ messages[0].content }}"}]
    )()
    assert (
        TokenizerFiles(tmp_path / "model").apply_chat_template([{"role": "user", "content": "hello"}])
        == "hello"
    )


@pytest.mark.parametrize("place", ["tokenizer_config.json", "additional_chat_templates"])
def test_the_template_for_tools_is_taken_where_there_are_tools(tmp_path, place):
    """As transformers takes it, and so the learner's prompts: a check with the default one would miss the tools."""
    make_tiny_countdown_model(tmp_path / "tiny", seed=0)
    texts = {"default": CHATML, "tool_use": "{{ tools[0].name }}{{ depth }}" + CHATML}
    if place == "tokenizer_config.json":
        content = json.loads((tmp_path / "tiny" / place).read_text())
        content["chat_template"] = [{"name": name, "template": text} for name, text in texts.items()]
        (tmp_path / "tiny" / place).write_text(json.dumps(content))
    else:
        (tmp_path / "tiny" / place).mkdir()
        (tmp_path / "tiny" / "chat_template.jinja").write_text(texts["default"])
        (tmp_path / "tiny" / place / "tool_use.jinja").write_text(texts["tool_use"])
    ours, theirs = TokenizerFiles(tmp_path / "tiny"), load_tokenizer(tmp_path / "tiny")
    assert ours.chat_template == theirs.chat_template == texts
    with_tools = WithTools(({"role": "user", "content": "1"},), ({"name": "9"},))
    for prompt in (with_tools, with_tools.messages):
        ids = [encode_prompt(t, prompt, system_prompt=None, apply_chat_template=True) for t in (ours, theirs)]
        assert ids[0] == ids[1] and (ours.decode(ids[0])[0] == "9") == (prompt is with_tools)
    check_template_arguments(ours, {"depth": 3})  # which the one for tools reads


FAILS_WITH_TOOLS = "{% if tools %}{{ raise_exception('no tools') }}{% endif %}" + CHATML


@pytest.mark.parametrize(
    "text",
    [
        FAILS_WITH_TOOLS,
        [{"name": "default", "template": CHATML}, {"name": "tool_use", "template": FAILS_WITH_TOOLS}],
    ],
)
def test_the_template_is_tried_with_the_tools_of_an_environment(text, monkeypatch):
    template(text)()
    monkeypatch.syspath_prepend(Path.cwd())
    source = "class Game:\n    {tools}\n    def reset(self, problem): ...\n    def step(self, message): ...\n"
    tools = f"tools = [{TOOL}]"
    for name in ("with_tools", "without"):
        Path(f"{name}.py").write_text(source.format(tools=tools if name == "with_tools" else ""))
    chat = "environment={{type: chat, environment: '{}:Game', tool_call_parser: qwen25{}}}"
    assert problems(chat.format("without", "")) == []
    assert problems(chat.format("with_tools", ", template: plain")) == []
    (problem,) = problems(chat.format("with_tools", ""))
    assert problem.field == "environment.template"
    assert "no tools" in problem.error and "or set environment.template=plain" in problem.fix
    served = (
        "environment={{type: openenv, urls: ['http://localhost:1'], interface: {}, tool_call_parser: qwen25}}"
    )
    assert problems(served.format("text")) == []
    assert problems(served.format("tools")) == [problem]


def test_marks_of_what_an_assistant_wrote_are_no_error(tmp_path):
    template(
        "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% break %}{% endfor %}"
    )()
    assert (
        TokenizerFiles(tmp_path / "model").apply_chat_template([{"role": "user", "content": "hello"}])
        == "hello"
    )


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (["type=chat", "environment=game:Missing"], "game has no class 'Missing'"),
        (["type=chat", "environment=game:Game", "options.wrong=1"], "options {'wrong': 1}: TypeError: Game()"),
        (["type=chat", "environment=game:Ends"], "SystemExit: 4 (game.py:12 in __init__)"),
        (["type=chat", "environment=game:Game", "python=no/python"], "environment.python=no/python cannot be started"),
        (["type=chat", "environment=game:Game", "interface=tools", "tool_call_parser=qwen25"], "tool step has no docstring"),
        (["type=chat", "environment=game:Game", "tool_call_parser=qwen2"], "tool_call_parser=qwen2 is unknown to SGLang"),
        (["type=agent", "command=[no-such-agent]"], "there is no program 'no-such-agent'"),
        (["type=agent", "command=[game_agent.py]"], "there is no file 'game_agent.py'"),
        (["type=tokens", "environment=game:Game"], "Game: it has no method run (game.py:2 in Game)"),
    ],
)  # fmt: skip
def test_an_environment_is_made_before_a_start(folder, options, text):
    (folder / "game.py").write_text(GAME)
    assert problems("environment.type=chat", "environment.environment=game:Game") == []
    (problem,) = problems(*(f"environment.{option}" for option in options))
    assert problem.field.startswith("environment.")  # that which the error names
    assert text in problem.error


GAME = """
class Game:
    def reset(self, problem):
        return [{"role": "user", "content": "1"}]

    def step(self, message):
        return [], 1.0, True


class Ends:
    def __init__(self):
        raise SystemExit(4)
"""
