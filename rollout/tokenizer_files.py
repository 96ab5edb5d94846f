"""A model's tokenizer by its files alone, for checks before a start: `tokenizers` and `jinja2` load in a
tenth of a second, transformers takes several.

It gives the ids that transformers gives, but for special tokens around a text without a template. These are
left out: a check must never refuse what would run.
"""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

_MARK = "7 + 5 = ?"
"""A made prompt."""
_LFS_POINTER = "version https://git-lfs"


class TokenizerFiles:
    """What checks ask of a tokenizer, by the names that transformers gives it.

    Raises:
        ValueError: a file of the tokenizer is broken; it is named, with the fix.
    """

    def __init__(self, folder: Path):
        from tokenizers import Tokenizer

        self.name_or_path = str(folder)
        path = folder / "tokenizer.json"
        try:
            self._tokenizer = Tokenizer.from_str(path.read_text(encoding="utf-8"))
        except Exception as error:  # the library raises nothing more special
            raise ValueError(
                f"{path} is no readable tokenizer: {_cause(path, error)}; download or copy it again"
            ) from error
        self._options = _read_object(folder / "special_tokens_map.json") | _read_object(
            folder / "tokenizer_config.json"
        )
        self.chat_template = _chat_template(folder, self._options)
        self.special_tokens = {
            name: text
            for name, value in self._options.items()
            if name.endswith("_token") and (text := _text(value))
        }

    @staticmethod
    def reads(folder: Path) -> bool:
        """Whether the folder has the one file that is read here; tokenizers of other files are left to
        transformers."""
        return (folder / "tokenizer.json").is_file()

    @property
    def num_ids(self) -> int:
        """The ids that it can give are below this. Special tokens that the vocabulary lacks are added at its
        end, as transformers does."""
        vocabulary = self._tokenizer.get_vocab(with_added_tokens=True)
        added = self._options.get("added_tokens_decoder")
        listed = [int(number) for number in added if number.isdecimal()] if isinstance(added, dict) else []
        names = {_text(value) for value in added.values()} if isinstance(added, dict) else set()
        lacking = {
            text for text in self.special_tokens.values() if text not in vocabulary and text not in names
        }
        return 1 + max([*vocabulary.values(), *listed], default=-1) + len(lacking)

    @property
    def may_have_defaults(self) -> bool:
        """Whether special tokens may be named by transformers alone, in the code of the tokenizer's class."""
        return self._options.get("tokenizer_class") not in (
            None,
            "PreTrainedTokenizerFast",
            "TokenizersBackend",
        )

    @property
    def eos_token_id(self) -> int | None:
        return self._id("eos_token")

    @property
    def unk_token_id(self) -> int | None:
        return self._id("unk_token")

    def _id(self, name: str) -> int | None:
        text = self.special_tokens.get(name)
        return None if text is None else self._tokenizer.token_to_id(text)

    def encode(self, text: str, add_special_tokens: bool = False) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False).ids

    def decode(self, ids: Sequence[int], clean_up_tokenization_spaces: bool = False) -> str:
        return self._tokenizer.decode(list(ids), skip_special_tokens=False)

    def apply_chat_template(self, messages: Sequence[Mapping[str, str]], **_: Any) -> list[int]:
        """Ids of the conversation, up to where the model's answer begins. Raises ValueError where the
        template cannot be rendered."""
        return self.encode(self.render(messages))

    def render(self, messages: Sequence[Mapping[str, str]]) -> str:
        import jinja2

        try:
            template = _environment().from_string(self.chat_template)
            return template.render(
                messages=messages,
                tools=None,
                documents=None,
                add_generation_prompt=True,
                **self.special_tokens,
            )
        except jinja2.TemplateSyntaxError as error:
            raise ValueError(
                f"{self._template_of} is no Jinja template: {error.message} in its line {error.lineno}"
            ) from error
        except Exception as error:  # a template is a program: it may fail as it likes
            raise ValueError(
                f"{self._template_of} cannot be rendered: {type(error).__name__}: {error}"
            ) from error

    def check_template(self, system_prompt: str | None) -> None:
        """Render it once. Raises ValueError where it fails, or leaves out what it is given."""
        given = {"the prompt": _MARK} | (
            {} if system_prompt is None else {"task.system_prompt": system_prompt.strip()}
        )
        messages = [] if system_prompt is None else [{"role": "system", "content": system_prompt}]
        rendered = self.render([*messages, {"role": "user", "content": _MARK}])
        for what, text in given.items():
            if text not in rendered:
                raise ValueError(f"{self._template_of} leaves out {what}")

    @property
    def _template_of(self) -> str:
        return f"the chat template of {self.name_or_path}"


def _environment():
    """Jinja as transformers sets it up; a sandbox, since a template is a program from elsewhere."""
    import jinja2.ext
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(jinja2.ext.Extension):
        """``{% generation %}`` marks what an assistant wrote; here it is text as any."""

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


def _chat_template(folder: Path, options: Mapping[str, Any]) -> str | None:
    """The file of its own before the entry of tokenizer_config.json, of which several by name leave
    ``default``."""
    file = folder / "chat_template.jinja"
    if file.is_file():
        try:
            return file.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(f"{file} cannot be read: {error}; download or copy it again") from error
    found = options.get("chat_template") or _read_object(folder / "chat_template.json").get("chat_template")
    if isinstance(found, list):
        named = {entry.get("name"): entry.get("template") for entry in found if isinstance(entry, dict)}
        found = named.get("default")
    return found if isinstance(found, str) else None


def _read_object(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(
            f"{path} is not valid JSON: {_cause(path, error)}; download or copy it again"
        ) from error
    if not isinstance(found, dict):
        raise ValueError(f"{path} holds a {type(found).__name__}, not an object; download or copy it again")
    return found


def _text(value: Any) -> str | None:
    """A special token is text, or an object that holds it."""
    found = value.get("content") if isinstance(value, dict) else value
    return found if isinstance(found, str) else None


def _cause(path: Path, error: Exception) -> str:
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
