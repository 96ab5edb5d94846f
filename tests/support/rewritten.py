"""Writes pytest's compiled form of the tests, whose assertions it rewrites. Otherwise each pytest worker would make all of it.

python -m tests.support.rewritten     also if PYTHONDONTWRITEBYTECODE is set
"""

from itertools import chain
from pathlib import Path

from _pytest.assertion import rewrite
from _pytest.config import get_config

TESTS = Path(__file__).resolve().parents[1]


def write_all() -> None:
    config = get_config()
    config.parse([])
    state = config.stash[rewrite.assertstate_key]
    for file in chain(TESTS.rglob("test_*.py"), TESTS.rglob("conftest.py")):
        folder = rewrite.get_cache_dir(file)
        pyc = folder / f"{file.stem}{rewrite.PYC_TAIL}"
        if rewrite._read_pyc(file, pyc) is None:
            folder.mkdir(exist_ok=True)
            about, code = rewrite._rewrite_test(file, config)
            rewrite._write_pyc(state, code, about, pyc)


if __name__ == "__main__":
    write_all()
