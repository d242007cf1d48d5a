"""TRL's GRPOTrainer on the tasks of a benchmark: `python trl_grpo.py SETTINGS.json`, in the peer's environment.

Writes a line to `steps.jsonl` when an optimizer step has ended, and settings that equal those of our run: LoRA on every
linear layer, the clipped ratio with the token mean (`bnpo`), advantages without a scale, AdamW at a constant rate.
"""

from __future__ import annotations

import importlib.util
import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from peft import LoraConfig
from transformers import AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer


class Timed(GRPOTrainer):  # type: ignore[misc]
    """Keeps the time that the last step spent on completions, their scores and advantages."""

    sample_s = 0.0
    new_tokens = 0.0

    def _generate_and_score_completions(self, inputs: Any) -> Any:
        started = time.perf_counter()
        made = super()._generate_and_score_completions(inputs)
        self.sample_s = time.perf_counter() - started
        self.new_tokens = made["completion_mask"].sum().item() / len(made["completion_mask"])
        return made


class Lines(TrainerCallback):  # type: ignore[misc]
    """One line per step."""

    def __init__(self) -> None:
        self.trainer: Timed
        self._file = Path("steps.jsonl").open("w", encoding="utf-8", buffering=1)  # noqa: SIM115

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self._started = time.perf_counter()

    def on_step_end(self, _: Any, state: Any, *__: Any, **___: Any) -> None:
        elapsed_s = time.perf_counter() - self._started
        line = {
            "step": state.global_step - 1,
            "step_time_s": elapsed_s,
            "sample_time_s": self.trainer.sample_s,
            "train_time_s": elapsed_s - self.trainer.sample_s,
            "mean_tokens": self.trainer.new_tokens,
            "device_peak_bytes": torch.cuda.max_memory_allocated() if torch.cuda.is_available() else None,
        }
        self._file.write(json.dumps(line) + "\n")


def main() -> None:
    """Train."""
    settings = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    on_gpu = settings["device"] == "cuda"
    tasks = Path(settings["tasks"])
    rows = [json.loads(line) for line in (tasks / "tasks.jsonl").read_text(encoding="utf-8").splitlines()]
    asked = [{"prompt": [{"role": "user", "content": row["prompt"]}], "answer": row["answer"]} for row in rows]
    score = _reward(tasks / "half_right.py")

    def reward(completions: list[Any], answer: list[str], **_: Any) -> list[float]:
        given = zip(completions, answer, strict=True)
        return [float(score(completion[0]["content"], reference)) for completion, reference in given]

    lines = Lines()
    trainer = Timed(
        model=settings["model"],
        args=_arguments(settings, on_gpu),
        train_dataset=Dataset.from_list(asked),
        reward_funcs=reward,
        processing_class=AutoTokenizer.from_pretrained(settings["model"]),
        callbacks=[lines],
        peft_config=LoraConfig(
            r=settings["rank"],
            lora_alpha=2 * settings["rank"],
            lora_dropout=0.0,
            target_modules="all-linear",
            exclude_modules=settings["exclude_modules"],
            task_type="CAUSAL_LM",
        ),
    )
    lines.trainer = trainer
    trainer.train()


def _arguments(settings: dict[str, Any], on_gpu: bool) -> GRPOConfig:
    rows, rows_per_pass = settings["batch"] * settings["group"], settings["rows_per_pass"]
    return GRPOConfig(
        output_dir="trl",
        per_device_train_batch_size=rows_per_pass,
        gradient_accumulation_steps=rows // rows_per_pass,
        num_generations=settings["group"],
        max_completion_length=settings["new"],
        temperature=1.0,
        max_steps=settings["steps"],
        use_cpu=not on_gpu,
        bf16=settings["dtype"] == "bf16",
        model_init_kwargs={"dtype": {"fp32": "float32", "bf16": "bfloat16"}[settings["dtype"]]},
        gradient_checkpointing=settings["gradient_checkpointing"],
        learning_rate=1e-5,
        lr_scheduler_type="constant",
        adam_beta2=0.95,
        max_grad_norm=0.0,
        beta=0.0,
        epsilon=0.2,
        loss_type="bnpo",
        scale_rewards="none",
        router_aux_loss_coef=0.0,
        logging_steps=1,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
    )


def _reward(file: Path) -> Any:
    spec = importlib.util.spec_from_file_location(file.stem, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.score


if __name__ == "__main__":
    main()
