import gc

import pytest

from launch.processes.imports import imported_for_good


def test_no_collection_looks_at_what_was_made_inside_and_they_go_on_behind():
    frozen = gc.get_freeze_count()
    with pytest.raises(ImportError), imported_for_good():
        assert not gc.isenabled()
        kept = [[] for _ in range(1000)]
        raise ImportError
    assert gc.isenabled()
    assert gc.get_freeze_count() >= frozen + len(kept)
