"""What the commands share: their group, their registration, and arguments that several of them have."""

import difflib
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

if TYPE_CHECKING:
    from launch.processes.run_folder import RunFolder


def _without_type_of_flags(parameters: list) -> list:
    """Help would show a flag as `--dry-run <bool>`, as if a value followed."""
    for parameter in parameters:
        if getattr(parameter, "is_flag", False):
            parameter.metavar = ""
    return parameters


class Command(TyperCommand):
    """One command."""

    def get_params(self, ctx):
        return _without_type_of_flags(super().get_params(ctx))


class Commands(TyperGroup):
    """The commands. An override that is written with dashes gets another error than a misspelt option."""

    def get_params(self, ctx):
        return _without_type_of_flags(super().get_params(ctx))

    def list_commands(self, ctx):
        """The commands that help lists, and that are proposed for a misspelt one."""
        return [name for name in super().list_commands(ctx) if not self.commands[name].hidden]

    def resolve_command(self, ctx, args):
        if args[0] not in self.commands and not args[0].startswith("-"):
            names = self.list_commands(ctx)
            close = difflib.get_close_matches(args[0], names, n=1)
            hint = f"did you mean {close[0]!r}?" if close else f"commands: {', '.join(names)}"
            ctx.fail(f"No such command {args[0]!r}; {hint}")
        name, command, rest = super().resolve_command(ctx, args)
        assert command is not None  # it is None only for completion
        options = {option for parameter in command.params for option in parameter.opts}
        if any(parameter.name == "overrides" for parameter in command.params):
            dashed = [argument for argument in rest if argument.startswith("-")]
            known = {*options, "-h", "--help"}
            unknown = [argument for argument in dashed if argument.partition("=")[0] not in known]
            _refuse_dashes(unknown, is_sft=name == "sft")
        return name, command, rest


def _refuse_dashes(arguments: Iterable[str], *, is_sft: bool) -> None:
    """Raises BadInput for an argument that is a field with dashes, or a name that another system has for one.
    ``is_sft``: the command takes a warm start, of which the names of other systems are not."""
    for argument in arguments:
        from configs.reading.wording import fix_for_name
        from configs.schema import RunConfig, SftConfig
        from launch.checks.arguments import BadInput

        plain = argument.lstrip("-")
        key, equals, value = plain.partition("=")
        if key == "config":
            raise BadInput("--config: no such option; write the file without an option: RUN.yaml KEY=VALUE")
        ours = key.replace("-", "_")
        if ours.split(".")[0] in {*RunConfig.model_fields, *SftConfig.model_fields, "extends"}:
            written = f"{ours}={value if equals else 'VALUE'}"
            raise BadInput(f"--{key}: no such option; write {written}, without dashes")
        if argument.startswith("--") and (fix := fix_for_name(key, SftConfig if is_sft else RunConfig)):
            raise BadInput(f"--{key}: no such option; {fix}. Fields are written KEY=VALUE, without dashes")


def panel(commands: typer.Typer, title: str) -> Callable[..., Callable[[Callable], Callable]]:
    """``commands.command`` for this part of the help. The line breaks of a docstring are none of the help's."""

    def command(
        name: str | None = None, *, help: str | None = None, hidden: bool = False
    ) -> Callable[[Callable], Callable]:
        def register(function: Callable) -> Callable:
            text = help or " ".join((function.__doc__ or "").split())
            make = commands.command(name, cls=Command, help=text, hidden=hidden, rich_help_panel=title)
            return make(function)

        return register

    return command


def argument(help: str, metavar: str) -> Any:
    return typer.Argument(help=help, metavar=metavar)


def option(help: str, *names: str, **settings: Any) -> Any:
    """names: for a flag, which would get a ``--no-`` form otherwise, and for an option with a short form."""
    return typer.Option(*names, help=help, **settings)


def gib(help: str) -> Any:
    """An option with the memory of a GPU."""
    return option(help, min=1, max=1_000_000, metavar="GIB")


ConfigPath = Annotated[Path, argument("A YAML config, such as one of configs/recipes", "CONFIG")]
Overrides = Annotated[list[str] | None, argument("Dotted overrides: seed=1 checkpoint.every=20", "KEY=VALUE")]
DryRun = Annotated[
    bool,
    option(
        "Print the processes, data, batch, memory per rank and what is sent (into a file or a pipe also the resolved config); "
        "start nothing.",
        "--dry-run",
    ),
]
GpuMemory = Annotated[float | None, gib("With --dry-run: GiB of each GPU, for a run on other machines.")]
RunPath = Annotated[Path, argument("A run folder, e.g. runs/latest", "RUN")]


def run_folder(run: Path) -> "RunFolder":
    """Raises BadInput for another folder than that of a run. Help needs none of its imports."""
    from launch.roles.start import existing_run

    return existing_run(run)
