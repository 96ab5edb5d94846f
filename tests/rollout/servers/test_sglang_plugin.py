"""The plugin of CPU servers, by itself; tests/rollout/servers/test_sglang.py looks for it in a real server."""

import os
import subprocess
import sys

import pytest

from rollout.servers.command import PLUGIN, STAND_INS

THREAD = "threading.Thread(target=threading.Event().wait, daemon=True).start()"


@pytest.mark.parametrize(("before", "method"), [("", "fork"), (THREAD, "spawn")], ids=["alone", "a thread"])
def test_processes_are_forked_where_no_other_thread_could_hold_a_lock(before, method):
    code = f"""
import multiprocessing, threading, tandem_sglang
multiprocessing.set_start_method("spawn", force=True)
{before}
assert tandem_sglang.fork_processes("result") == "result"
print(multiprocessing.get_start_method())
"""
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=PLUGIN, capture_output=True, text=True, timeout=60
    )
    assert (done.stdout.strip(), done.returncode) == (method, 0), done.stderr


def test_sglang_finds_it_on_its_path():
    code = "from importlib.metadata import entry_points as e; print([p.load().__module__ for p in e(group='sglang.srt.plugins')])"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=PLUGIN, capture_output=True, text=True, timeout=60
    )
    assert "'tandem_sglang'" in done.stdout, done.stderr


def test_servers_do_not_import_megatron():
    code = """
import sys
from types import SimpleNamespace
for name in ("gemma3", "routed_experts", "stop_texts", "weight_receiver"):
    sys.modules[f"tandem_{name}"] = SimpleNamespace(register=lambda **_: None)
import tandem_sglang
tandem_sglang.register()
try:
    import megatron.core
except ImportError:
    print("left out")
"""
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=PLUGIN, capture_output=True, text=True, timeout=60
    )
    assert done.stdout.strip() == "left out", done.stderr


def test_the_factor_of_gemmas_embeddings_is_rounded_as_in_transformers():
    code = """
import torch, tandem_gemma3
from sglang.srt.models.gemma3_causal import Gemma3TextScaledWordEmbedding
from sglang.srt.plugins.hook_registry import HookRegistry
from transformers.models.gemma3 import modeling_gemma3
tandem_gemma3.register()
HookRegistry.apply_hooks()
torch.set_default_dtype(torch.bfloat16)
table = torch.randn(7, 640)
both = [c(7, 640, 0, embed_scale=640**0.5) for c in (Gemma3TextScaledWordEmbedding, modeling_gemma3.Gemma3TextScaledWordEmbedding)]
for embedding in both:
    embedding.weight.data.copy_(table)
one, other = (embedding(torch.arange(7)) for embedding in both)
print(torch.equal(one, other), both[0].embed_scale)
"""
    environment = os.environ | {"SGLANG_USE_CPU_ENGINE": "1", "PYTHONPATH": str(STAND_INS)}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=PLUGIN, env=environment, capture_output=True, text=True, timeout=120
    )
    assert done.stdout.strip() == "True 25.25", done.stderr


def test_transformers_is_imported_with_the_same_names_and_versions_by_less_work():
    code = """
import importlib.util, sys
import tandem_transformers
tandem_transformers.spare_work()
from transformers.utils import import_utils as spared, is_scipy_available
import transformers
spec = importlib.util.spec_from_file_location("transformers.utils.as_it_is", spared.__file__)
own = importlib.util.module_from_spec(spec)
spec.loader.exec_module(own)
folder = transformers.__path__[0] + "/models"
read = spared.create_import_structure_from_path.cache_info().misses
names = spared.define_import_structure(folder + "/__init__.py", prefix="models")
assert names == own.define_import_structure(folder, prefix="models") and len(names) > 5
again = spared.create_import_structure_from_path.cache_info().misses - read
assert again <= 1, again  # the folders of the models, which the import has read, are not read again
assert spared.PACKAGE_DISTRIBUTION_MAPPING == {} != own.PACKAGE_DISTRIBUTION_MAPPING
for package in ("torch", "numpy", "huggingface_hub", "gguf", "PIL"):
    versions = [module._is_package_available(package, return_version=True) for module in (spared, own)]
    assert versions[0] == versions[1], versions
assert not is_scipy_available() and "scipy" not in sys.modules
import importlib.metadata
assert importlib.metadata.packages_distributions is not dict
"""
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=PLUGIN, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr


def test_another_transformers_is_imported_as_it_is(tmp_path):
    module = tmp_path / "transformers" / "utils" / "import_utils.py"
    module.parent.mkdir(parents=True)
    for package in module.parents[:2]:
        (package / "__init__.py").touch()
    module.write_text("def fetch__all__(text): return [text]\n")
    code = (
        f"import sys; sys.path.insert(1, {str(tmp_path)!r}); import tandem_transformers; tandem_transformers.spare_work()\n"
        "from transformers.utils import import_utils; print(import_utils.fetch__all__('all\\n__all__ = []'))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=PLUGIN, capture_output=True, text=True, timeout=60
    )
    assert done.stdout.strip() == "['all\\n__all__ = []']", done.stderr
