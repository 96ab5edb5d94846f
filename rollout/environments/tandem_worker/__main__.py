"""``python tandem_worker [command]`` and ``python tandem_worker --template ...``: see ``__init__.py``."""

import os
import sys

is_template = sys.argv[1:2] == ["--template"]
sys.path[0] = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
from tandem_worker import guard  # noqa: E402  # pyright: ignore[reportMissingImports]

if is_template:
    from tandem_worker import template  # pyright: ignore[reportMissingImports]
del sys.path[0]  # the folder around this one: its modules may have the names of a user's
if is_template:
    template.run(template.main(*sys.argv[2:]))
else:
    guard.main(sys.argv[1:])
