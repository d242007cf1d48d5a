"""The warm-up of a run with `[sft]`: its examples, and a supervised step."""

from __future__ import annotations

import json
import logging
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from retrain.kernel.config.plugin_tables import REFERENCE, SftTable
from retrain.kernel.config.resolved import Config
from retrain.kernel.config.schema import DataTable
from retrain.kernel.contracts.context import PluginContext
from retrain.kernel.contracts.tasks import LoadedData, Prompt
from retrain.kernel.errors import ConfigError, NonFiniteError, Problem
from retrain.kernel.plugins.resolve import build_part
from retrain.kernel.registry import Plugins
from retrain.kernel.seeding import Seeds
from retrain.kernel.types import Example, Kind, TrainBatch, TrainReport, TrainRow
from retrain.tasks.prompts import PromptPool, encode_prompts, usable_examples
from retrain.tasks.tasks import Tasks
from retrain.text.chat import prompt_text
from retrain.text.terminal_text import printable
from retrain.text.thinking import template_args

LOG = logging.getLogger("retrain")
LIKELIHOOD = "likelihood"  # the loss


class SupervisedSteps:
    """Steps of `batch_size` examples with the loss -mean log p(token), over the tokens of their answers.

    The order of the examples is seeded and new in each pass; a step's number is its position in it.
    """

    def __init__(self, table: SftTable, solved: Solved, seeds: Seeds) -> None:
        # Step -1 is the evaluation before training, so the last supervised step is -2.
        self.first_step = -(table.steps + 1)
        self._table, self._rows = table, solved.rows
        self._left_out = solved.left_out.total()
        # A separate seed, so that a warm-up does not change the order of the examples of [data].
        self._pool = PromptPool(train=solved.prompts, held_out=(), seeds=Seeds(seeds.derive("sft")))

    def take(self, step: int, train: Callable[[TrainBatch], TrainReport]) -> dict[str, Any]:
        """Train on the examples of a step; a non-finite number rejects it."""
        started, size = time.perf_counter(), self._table.batch_size
        drawn = self._pool.draw((step - self.first_step) * size, size)
        rows = tuple(replace(self._rows[prompt.example.id], group=number) for number, prompt in enumerate(drawn))
        # The likelihood of an answer does not depend on how the run samples, hence temperature 1.
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
    """The examples of `[sft] source`, encoded like the examples of `[data]`, without held-out ones."""
    config = context.config
    ours: dict[str, Any] = {"source": table.source, "path": table.path, "options": table.options}
    fields = {name: getattr(config.data, name) for name in DataTable.model_fields if name not in ours}
    # The columns of another source may have other names.
    if table.source != config.data.source:
        fields |= {name: DataTable.model_fields[name].default for name in ("prompt_key", "answer_key", "messages_key")}
    moved = {f"data.{name}": config.origin(f"sft.{name}") for name in ours}
    read = replace(
        config, tables={**config.tables, "data": DataTable(**fields, **ours)}, origins={**config.origins, **moved}
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


# Examples with their answers as rows of tokens, of which the answers' tokens are trained.


PROBE = "answer"
MISSING, LONG, BEYOND = "without an answer", "of more than max_tokens tokens", "beyond the model's context"


@dataclass(frozen=True, slots=True, kw_only=True)
class Solved:
    """Prompts and their rows, by example id; `left_out` counts the examples without a row, by cause."""

    prompts: tuple[Prompt, ...]
    rows: dict[str, TrainRow]
    left_out: Counter[str]


def solve(
    prompts: Sequence[Prompt], config: Config, tokenizer: Any, *, end_of_turn: int, context_length: int | None
) -> Solved:
    """Return the rows of all prompts whose answer could have been sampled; ConfigError if no prompt has one.

    A row is the prompt as sampling gets it, the answer and the end of the turn. The last two have advantage 1, and
    together at most `[training] max_tokens` tokens.
    """
    column, limit = config.sft.answer, config.training.max_tokens
    answers = [_answer(prompt.example, column) for prompt in prompts]
    # A missing answer keeps its place in the batch; its tokens are not used.
    ids = tokenizer([answer or PROBE for answer in answers], add_special_tokens=False, verbose=False)["input_ids"]
    rows: dict[str, TrainRow] = {}
    left_out: Counter[str] = Counter()
    for prompt, answer, tokens in zip(prompts, answers, ids, strict=True):
        length = len(prompt.tokens_T) + len(tokens) + 1
        if not answer:
            left_out[MISSING] += 1
        elif len(tokens) + 1 > limit:
            left_out[LONG] += 1
        elif context_length is not None and length > context_length:
            left_out[BEYOND] += 1
        else:
            tokens_T = np.concatenate([prompt.tokens_T, np.asarray([*tokens, end_of_turn], dtype=np.int64)])
            action_T = np.arange(len(tokens_T)) >= len(prompt.tokens_T)
            ones_T = action_T.astype(np.float64)
            rows[prompt.example.id] = TrainRow(
                tokens_T=tokens_T, action_T=action_T, logprobs_T=np.zeros(len(tokens_T)), advantages_T=ones_T
            )
    if not rows:
        found = ", ".join(f"{count} {cause}" for cause, count in left_out.items()) or "there are no examples"
        columns = sorted({name for prompt in prompts for name in prompt.example.info})
        known = f"; columns: {printable(', '.join(columns))}" if columns else ""
        what, why = f"no example has an answer to train on in {column!r}", found + known
        fix = "name the column that holds the answers, raise [training] max_tokens, or use another [sft] source"
        raise ConfigError(Problem(code="sft.no-answers", where=config.place("sft.answer"), what=what, why=why, fix=fix))
    kept = tuple(prompt for prompt in prompts if prompt.example.id in rows)
    return Solved(prompts=kept, rows=rows, left_out=left_out)


def end_of_turn(tokenizer: Any, config: Config, plugins: Plugins) -> int:
    """The token that ends an answer in the model's own chats, if sampling stops at it; otherwise the end of sequence.

    Sampling stops at the tokenizer's end of sequence and at the ones in generation_config.json, in every backend.
    ConfigError without either.
    """
    own = tokenizer.eos_token_id
    stops = {own, *_configured_stops(config, plugins)} - {None}
    if tokenizer.chat_template:
        chat = [{"role": "user", "content": PROBE}, {"role": "assistant", "content": PROBE}]
        try:
            text = str(tokenizer.apply_chat_template(chat, tokenize=False, **template_args(config, tokenizer)))
        # Templates may raise anything; then the tokenizer's end-of-sequence token will do.
        except Exception:
            text = ""
        after = tokenizer(text.rpartition(PROBE)[2], add_special_tokens=False, verbose=False)["input_ids"]
        if found := [token for token in after if token in stops]:
            return int(found[0])
    if own is None:
        what = "the tokenizer has no end-of-sequence token, so answers would never end"
        fix = "use a model whose tokenizer has one"
        raise ConfigError(Problem(code="model.no-end-token", where=config.place("model.model"), what=what, fix=fix))
    return int(own)


def _answer(example: Example, column: str) -> str:
    found = example.reference if column == REFERENCE else example.info.get(column)
    is_text = isinstance(found, str | int | float) and not isinstance(found, bool)
    return str(found).strip() if is_text else ""


def _configured_stops(config: Config, plugins: Plugins) -> set[int]:
    """`eos_token_id` of the model's generation_config.json; empty when it cannot be read."""
    model = config.model.model
    located = plugins.locate_model(model) or model
    path = Path(located).expanduser() / "generation_config.json"
    if not path.parent.is_dir():
        from huggingface_hub import try_to_load_from_cache

        cached = try_to_load_from_cache(located, path.name)
        path = Path(cached) if isinstance(cached, str) else path
    try:
        configured = json.loads(path.read_text(encoding="utf-8")).get("eos_token_id")
    except (OSError, ValueError, AttributeError):
        return set()
    ids = configured if isinstance(configured, list) else [configured]
    # `isinstance` would take JSON's `true` for token 1.
    return {token for token in ids if type(token) is int}
