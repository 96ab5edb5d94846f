"""A model's tokenizer from its files, for checks before a start: `tokenizers` and `jinja2` load in a tenth of
a second, transformers takes several seconds.

The ids are those of transformers, but a text without a template gets no special tokens around it: a check must
never refuse what would run.
"""

import contextlib
import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from configs.schema.model import SET_BY_TANDEM

if TYPE_CHECKING:
    import jinja2

    from rollout.tokenization import Tokenizer

_TRIAL_PROMPT = "7 + 5 = ?"
_LFS_POINTER = "version https://git-lfs"


class TokenizerFiles:
    """The part of transformers' tokenizer interface that checks use. Raises ValueError: a file of the tokenizer is
    broken. The message names the file and the fix."""

    def __init__(self, folder: Path):
        from tokenizers import Tokenizer

        self.name_or_path = str(folder)
        path = folder / "tokenizer.json"
        try:
            self._tokenizer = Tokenizer.from_str(path.read_text(encoding="utf-8"))
        except Exception as error:  # the library raises no type of its own
            raise ValueError(
                f"{path} is no readable tokenizer: {_failure_text(path, error)}; download or copy it again"
            ) from error
        self._options = read_object(folder / "special_tokens_map.json") | read_object(
            folder / "tokenizer_config.json"
        )
        self.chat_template = _chat_template(folder, self._options)
        self.special_tokens = {
            name: text
            for name, value in self._options.items()
            if name.endswith("_token") and (text := _token_text(value))
        }

    @staticmethod
    def reads(folder: Path) -> bool:
        """Whether this class can read the folder's tokenizer; transformers reads those without tokenizer.json."""
        return (folder / "tokenizer.json").is_file()

    @property
    def vocabulary(self) -> dict[str, int]:
        """Ids by token."""
        return self._tokenizer.get_vocab()

    @property
    def num_ids(self) -> int:
        """All ids are below this. Special tokens missing from the vocabulary are added at its end, as in
        transformers."""
        vocabulary = self._tokenizer.get_vocab(with_added_tokens=True)
        added = self._options.get("added_tokens_decoder")
        added = added if isinstance(added, dict) else {}
        ids = [*vocabulary.values(), *(int(number) for number in added if number.isdecimal())]
        names = vocabulary.keys() | {_token_text(value) for value in added.values()}
        return 1 + max(ids, default=-1) + len(set(self.special_tokens.values()) - names)

    @property
    def may_have_defaults(self) -> bool:
        """Whether the tokenizer's class in transformers may name special tokens that no file names."""
        plain_classes = (None, "PreTrainedTokenizerFast", "TokenizersBackend")
        return self._options.get("tokenizer_class") not in plain_classes

    @property
    def eos_token_id(self) -> int | None:
        return self._special_token_id("eos_token")

    @property
    def unk_token_id(self) -> int | None:
        return self._special_token_id("unk_token")

    def _special_token_id(self, name: str) -> int | None:
        text = self.special_tokens.get(name)
        return None if text is None else self._tokenizer.token_to_id(text)

    def encode(self, text: str, add_special_tokens: bool = False) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False).ids

    def get_added_vocab(self) -> dict[str, int]:
        added = self._tokenizer.get_added_tokens_decoder()
        return {token.content: number for number, token in added.items()}

    def decode(
        self,
        ids: Sequence[int],
        skip_special_tokens: bool = False,
        clean_up_tokenization_spaces: bool = False,
    ) -> str:
        return self._tokenizer.decode(list(ids), skip_special_tokens=skip_special_tokens)

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tokenize: Literal[False] = False,
        return_dict: Literal[False] = False,
        **arguments: Any,
    ) -> str:
        """The text of the conversation. Raises ValueError for a template that cannot be rendered."""
        import jinja2

        given = {
            **self.special_tokens,
            "messages": messages,
            "tools": None,
            "documents": None,
            "add_generation_prompt": True,
            **arguments,
        }
        try:
            return _compiled(self._template_for(given["tools"])).render(given)
        except jinja2.TemplateSyntaxError as error:
            raise ValueError(
                f"{template_name(self)} is no Jinja template: {error.message} in line {error.lineno}"
            ) from error
        except Exception as error:  # a template is a program and may raise anything
            raise ValueError(
                f"{template_name(self)} cannot be rendered: {type(error).__name__}: {error}"
            ) from error

    def _template_for(self, tools: object) -> str:
        """The template that transformers chooses among several."""
        templates = self.chat_template
        if not isinstance(templates, dict):
            return templates or ""
        return templates["tool_use" if tools is not None and "tool_use" in templates else "default"]

    def check_template(self, system_prompt: str | None, arguments: Mapping[str, Any] = {}) -> None:
        """Render the template once. Raises ValueError if it fails, or leaves out a part of its input."""
        parts, messages = {"the prompt": _TRIAL_PROMPT}, [{"role": "user", "content": _TRIAL_PROMPT}]
        if system_prompt is not None:
            parts["task.system_prompt"] = system_prompt.strip()
            messages.insert(0, {"role": "system", "content": system_prompt})
        rendered = self.apply_chat_template(messages, **arguments)
        for name, text in parts.items():
            if text not in rendered:
                raise ValueError(f"{template_name(self)} leaves out {name}")


