"""One run of TRL's GRPOTrainer for ``benchmarks/against_trl.py``, in TRL's own environment.

    python benchmarks/trl_side.py TASK.json

TASK.json has model, prompts and settings; the result is written to the file that it names.
"""

import json
import os
import sys
import time
from importlib.metadata import version
from pathlib import Path

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from rollout.rewards.arithmetic import countdown_reward

EVALUATION_BATCH = 256


class TimedTrainer(GRPOTrainer):
    """Notes the seconds of each step's parts."""

    def __init__(self, *arguments, **named):
        super().__init__(*arguments, **named)
        self.steps: list[dict[str, float]] = []
        self._generation = self._preparation = 0.0
        self._last_end = time.perf_counter()

    def _generate(self, *arguments, **named):
        began = time.perf_counter()
        result = super()._generate(*arguments, **named)
        self._generation = time.perf_counter() - began
        return result

    def _prepare_inputs(self, *arguments, **named):
        began = time.perf_counter()
        result = super()._prepare_inputs(*arguments, **named)
        self._preparation = time.perf_counter() - began
        return result

    def training_step(self, *arguments, **named):
        self._began = time.perf_counter()
        return super().training_step(*arguments, **named)

    def note_step(self) -> None:
        """At the end of the optimizer's step."""
        now = time.perf_counter()
        step = now - self._last_end
        update = now - self._began - self._preparation
        rest = step - self._generation - update
        self.steps.append(
            {"step": step, "sampling": self._generation, "update": update, "sync": 0.0, "rest": rest}
        )
        self._last_end = now


class StepEnd(TrainerCallback):
    def __init__(self):
        self.trainer: TimedTrainer | None = None

    def on_step_end(self, *arguments, **named):
        self.trainer.note_step()


def main(file: Path) -> None:
    task = json.loads(file.read_text())
    tokenizer = AutoTokenizer.from_pretrained(task["model"])
    model = AutoModelForCausalLM.from_pretrained(task["model"], dtype=torch.float32)
    before = accuracy(model, tokenizer, task)

    def reward(prompts, completion_ids, reference, **unused):
        return [score(tokenizer, ids, text) for ids, text in zip(completion_ids, reference, strict=True)]

    stepped = StepEnd()
    trainer = TimedTrainer(
        model=model,
        reward_funcs=reward,
        args=settings(task),
        train_dataset=Dataset.from_list(
            [{"prompt": text, "reference": right} for text, right in task["train"]]
        ),
        processing_class=tokenizer,
        callbacks=[stepped],
    )
    stepped.trainer = trainer
    trainer.train()
    after = accuracy(trainer.accelerator.unwrap_model(trainer.model), tokenizer, task)
    if trainer.accelerator.is_main_process:
        counted = trainer.steps[task["warm_up"] :]
        result = {
            "seconds": {name: [step[name] for step in counted] for name in counted[0]},
            "accuracy_before": before,
            "accuracy_after": after,
            "versions": {name: version(name) for name in ("torch", "transformers", "trl")},
        }
        Path(task["result"]).write_text(json.dumps(result))
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def settings(task: dict) -> GRPOConfig:
    """The recipe's settings. Everything else is TRL's default, except gradient checkpointing and autocast to
    bfloat16, which Tandem does not use here."""
    processes = int(os.environ.get("WORLD_SIZE", "1"))
    return GRPOConfig(
        output_dir=task["output"],
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        seed=task["seed"],
        max_steps=task["steps"],
        per_device_train_batch_size=task["prompts_per_step"] * task["group_size"] // processes,
        num_generations=task["group_size"],
        max_completion_length=task["max_new_tokens"],
        temperature=task["temperature"],
        shuffle_dataset=False,  # the order is Tandem's
        learning_rate=task["lr"],
        lr_scheduler_type="constant",
        adam_beta1=task["betas"][0],
        adam_beta2=task["betas"][1],
        adam_epsilon=task["eps"],
        max_grad_norm=task["clip_grad"],
        epsilon=task["clip_low"],
        epsilon_high=task["clip_high"],
        loss_type="dapo",  # a mean over all tokens of the batch
        scale_rewards="group",
        beta=0.0,
        report_to="none",
        save_strategy="no",
        disable_tqdm=True,
        dataloader_pin_memory=False,
    )


def score(tokenizer, ids: list[int], reference: str) -> float:
    """Tandem's reward of a response: only the end token is dropped from its text."""
    ids = ids[:-1] if ids and ids[-1] == tokenizer.eos_token_id else ids
    return countdown_reward(reference, tokenizer.decode(ids, skip_special_tokens=False)).value


@torch.no_grad()
def accuracy(model, tokenizer, task: dict) -> float:
    """Share of right responses to the held-out problems, at temperature 1."""
    rows = [row for row in task["heldout"] for _ in range(task["samples_per_prompt"])]
    torch.manual_seed(task["seed"])
    model.eval()
    right = 0.0
    for start in range(0, len(rows), EVALUATION_BATCH):
        batch = rows[start : start + EVALUATION_BATCH]
        inputs = tokenizer(
            [text for text, _ in batch], return_tensors="pt", padding=True, padding_side="left"
        )
        inputs.pop("token_type_ids", None)
        output = model.generate(
            **inputs,
            do_sample=True,
            temperature=1.0,
            top_k=0,
            top_p=1.0,
            max_new_tokens=task["max_new_tokens"],
        )
        for (_, reference), ids in zip(
            batch, output[:, inputs["input_ids"].shape[1] :].tolist(), strict=True
        ):
            end = ids.index(tokenizer.eos_token_id) + 1 if tokenizer.eos_token_id in ids else len(ids)
            right += score(tokenizer, ids[:end], reference)
    model.train()
    return right / len(rows)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
