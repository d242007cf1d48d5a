"""A forecast as text and as JSON, for this machine or for a GPU that it does not have."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from retrain.kernel.config.resolved import Config
from retrain.kernel.contracts.memory import MemoryEstimate, MemoryModel, Workload
from retrain.kernel.errors import RetrainError
from retrain.kernel.registry import Plugins
from retrain.text.amounts import duration, size
from retrain.text.tables import table_lines
from retrain.tools.capacity.advice import NO_KEY, quantised_ways
from retrain.tools.capacity.forecast import Forecast, Past, RunTime, forecast, run_time
from retrain.tools.capacity.shapes import KnownShape, known_shapes
from retrain.tools.capacity.workload import SAFETY

CARDS_GIB = (16, 24, 48, 80)
LONGEST = 131_072  # tokens of a completion where the model does not say its context
RANKS = tuple(2**power for power in range(9, -1, -1))  # 512 to 1


def text(forecast: Forecast, *, has_time: bool = True) -> str:
    found, work, model = forecast.estimate, forecast.work, forecast.model
    counted = "counted in its files" if model.is_counted else "by formula"
    real = "(assumed; a past run, --pilot, --prompt-tokens or a file of data gives the real length)"
    prompt = f" {real}" if forecast.is_prompt_assumed else ""
    trained = f"LoRA {model.lora_parameters:,d}" if work.lora_rank else "all of them trained"
    greedy = f" + {work.greedy_completions:,d} greedy" * bool(work.greedy_completions)
    shared = all(phase.resident == found.phases[0].resident for phase in found.phases)
    always = {"" if shared else f"in {phase.name}: ": _parts(phase.resident) for phase in found.phases}
    lines = [
        f"Model    {model.parameters:,d} parameters ({counted}), {trained}",
        f"Step     {work.completions:,d} completions{greedy} of up to {work.max_tokens:,d} tokens = "
        f"{forecast.step_tokens:,d} tokens; prompts of up to {work.prompt_tokens:,d} tokens{prompt}",
        "",
        f"Memory on {work.device}, when every completion reaches its limit:",
        *(f"  always    {where}{parts}" for where, parts in always.items()),
    ]
    limit = forecast.limit_bytes
    of_limit = f", {100 * found.peak_bytes / limit:.0f} % of {size(limit)}" if limit else ""
    at_once = "" if work.is_served else f"{found.at_once:,d} of {work.most_sampled:,d} completions sampled, "
    lines += [f"  {phase.name:<9} {_parts(phase.parts)}; peak {size(phase.peak_bytes)}" for phase in found.phases]
    lines += [
        f"  peak      {size(found.peak_bytes)} in {found.worst.name}{of_limit}",
        f"  biggest   {found.biggest}",
        f"  at once   {at_once}packs of {found.pack_tokens:,d} tokens",
    ]
    if found.needed_bytes < found.peak_bytes:
        lines.append(f"  at least  {size(found.needed_bytes)}, with one completion at a time")
    if model.checkpoint_bytes:
        lines.append(f"  on disk   {size(model.checkpoint_bytes)} for every checkpoint")
    if forecast.past.peak_memory_bytes:
        lines.append(f"  measured  {size(forecast.past.peak_memory_bytes)} in {_past(forecast)}")
    if forecast.advice:
        lines.append(f"  does not fit: {forecast.advice}")
    return "\n".join([*lines, *(["", *_time(forecast)] if has_time else ())])


def as_data(forecast: Forecast) -> dict[str, Any]:
    found, past = forecast.estimate, forecast.past
    return {
        "device": forecast.work.device,
        "parameters": forecast.model.parameters,
        "parameters_are_counted": forecast.model.is_counted,
        "lora_parameters": forecast.model.lora_parameters,
        "checkpoint_bytes": forecast.model.checkpoint_bytes,
        "prompt_tokens": forecast.work.prompt_tokens,
        "prompt_tokens_are_assumed": forecast.is_prompt_assumed,
        "completions_per_step": forecast.work.completions,
        "max_tokens_per_step": forecast.step_tokens,
        "peak_memory_bytes": found.peak_bytes,
        "peak_phase": found.worst.name,
        "needed_memory_bytes": found.needed_bytes,
        "completions_at_a_time": found.at_once,
        "pack_tokens": found.pack_tokens,
        "resident": {phase.name: dict(phase.resident) for phase in found.phases},
        "phases": {phase.name: {**phase.parts, "peak": phase.peak_bytes} for phase in found.phases},
        "biggest_tensor": str(found.biggest),
        "memory_limit_bytes": forecast.limit_bytes,
        "fix": forecast.advice,
        "runs": forecast.time.schedule.runs,
        "parallelism": forecast.time.schedule.parallelism,
        "total_steps": forecast.time.schedule.total_steps,
        "median_step_time_s": past.median_step_time_s,
        "training_time_s": forecast.time.training_s,
        "evaluation_time_s": forecast.time.evaluation_s,
        "wall_time_s": forecast.time.total_s,
        "time_fix": forecast.time.warning,
        "past_runs": past.runs,
        "past_peak_memory_bytes": past.peak_memory_bytes,
    }


def _time(forecast: Forecast) -> list[str]:
    time, step_s = forecast.time, forecast.past.median_step_time_s
    if step_s is None:
        work = " and ".join(filter(None, (time.training, time.evaluation)))
        lines = [f"Time     {work}; the time of a step is not known yet: add --pilot 3"]
    else:
        at_once = f" / {time.schedule.parallelism} at a time" if time.schedule.parallelism > 1 else ""
        median = f"{duration(step_s)} (median of {_past(forecast)})"
        lines = [f"Time     {time.training} x {median}{at_once} = {duration(time.training_s)}"]
        if time.evaluation:
            known = f" = {duration(time.evaluation_s)}; together {duration(time.total_s)}"
            lines += [f"         {time.evaluation}{known if time.evaluation_s else ': time not known yet'}"]
    return lines + ([f"         {time.warning}"] if time.warning else [])


def _past(forecast: Forecast) -> str:
    return "one run here" if forecast.past.runs == 1 else f"{forecast.past.runs} runs here"


def _parts(parts: Mapping[str, int]) -> str:
    shown = [f"{name.replace('_', ' ')} {size(count)}" for name, count in parts.items() if count >= 2**19]
    return ", ".join(shown) or "next to nothing"


def explained(config: Config, plugins: Plugins) -> dict[str, str]:
    try:
        found = forecast(config, plugins)
    except RetrainError as error:
        return {"peak_memory": f"unknown: {error.problems[0].what}"} | _time_rows(run_time(config, Past()), None)
    rows = {"model_tier": found.model.tier} if found.model.tier else {}
    rows |= {
        "peak_memory": f"{size(found.estimate.peak_bytes)} in {found.estimate.worst.name} on {found.work.device}",
        "biggest_tensor": str(found.estimate.biggest),
    }
    if found.limit_bytes:
        fits = "does not fit" if found.advice else "fits"
        rows["peak_memory"] += f", of {size(found.limit_bytes)}: {fits}"
    if found.is_prompt_assumed:
        rows["peak_memory"] += f" (prompts of {found.work.prompt_tokens} tokens assumed)"
    if not found.work.is_served:
        rows["sampled_at_a_time"] = f"{found.estimate.at_once:,d} of {found.work.most_sampled:,d} completions"
    if found.advice:
        rows["memory_fix"] = found.advice
    return rows | _time_rows(found.time, found.past.median_step_time_s)


def _time_rows(time: RunTime, step_s: float | None) -> dict[str, str]:
    rows = time.rows()
    if step_s is not None:
        runs = f"{time.schedule.runs} runs, " if time.schedule.runs > 1 else ""
        rows["wall_time"] = f"{duration(time.total_s)} ({runs}{duration(step_s)} per step, as before here)"
    return rows | ({"time_fix": time.warning} if time.warning else {})


# A GPU that this machine does not have.


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """The configuration with `[model] quantize` = `quantize`: its needs, and the range of its other keys.

    `max_tokens` is the longest completion that fits (0: not even one token), `lora_rank` the highest power of two up
    to 512 that fits at the configured length, `at_once` the number of completions sampled at a time.
    """

    quantize: str
    fits: bool
    needed_bytes: int
    max_tokens: int
    lora_rank: int
    at_once: int


def options(found: Forecast) -> list[Option]:
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
    lengths = range(1, max(1, model.context - work.prompt_tokens if model.context else LONGEST) + 1)
    # `max_tokens` and `lora_rank` are each the largest with the other as configured.
    ranks = RANKS if work.lora_rank else ()
    return Option(
        quantize=work.quantize,
        fits=is_enough(work),
        needed_bytes=here.needed_bytes,
        max_tokens=bisect_right(lengths, 0, key=lambda tokens: not is_enough(work.with_size("max_tokens", tokens))),
        lora_rank=next((rank for rank in ranks if is_enough(work.with_size("lora_rank", rank))), 0),
        at_once=here.at_once,
    )


def verdict(found: Forecast, name: str, near: str = "") -> str:
    """Return whether it fits, with which settings, the change to make if not, and a row for each way to quantise.

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
            f"  given: {trained}, weights in {weights}, {work.batch_size} x {work.group_size} completions of up to "
            f"{work.max_tokens:,d} tokens, prompts of up to {work.prompt_tokens:,d}",
            "",
            *table_lines(header, rows, num_names=len(header)),
            "",
            "Completions wait for room in the cache: batch_size and group_size change only the time of a step.",
            "Computed from sizes, and not compared with measurements on a GPU yet.",
        ]
    )