def template_name(tokenizer: "Tokenizer") -> str:
    """The template's name in messages."""
    return f"the chat template of {tokenizer.name_or_path or 'this model'}"


def check_template_arguments(tokenizer: "Tokenizer", arguments: Mapping[str, Any]) -> None:
    """Raises ValueError if the chat template never reads one of these.

    A name that the template sets in some of its branches counts as read. A template that is no Jinja reads none; other
    checks report it.
    """
    import jinja2.meta

    templates = tokenizer.chat_template
    environment, read = _jinja_environment(), set[str]()
    functions = {*environment.globals}
    environment.globals.clear()  # an argument may stand for one of them
    for template in templates.values() if isinstance(templates, dict) else [templates or ""]:
        with contextlib.suppress(jinja2.TemplateSyntaxError):
            read |= jinja2.meta.find_undeclared_variables(environment.parse(template))
    if unread := [name for name in arguments if name not in read]:
        known = sorted(
            name for name in read - functions - SET_BY_TANDEM if not name.endswith(("_token", "_tokens"))
        )
        raise ValueError(
            f"{template_name(tokenizer)} never reads {', '.join(unread)}, so "
            f"chat_template_kwargs would change nothing; it reads {', '.join(known) or 'no argument'}: correct or remove the name"
        )


@lru_cache(maxsize=8)
def _compiled(template: str) -> "jinja2.Template":
    return _jinja_environment().from_string(template)


def _jinja_environment():
    """Jinja as transformers sets it up, in a sandbox: a template is a program from elsewhere."""
    import jinja2.ext
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(jinja2.ext.Extension):
        """``{% generation %}`` marks an assistant's text; here it changes nothing."""

        tags = {"generation"}  # noqa: RUF012 - as jinja2 has it

        def parse(self, parser):
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    def raise_exception(message: str):
        raise jinja2.TemplateError(message)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = lambda value, ensure_ascii=False, **options: json.dumps(
        value, ensure_ascii=ensure_ascii, **options
    )
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment


def _chat_template(folder: Path, options: Mapping[str, Any]) -> str | dict[str, str] | None:
    """The template in its own file, else in tokenizer_config.json, else in chat_template.json. Several templates come by
    name, and one of them is ``default``."""
    files = {file.stem: file for file in sorted((folder / "additional_chat_templates").glob("*.jinja"))}
    files |= {"default": folder / "chat_template.jinja"}
    by_name = {name: _read_template(file) for name, file in files.items() if file.is_file()}
    template = by_name or options.get("chat_template")
    template = template or read_object(folder / "chat_template.json").get("chat_template")
    if isinstance(template, list):
        template = {entry.get("name"): entry.get("template") for entry in template if isinstance(entry, dict)}
    if isinstance(template, dict):
        by_name = {str(name): text for name, text in template.items() if isinstance(text, str)}
        return by_name if "default" in by_name else None
    return template if isinstance(template, str) else None


def _read_template(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{file} cannot be read: {error}; download or copy it again") from error


def read_object(path: Path) -> dict[str, Any]:
    """The content of a JSON file of the model, {} if it is missing. Raises ValueError: it holds no object."""
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(
            f"{path} is not valid JSON: {_failure_text(path, error)}; download or copy it again"
        ) from error
    if not isinstance(content, dict):
        raise ValueError(f"{path} holds a {type(content).__name__}, not an object; download or copy it again")
    return content


def _token_text(value: Any) -> str | None:
    """The text of a special token, which is text or an object that holds it."""
    text = value.get("content") if isinstance(value, dict) else value
    return text if isinstance(text, str) else None


def _failure_text(path: Path, error: Exception) -> str:
    try:
        start = path.read_bytes()[: len(_LFS_POINTER)]
    except OSError as unreadable:
        return unreadable.strerror or str(unreadable)
    if not start:
        return "it is empty"
    if start == _LFS_POINTER.encode():
        return "it is a pointer of Git LFS, not the tokenizer itself (`git lfs pull` fetches it)"
    text = str(error)
    return text if len(text) <= 160 else f"{text[:160]}..."


def check_same_tokens(field: str, policy: Path, other: Path) -> None:
    """Raises ValueError if an id of the policy's tokens is another token of the model of ``field``, which reads the policy's
    ids. A folder without tokenizer.json is not compared."""
    files = [folder / "tokenizer.json" for folder in (policy, other)]
    if not all(file.is_file() for file in files) or files[0].read_bytes() == files[1].read_bytes():
        return
    mine, others = (
        {place: text for text, place in TokenizerFiles(folder).vocabulary.items()}
        for folder in (policy, other)
    )
    differing = [place for place in sorted(mine.keys() & others.keys()) if mine[place] != others[place]]
    if differing:
        first = differing[0]
        raise ValueError(
            f"{field} reads the policy's token ids, but {len(differing)} of them are other tokens there: {first} is {mine[first]!r} in "
            f"{policy} and {others[first]!r} in {other}; give a model with the policy's tokenizer"
        )
