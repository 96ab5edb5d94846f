"""``sglang.launch_server`` without garbage collections while it imports thousands of modules: nothing of them is garbage,
and the looks at them take a quarter of the time. ``tandem_sglang.fork_processes`` turns collections on again. Work that
transformers does for nothing is left out too."""

import gc
import runpy

import tandem_transformers

gc.disable()
tandem_transformers.spare_work()
if __name__ == "__main__":
    runpy.run_module("sglang.launch_server", run_name="__main__", alter_sys=True)
