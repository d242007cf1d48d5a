"""What would fit a GPU that this machine does not have: one model by its quantisation, or every known model."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache
from typing import Any

from retrain.kernel.config.resolved import Config
from retrain.kernel.contracts.memory import MemoryEstimate, MemoryModel, Workload
from retrain.kernel.registry import Plugins
from retrain.text.amounts import size
from retrain.text.tables import table_lines
from retrain.tools.capacity.advice import NO_KEY, quantised_ways
from retrain.tools.capacity.forecast import Forecast, forecast
from retrain.tools.capacity.shapes import known_shapes
from retrain.tools.capacity.show import as_data as plain_data
from retrain.tools.capacity.workload import SAFETY

GIB = 2**30
CARDS_GIB = (16, 24, 48, 80)
LONGEST = 131_072  # tokens of a completion where the model does not say its context
RANKS = tuple(2**power for power in range(9, -1, -1))  # 512 to 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """The configuration with `[model] quantize` = `quantize`: what it needs, and how far its other keys can go.

    `max_tokens` is the longest completion that fits (0 = none), `lora_rank` the highest power of two up to 512 that
    does at the configured length, `at_once` how many completions are sampled at a time.
    """

    quantize: str
    fits: bool
    needed_bytes: int
    max_tokens: int
    lora_rank: int
    at_once: int


def options(found: Forecast) -> list[Option]:
    """A row for the weights as configured, and one for each way to quantise them."""
    return [_option(found.model, work, found.limit_bytes or 0) for work in _ways(found)]


def _ways(found: Forecast) -> list[Workload]:
    return [found.work, *(quantised_ways(found.work) if found.model.can_quantise else ())]


def _option(model: MemoryModel, work: Workload, limit: int) -> Option:
    room = int(limit * SAFETY[work.device])

    @cache
    def estimated(changed: Workload) -> MemoryEstimate:
        return model.estimate(changed, None, limit)

    def is_enough(changed: Workload) -> bool:
        return estimated(changed).needed_bytes <= room

    here = estimated(work)
    longest = (model.context - work.prompt_tokens) if model.context else LONGEST
    ranks = RANKS if work.lora_rank else ()
    return Option(
        quantize=work.quantize,
        fits=is_enough(work),
        needed_bytes=here.needed_bytes,
        max_tokens=bisect_right(
            range(1, max(1, longest) + 1), 0, key=lambda tokens: not is_enough(work.with_size("max_tokens", tokens))
        ),
        lora_rank=next((rank for rank in ranks if is_enough(work.with_size("lora_rank", rank))), 0),
        at_once=here.at_once,
    )


def verdict(found: Forecast, name: str, near: str = "") -> str:
    """Whether it fits, with which settings, what to change if not, and the table of `options`.

    `near` is the model to name where no key is enough.
    """
    work, limit = found.work, found.limit_bytes or 0
    usable = f"{size(limit)} ({size(limit * SAFETY[work.device])} of them used)"
    trained = f"LoRA of rank {work.lora_rank}" if work.lora_rank else "all weights trained"
    dtype = {"auto": "bf16"}.get(work.model_dtype, work.model_dtype) if work.lora_rank else "fp32"
    weights = work.quantize if work.quantize != "none" else dtype
    rows = [
        (
            option.quantize,
            size(option.needed_bytes),
            "yes" if option.fits else "no",
            f"{option.max_tokens:,d}" if option.max_tokens else "-",
            str(option.lora_rank or "-"),
            f"{option.at_once:,d} of {work.most_sampled:,d}" if option.fits and not work.is_served else "-",
        )
        for option in options(found)
    ]
    advice = NO_KEY.replace("[model] model", f"[model] model ({near} fits)") if near else found.advice
    header = ("quantize", "needs", "fits", "longest completion", "highest rank", "sampled at a time")
    return "\n".join(
        [
            f"{name} on {'one GPU' if not work.samplers else 'each GPU'} of {usable}: "
            + (f"does not fit: {advice}" if found.advice else "fits"),
            f"  asked: {trained}, weights in {weights}, {work.batch_size} x {work.group_size} completions of up to "
            f"{work.max_tokens:,d} tokens, prompts of up to {work.prompt_tokens:,d}",
            "",
            *table_lines(header, rows, num_names=len(header)),
            "",
            "Completions wait for room in the cache: batch_size and group_size change only the time of a step.",
            "No GPU was asked: this is computed from sizes, and has not been compared with measurements on a GPU yet.",
        ]
    )


def smaller_model(config: Config, plugins: Plugins, found: Forecast) -> str:
    """The largest known model of the same maker that fits as configured; "" if none does."""
    maker = config.model.model.partition("/")[0]
    smaller = [shape for shape in known_shapes() if shape.parameters < found.model.parameters]
    for shape in sorted(smaller, key=lambda shape: -shape.parameters):
        if shape.name.partition("/")[0] == maker:
            prompt, own = found.work.prompt_tokens, _with_model(config, shape.name)
            if not forecast(own, plugins, prompt_tokens=prompt, gpu_bytes=found.limit_bytes).advice:
                return shape.name
    return ""


def _with_model(config: Config, name: str) -> Config:
    return replace(config, tables={**config.tables, "model": config.model.model_copy(update={"model": name})})


def as_data(found: Forecast) -> dict[str, Any]:
    """The forecast with the verdict and the options, for `--json`."""
    own = {"gpu_memory_bytes": found.limit_bytes, "fits": not found.advice}
    return {**plain_data(found), **own, "options": [asdict(option) for option in options(found)]}


def known_models(
    config: Config, plugins: Plugins, *, prompt_tokens: int, cards: Sequence[float]
) -> list[dict[str, str]]:
    """A row for each known shape: its parameters, and what the configuration needs to fit each card.

    A card's cell is the first of bf16, int8 and nf4 weights with which it fits, and the completions sampled at a time.
    """
    rows = []
    for shape in known_shapes():
        changed = _with_model(config, shape.name)
        row = {"model": shape.name, "parameters": f"{shape.parameters / 1e9:.2f} B"}
        for card in cards:
            found = forecast(changed, plugins, prompt_tokens=prompt_tokens, gpu_bytes=int(card * GIB))
            row[f"{card:g} GiB"] = _cell(found)
        rows.append(row)
    return rows


def _cell(found: Forecast) -> str:
    limit = found.limit_bytes or 0
    for work in _ways(found):
        estimated = found.model.estimate(work, None, limit)
        if estimated.needed_bytes <= limit * SAFETY[work.device]:
            kind = {"none": "bf16"}.get(work.quantize, work.quantize)
            return kind if work.is_served else f"{kind}, {estimated.at_once:,d}"
    return "-"
