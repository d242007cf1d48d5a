"""Examples with their answers as rows of tokens, of which the answers' tokens are trained."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from retrain.kernel.config.plugin_tables import REFERENCE
from retrain.kernel.config.resolved import Config
from retrain.kernel.contracts.tasks import Prompt
from retrain.kernel.errors import ConfigError, Problem
from retrain.kernel.registry import Plugins
from retrain.kernel.types import Example, TrainRow
from retrain.text.terminal_text import printable

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
    """The rows of all prompts whose answer a sampled completion could have been; ConfigError when there is none.

    A row is the prompt as sampling gets it, the answer and the end of the turn. The last two have advantage 1, and
    together at most `[training] max_tokens` tokens.
    """
    column, limit = config.sft.answer, config.training.max_tokens
    answers = [_answer(prompt.example, column) for prompt in prompts]
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
            rows[prompt.example.id] = _row(prompt, [*tokens, end_of_turn])
    if not rows:
        found = ", ".join(f"{count} {cause}" for cause, count in left_out.items()) or "there are no examples"
        columns = sorted({name for prompt in prompts for name in prompt.example.info})
        known = f"; columns: {printable(', '.join(columns))}" if columns else ""
        what, why = f"no example has an answer to train on in {column!r}", found + known
        fix = "name the column that holds the answers, raise [training] max_tokens, or use another [sft] source"
        raise ConfigError(Problem(where=config.place("sft.answer"), what=what, why=why, fix=fix))
    kept = tuple(prompt for prompt in prompts if prompt.example.id in rows)
    return Solved(prompts=kept, rows=rows, left_out=left_out)


def end_of_turn(tokenizer: Any, config: Config, plugins: Plugins) -> int:
    """The token that ends an answer in the model's own chats, if sampling stops at it; else the end of sequence.

    Sampling stops at the tokenizer's end of sequence and at those of generation_config.json, in every backend.
    ConfigError when the tokenizer has none.
    """
    own = tokenizer.eos_token_id
    stops = {own, *_configured_stops(config, plugins)} - {None}
    if tokenizer.chat_template:
        chat = [{"role": "user", "content": PROBE}, {"role": "assistant", "content": PROBE}]
        try:
            text = str(tokenizer.apply_chat_template(chat, tokenize=False, **config.data.template_args))
        except Exception:  # templates raise what they like; the tokenizer's own token will do
            text = ""
        after = tokenizer(text.rpartition(PROBE)[2], add_special_tokens=False, verbose=False)["input_ids"]
        if found := [token for token in after if token in stops]:
            return int(found[0])
    if own is None:
        what = "the tokenizer has no end-of-sequence token, so that an answer would never end"
        fix = "use a model whose tokenizer has one"
        raise ConfigError(Problem(where=config.place("model.model"), what=what, fix=fix))
    return int(own)


def _answer(example: Example, column: str) -> str:
    """The text to train on; empty when there is none."""
    found = example.reference if column == REFERENCE else example.info.get(column)
    is_text = isinstance(found, str | int | float) and not isinstance(found, bool)
    return str(found).strip() if is_text else ""


def _row(prompt: Prompt, answer: Sequence[int]) -> TrainRow:
    tokens_T = np.concatenate([prompt.tokens_T, np.asarray(answer, dtype=np.int64)])
    action_T = np.arange(len(tokens_T)) >= len(prompt.tokens_T)
    ones_T = action_T.astype(np.float64)
    return TrainRow(tokens_T=tokens_T, action_T=action_T, logprobs_T=np.zeros(len(tokens_T)), advantages_T=ones_T)


def _configured_stops(config: Config, plugins: Plugins) -> set[int]:
    """`eos_token_id` of the model's generation_config.json, none when it cannot be read."""
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
    return {token for token in ids if type(token) is int}
