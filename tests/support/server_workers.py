"""What tests of servers do in a process of its own, which ``megatron_workers.run_forked`` starts."""

import argparse
import json
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from parallel.planning.memory import NUM_BUFFERS
from parallel.weights.transfer import Buffers, make_buckets, plan_transfer
from rollout.servers.answers import stop_pattern
from rollout.servers.command import PLUGIN, STAND_INS
from tests.support.chat_tokenizer import chat_tokenizer
from tests.support.server_specs import make_control
from trainer.stage_sender import StageSender


def die_in_a_transfer(model_dir: Path, url: str, carrier: str) -> None:
    """A learner that ends by SIGKILL between two buckets of an update."""
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    with make_control([url]) as control:
        sender = StageSender(control, carrier, 60)
        control.take_over()
        control.open_update().wait()
        units = [[(name, tensor.shape)] for name, tensor in model.named_parameters()]
        plan = plan_transfer(units, dtype=torch.float32, device="cpu", max_bytes=2**16)

        def buckets():
            for place, bucket in enumerate(make_buckets(model.named_parameters(), plan, Buffers("cpu"))):
                # The first is loaded by then; this one is announced, and never sent.
                if place == NUM_BUFFERS["cpu"]:
                    os.kill(os.getpid(), signal.SIGKILL)
                yield bucket

        sender.send(buckets(), plan, None)


def write_answers_of_sglang(file: Path, responses: Sequence[tuple[str, list[int]]]) -> None:
    """Of SGLang's own code: its flags, and after how many tokens each of ``responses`` ends at its stop text, by SGLang alone and
    with the plugin."""
    os.environ["SGLANG_USE_CPU_ENGINE"] = "1"
    sys.path += [str(STAND_INS), str(PLUGIN)]
    import tandem_stop_texts
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.plugins.hook_registry import HookRegistry
    from sglang.srt.sampling.sampling_params import SamplingParams
    from sglang.srt.server_args import ServerArgs

    parser = argparse.ArgumentParser(add_help=False)
    ServerArgs.add_cli_args(parser)
    tokenizer = chat_tokenizer()
    num_decoded, decode = [0], tokenizer.decode

    def counting(token_ids, **options):
        num_decoded[0] += len(token_ids) > 1
        return decode(token_ids, **options)

    tokenizer.decode = counting

    def end(text: str, token_ids: list[int]) -> int | None:
        sampling = SamplingParams(stop_regex=[stop_pattern(text)], max_new_tokens=10_000, ignore_eos=True)
        sampling.normalize(tokenizer)
        request = Req("", "", [1], sampling)
        request.tokenizer = tokenizer
        for token_id in token_ids:
            request.output_ids.append(token_id)
            request.update_finish_state()
            if request.finished():
                return len(request.output_ids)
        return None

    def all_ends() -> dict:
        num_decoded[0] = 0
        return {"ends": [end(*response) for response in responses], "decoded": num_decoded[0]}

    alone = all_ends()
    tandem_stop_texts.register()
    HookRegistry.apply_hooks()
    with_plugin = all_ends()
    flags = sorted(parser._option_string_actions)
    file.write_text(json.dumps({"flags": flags, "alone": alone, "with the plugin": with_plugin}))