def smaller_model(config: Config, plugins: Plugins, found: Forecast) -> str:
    """Return the largest known model of the same maker that fits as configured, or ""."""
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


def known_models(
    config: Config, plugins: Plugins, *, prompt_tokens: int, cards: Sequence[float]
) -> list[dict[str, str]]:
    """Return a row for each known shape: its parameters, and a cell for each card.

    A cell is the first of bf16, int8 and nf4 weights that fits, and the completions sampled at a time.
    """

    def cell(found: Forecast, card: float) -> str:
        limit = int(card * 2**30)
        for work in _ways(found):
            estimated = found.model.estimate(work, None, limit)
            if estimated.needed_bytes <= limit * SAFETY[work.device]:
                kind = {"none": "bf16"}.get(work.quantize, work.quantize)
                return kind if work.is_served else f"{kind}, {estimated.at_once:,d}"
        return "-"

    def row(shape: KnownShape) -> dict[str, str]:
        changed = _with_model(config, shape.name)
        found = forecast(changed, plugins, prompt_tokens=prompt_tokens, gpu_bytes=int(max(cards) * 2**30))
        named = {"model": shape.name, "parameters": f"{shape.parameters / 1e9:.2f} B"}
        return named | {f"{card:g} GiB": cell(found, card) for card in cards}

    return [row(shape) for shape in known_shapes()]
