"""Is Transformer Engine there, and does it import? Import this module before ``megatron.core``, which asks itself.

Found by reading, on no GPU: its package without the compiled part raises RuntimeError, one that was built for another
torch or CUDA OSError. Megatron takes only an ImportError for its absence; any other error would end the learner.
"""

import importlib
import importlib.util
import logging
import sys

PACKAGE = "transformer_engine"


def absence() -> str | None:
    """None if it can be imported, else the reason. A package that cannot be imported is hidden from later
    imports."""
    if importlib.util.find_spec(PACKAGE) is None:
        return "it is not installed"
    try:
        importlib.import_module(f"{PACKAGE}.pytorch")
    except Exception as error:  # of foreign code, whatever it is
        for name in [name for name in sys.modules if name.split(".")[0] == PACKAGE]:
            del sys.modules[name]
        sys.modules[PACKAGE] = None  # pyright: ignore[reportArgumentType]  # later imports raise ImportError
        said = str(error).strip().splitlines() or ["no message"]
        why = f"it is installed and does not import: {type(error).__name__}: {said[0]}"
        logging.getLogger(__name__).warning("Transformer Engine is not used: %s", why)
        return why
    return None


ABSENCE = absence()
"""Asked once, as the process starts."""
