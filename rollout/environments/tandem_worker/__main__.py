"""``python tandem_worker [command]``: see ``__init__.py``."""

import os
import sys

sys.path[0] = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
from tandem_worker.guard import main  # noqa: E402  # pyright: ignore[reportMissingImports]

del sys.path[0]  # the folder of this one, whose modules may have the names of a user's
main(sys.argv[1:])
