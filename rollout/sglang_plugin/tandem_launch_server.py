"""``sglang.launch_server`` without garbage collections while it imports thousands of modules: they are no garbage, and
collections take a quarter of the time. ``tandem_sglang.fork_processes`` turns collections on again. Useless work of
transformers is left out too (``tandem_transformers.py``)."""

import gc
import runpy

import tandem_transformers

gc.disable()
tandem_transformers.spare_work()
if __name__ == "__main__":
    runpy.run_module("sglang.launch_server", run_name="__main__", alter_sys=True)
