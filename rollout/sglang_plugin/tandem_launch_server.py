"""``sglang.launch_server`` without garbage collections while it imports thousands of modules: nothing of them is garbage,
and the looks at them take a quarter of the time. ``tandem_sglang.fork_processes`` turns collections on again."""

import gc
import runpy

gc.disable()
if __name__ == "__main__":
    runpy.run_module("sglang.launch_server", run_name="__main__", alter_sys=True)
