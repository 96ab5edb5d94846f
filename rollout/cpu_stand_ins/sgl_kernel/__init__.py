"""Import-only stand-in for SGLang's kernel package in server processes on machines without CUDA.

On CPU SGLang imports nine functions by name, and only speculative decoding calls them. No operator is
registered under ``torch.ops.sgl_kernel``, so SGLang finds no AMX support and takes its pure-torch path in
every layer. This folder is only on the server's PYTHONPATH.
"""

from collections.abc import Callable
from typing import NoReturn

__version__ = "0.0.0"


def _speculative_only(name: str) -> Callable[..., NoReturn]:
    def kernel(*args: object, **kwargs: object) -> NoReturn:
        raise RuntimeError(
            f"sgl_kernel.{name} needs SGLang's compiled kernels; speculative decoding does not run on CPU"
        )

    kernel.__name__ = name
    return kernel


copy_all_layer_kv_cache_cpu = _speculative_only("copy_all_layer_kv_cache_cpu")
assign_req_to_token_pool_cpu = _speculative_only("assign_req_to_token_pool_cpu")
assign_draft_cache_locs_contiguous_cpu = _speculative_only("assign_draft_cache_locs_contiguous_cpu")
assign_extend_cache_locs_cpu = _speculative_only("assign_extend_cache_locs_cpu")
build_tree_kernel_efficient_cpu = _speculative_only("build_tree_kernel_efficient_cpu")
verify_tree_greedy_cpu = _speculative_only("verify_tree_greedy_cpu")
rotate_input_ids_cpu = _speculative_only("rotate_input_ids_cpu")
fill_accept_out_cache_loc_cpu = _speculative_only("fill_accept_out_cache_loc_cpu")
fill_bonus_tokens_cpu = _speculative_only("fill_bonus_tokens_cpu")
