"""What a check of a config finds."""

from collections.abc import Callable, Iterator

from configs.loader import Finding


def finding_of(
    field: str, check: Callable[..., object], *arguments: object, **named: object
) -> Iterator[Finding]:
    """The finding of a check, if it raises ValueError."""
    try:
        check(*arguments, **named)
    except ValueError as error:
        yield field, str(error)
