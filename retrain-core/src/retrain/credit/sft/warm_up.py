"""The warm-up of a run with `[sft]`: its examples, and a supervised step."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from retrain.credit.sft.answers import Solved, end_of_turn, solve
from retrain.credit.sft.check import LIKELIHOOD
from retrain.kernel.config.plugin_tables import SftTable
from retrain.kernel.config.schema import DataTable
from retrain.kernel.contracts.context import PluginContext
from retrain.kernel.contracts.tasks import Prompt
from retrain.kernel.contracts.verifier import LoadedData
from retrain.kernel.errors import NonFiniteError
from retrain.kernel.plugins.build import build_part
from retrain.kernel.seeding import Seeds
from retrain.kernel.types import Kind, TrainBatch, TrainReport
from retrain.tasks.examples import usable_examples
from retrain.tasks.prompts import PromptPool, encode_prompts
from retrain.tasks.tasks import Tasks
from retrain.text.chat import prompt_text
from retrain.text.terminal_text import printable

LOG = logging.getLogger("retrain")


class SupervisedSteps:
    """Steps of `batch_size` examples with the loss -mean log p(token), over the tokens of their answers.

    The order of the examples is seeded and new in each pass; a step's number is its position in it.
    """

    def __init__(self, table: SftTable, solved: Solved, seeds: Seeds) -> None:
        self.first_step = -(table.steps + 1)
        self._table, self._rows = table, solved.rows
        self._left_out = solved.left_out.total()
        self._pool = PromptPool(train=solved.prompts, held_out=(), seeds=Seeds(seeds.derive("sft")))

    def take(self, step: int, train: Callable[[TrainBatch], TrainReport]) -> dict[str, Any]:
        """Train on the examples of a step; a non-finite number rejects it."""
        started, size = time.perf_counter(), self._table.batch_size
        drawn = self._pool.draw((step - self.first_step) * size, size)
        rows = tuple(replace(self._rows[prompt.example.id], group=number) for number, prompt in enumerate(drawn))
        batch = TrainBatch(step=step, rows=rows, temperature=1.0, lr=self._table.lr or None, loss=LIKELIHOOD)
        line: dict[str, Any] = {"step": step, "phase": "sft", "sft_loss": None, "sft_left_out": self._left_out}
        try:
            report = train(batch)
            line |= {"sft_loss": report.loss, "sft_tokens": report.num_tokens}
            measured = {"sft_grad_norm": report.grad_norm, "sft_lr": report.lr}
            line |= {name: value for name, value in measured.items() if value is not None}
        except NonFiniteError as error:
            line["rejected"] = error.problems[0].what
        return line | {"sft_time_s": time.perf_counter() - started}


def supervised(context: PluginContext, tasks: Tasks) -> SupervisedSteps:
    """The warm-up of a run; ConfigError when no example of its source can be trained on."""
    config, table = context.config, context.config.sft
    prompts = _prompts(context, table, tasks) if table.source else tasks.pool.train
    end = end_of_turn(context.tokenizer, config, context.plugins)
    solved = solve(prompts, config, context.tokenizer, end_of_turn=end, context_length=tasks.context_length)
    LOG.info("Supervised steps first: %d of %d examples", table.steps, len(solved.prompts))
    for cause, count in solved.left_out.items():
        LOG.warning("[sft]: %d examples %s left out", count, cause)
    return SupervisedSteps(table, solved, context.seeds)


def _prompts(context: PluginContext, table: SftTable, tasks: Tasks) -> list[Prompt]:
    """The examples of `[sft] source`, encoded as those of `[data]` are, without held-out ones."""
    config = context.config
    ours: dict[str, Any] = {"source": table.source, "path": table.path, "options": table.options}
    fields = {name: getattr(config.data, name) for name in DataTable.model_fields if name not in ours}
    if table.source != config.data.source:  # its columns may have other names
        fields |= {name: DataTable.model_fields[name].default for name in ("prompt_key", "answer_key", "messages_key")}
    moved = {f"data.{name}": config.origin(f"sft.{name}") for name in ours}
    read = replace(
        config,
        tables={**config.tables, "data": DataTable(**fields, **ours)},
        origins={**config.origins, **moved},
    )
    reading = replace(context, config=read)
    source = build_part(Kind.DATA_SOURCE, table.source, "sft.source", reading, table.options, "sft.options")
    data: LoadedData = source.load()
    examples, notes = usable_examples(data, read)
    for note in (*data.notes, *notes):
        LOG.info("[sft] %s", printable(note))
    held_out = {key for prompt in tasks.pool.held_out for key in (prompt.example.id, prompt_text(prompt.example))}
    kept = [each for each in examples if held_out.isdisjoint((each.id, prompt_text(each)))]
    if len(kept) < len(examples):
        LOG.info("[sft] %d examples left out: they are held out", len(examples) - len(kept))
    encoded = encode_prompts(kept, context.tokenizer, config)
    return [Prompt(example=example, tokens_T=ids) for example, ids in zip(kept, encoded, strict=True) if len(ids)]
