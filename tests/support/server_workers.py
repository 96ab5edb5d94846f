"""What tests of servers do in a process of its own, which ``megatron_workers.run_forked`` starts."""

import argparse
import json
import os
import signal
from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from parallel.planning.memory import NUM_BUFFERS
from parallel.weights.transfer import Buffers, make_buckets, plan_transfer
from rollout.servers.answers import stop_pattern
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


def write_answers_of_sglang(file: Path, stop_texts: Sequence[str]) -> None:
    """Of SGLang's own code: its flags, and the newest tokens in whose text it searches for each stop text."""
    os.environ["SGLANG_USE_CPU_ENGINE"] = "1"
    from sglang.srt.sampling.sampling_params import SamplingParams
    from sglang.srt.server_args import ServerArgs

    parser = argparse.ArgumentParser(add_help=False)
    ServerArgs.add_cli_args(parser)
    windows = []
    for text in stop_texts:
        sampling = SamplingParams(stop_regex=[stop_pattern(text)])
        sampling.normalize(chat_tokenizer())
        windows.append(sampling.stop_regex_max_len + 1)  # Req._stop_match_tail_len adds the one
    file.write_text(json.dumps({"flags": sorted(parser._option_string_actions), "windows": windows}))
