"""The texts of a run's lines: each fits a terminal of 100 columns, the most important part first."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from textwrap import wrap
from typing import Any

from retrain.records.run import eval_sets
from retrain.tasks.scoring.verdict import part_fields
from retrain.text.amounts import percent
from retrain.text.progress import warm_up_left
from retrain.text.terminal_text import printable

COLUMNS = 100
MOST_PARTS_CHARS, CONDITION_CHARS = 32, 24
QUANTILES = ("p10", "p50", "p90")
_OTHERS = {
    "wrong": "all_wrong_groups",
    "right": "all_right_groups",
    "same": "tied_groups",
    "no verdict": "no_verdict_groups",
    "surplus": "surplus_groups",
}
_SIZES = {"datums": "num_datums", "bs": "batch_size", "gs": "group_size"}
# One part of a line: in full, then ever shorter; "" leaves it out.
Forms = tuple[str, ...]


def fitted(parts: Sequence[Forms], columns: int) -> str:
    """Join the parts by ` | `, shortened until they fit: the last ones first, and each one form at a time.

    Room that is left then goes to the first ones. A part with a single form is never shortened, so the line may be
    longer.
    """
    chosen = [0] * len(parts)

    def line() -> str:
        texts = (forms[min(form, len(forms) - 1)] for forms, form in zip(parts, chosen, strict=True))
        return " | ".join(text for text in texts if text)

    for form in range(1, max(map(len, parts))):
        for part in reversed(range(len(parts))):
            if len(line()) > columns:
                chosen[part] = form
    for part, form in enumerate(chosen):
        for chosen[part] in range(form + 1):
            if len(line()) <= columns:
                break
    return line()


def step_line(metrics: Mapping[str, Any], columns: int = COLUMNS) -> str:
    """`Step 0 [maxrl+gtpo_sepa] | correct=52.3% | loss=0.0450 | useful=7/8 (1 right) | ... | time=0.4s`

    The mean reward is shown where it differs from the correct rate. The reason of a rejected step is never shortened.
    """
    number, condition = f"Step {metrics['step']}", metrics["condition"]
    # Sampling failed, so there is nothing else to show.
    if "num_datums" not in metrics:
        return f"{number} [{condition}] | {_rejected(metrics)}"
    size = f"{metrics['useful_groups']}/{metrics['batch_size']}"
    others = [f"{count} {status}" for status, field in _OTHERS.items() if (count := metrics.get(field, 0))]
    why = f"useful={size} ({', '.join(others)})" if others else f"useful={size}"
    time_s = metrics["step_time_s"]
    useful: Forms = (why, f"useful={size}")
    times: Forms = (f"time={time_s:.1f}s", f"time={time_s:.{int(time_s < 10)}f}s")
    # Without an update the reason matters most, and is shortened last.
    if is_idle := metrics["loss"] is None and "rejected" not in metrics:
        useful, times = (why, why, why, f"useful={size}"), (*times, "")
    rounds: list[Forms] = []
    if "rounds" in metrics:
        drawn = f"rounds={metrics['rounds']}"
        rounds = [(f"{drawn} ({dropped_text(metrics).partition(' ')[0]} dropped)", drawn, "")]
    rest: list[Forms] = [
        *_verdict_forms(metrics),
        *([useful] if is_idle else []),
        _loss(metrics),
        *_optional("teacher_kl", metrics.get("teacher_kl_mean"), ".4f"),
        *([] if is_idle else [useful]),
        *rounds,
        *_optional("sepa_l", metrics.get("sepa_lambda"), ".3f", ".1f"),
        *_optional("kl", metrics.get("kl_mean"), ".4f", ".3f"),
        times,
        *((f"{name}={metrics[field]}", "") for name, field in _SIZES.items()),
    ]
    short = condition if len(condition) <= CONDITION_CHARS else f"{condition[: CONDITION_CHARS - 1]}…"
    return fitted([(f"{number} [{condition}]", f"{number} [{short}]", number), *rest], columns)


def with_parts(
    line: str, metrics: Mapping[str, Any], columns: int = COLUMNS, prefix: str = "", *, is_one_line: bool = False
) -> list[str]:
    """The line and, below it or at its end, the parts of the reward for which it had no room."""
    parts = [text for text in reward_texts(metrics, prefix)[1:] if text not in line]
    if is_one_line:
        return [" | ".join([line, *parts])]
    return [line, *wrap(" ".join(parts), columns, initial_indent="  ", subsequent_indent="  ")]


def _verdict_forms(metrics: Mapping[str, Any]) -> list[Forms]:
    if "correct_rate" not in metrics:
        return []
    rates: list[Forms] = [(f"correct={percent(metrics['correct_rate'])}",)]
    if shadow := shadow_text(metrics):
        rates.append((shadow,))
    forms = _reward_forms(reward_texts(metrics))
    return rates if forms[0] == f"reward={metrics['correct_rate']:.3f}" else [*rates, forms]


def shadow_text(metrics: Mapping[str, Any], field: str = "shadow_correct_rate") -> str:
    """Share that `[reward] shadow` calls correct, `shadow=12.5%`; empty without a shadow."""
    return f"shadow={percent(metrics[field])}" if field in metrics else ""


def _reward_forms(texts: Sequence[str]) -> Forms:
    """Return the reward with quantiles and parts, with its parts unless they are long, and by itself."""
    reward, parts = texts[0].partition(" (")[0], " ".join(texts[1:])
    without_quantiles = f"{reward} | {parts}" if 0 < len(parts) <= MOST_PARTS_CHARS else reward
    return " | ".join(texts), without_quantiles, reward


def _rejected(metrics: Mapping[str, Any]) -> str:
    return f"rejected: {' '.join(metrics['rejected'].splitlines())}"


def _loss(metrics: Mapping[str, Any]) -> Forms:
    if "rejected" in metrics:
        return (_rejected(metrics),)
    if metrics["loss"] is None:
        return ("no informative datums, skipping",)
    loss = f"loss={metrics['loss']:.4f}"
    return (placeholder := f"{loss} (placeholder)", placeholder, "") if metrics["loss_is_placeholder"] else (loss,)


def _optional(name: str, value: float | None, *digits: str) -> list[Forms]:
    """A number that not every run has, in formats ever shorter; the last to be left out."""
    if value is None:
        return []
    texts = [f"{name}={value:{each}}" for each in digits]
    # A zero mostly says that the run has no such thing, so it goes first.
    return [(texts[0], texts[-1] if value else "", "")]


def supervised_line(metrics: Mapping[str, Any]) -> str:
    """`SFT, 19 steps left | loss=1.2031 | tokens=512 | time=0.4s`"""
    loss = f"loss={metrics['sft_loss']:.4f}" if "rejected" not in metrics else _rejected(metrics)
    tokens = [f"tokens={metrics['sft_tokens']}"] if "sft_tokens" in metrics else []
    head, time_s = f"SFT, {warm_up_left(metrics['step'] + 1)}", metrics["sft_time_s"]
    return " | ".join([head, loss, *tokens, f"time={time_s:.1f}s"])


def reward_texts(metrics: Mapping[str, Any], prefix: str = "") -> list[str]:
    """`reward=0.431 (p10 0.1, p50 0.4, p90 1)`, and of its parts `format=0.900 math=0.310`.

    Quantiles are shown if one of them is neither 0 nor 1.
    """
    mean = metrics.get(f"{prefix}mean_reward")
    quantiles = {name: metrics[f"{prefix}reward_{name}"] for name in QUANTILES if f"{prefix}reward_{name}" in metrics}
    shown = ", ".join(f"{name} {value:.3g}" for name, value in quantiles.items() if not {0, 1} >= {*quantiles.values()})
    means = {name: metrics[field] for name, field in part_fields(metrics, prefix).items()}
    parts = " ".join(f"{printable(name)}={value:.3f}" for name, value in means.items())
    reward = "reward=none" if mean is None else f"reward={mean:.3f}"
    return [f"{reward} ({shown})" if shown else reward, *([parts] if parts else [])]


def graded_texts(metrics: Mapping[str, Any], prefix: str = "") -> list[str]:
    """`reward_texts`, or nothing where the correct rate says it all: all quantiles are 0 or 1, and no parts."""
    texts = reward_texts(metrics, prefix)
    return texts if len(texts) > 1 or "(" in texts[0] else []


def dropped_text(metrics: Mapping[str, Any]) -> str:
    """With `[training] refill`: the share of sampled tokens that was not trained, `83% of 5,120 tokens dropped`."""
    sampled, dropped = metrics.get("sampled_tokens", 0), metrics.get("dropped_tokens", 0)
    return f"{100 * dropped / max(sampled, 1):.0f}% of {sampled:,} tokens dropped"


def rate_text(metrics: Mapping[str, Any], prefix: str = "eval_") -> str:
    """A held-out correct rate with its 95 % interval: `48.4% [42.1, 54.7]`."""
    rate, low, high = (100 * metrics[f"{prefix}{name}"] for name in ("correct_rate", "ci_low", "ci_high"))
    return f"{rate:.1f}% [{low:.1f}, {high:.1f}]"


def evaluations(metrics: Mapping[str, Any], columns: int = COLUMNS, *, is_one_line: bool = False) -> list[str]:
    """A line for the held-out examples, and one for each further set, each as `with_parts` writes it."""
    names = ["", *eval_sets(metrics)] if "eval_correct_rate" in metrics else eval_sets(metrics)
    found = [(evaluation(metrics, columns, name), f"eval_{name}_" if name else "eval_") for name in names]
    return [
        shown for line, prefix in found for shown in with_parts(line, metrics, columns, prefix, is_one_line=is_one_line)
    ]


def evaluation(metrics: Mapping[str, Any], columns: int = COLUMNS, name: str = "") -> str:
    """`Eval before training | correct=48.4% [42.1, 54.7] | pass@4=81.3% | 64 held-out examples x 4`

    With the `name` of a further set: `Eval before training, hard | correct=...`.
    """
    prefix, kind = (f"eval_{name}_", "examples") if name else ("eval_", "held-out examples")
    when = "before training" if metrics["step"] < 0 else f"after step {metrics['step']}"
    largest = max(int(field.rsplit("_", 1)[1]) for field in metrics if field.startswith(f"{prefix}pass_at_"))
    head = f"Eval {when}, {name}" if name else f"Eval {when}"
    texts: list[Forms] = [(head,), (f"correct={rate_text(metrics, prefix)}",)]
    texts += [(shadow,)] if (shadow := shadow_text(metrics, f"{prefix}shadow_rate")) else []
    texts += [_reward_forms(graded)] if (graded := graded_texts(metrics, prefix)) else []
    passed = f"pass@{largest}={percent(metrics[f'{prefix}pass_at_{largest}'])}"
    texts += [(passed, passed, passed, "")]
    examples, samples = metrics[f"{prefix}examples"], metrics[f"{prefix}samples"]
    return fitted([*texts, (f"{examples} {kind} x {samples}", f"{examples} x {samples}", "")], columns)


def training_complete(condition: str, steps: int, running_rate: float | None) -> str:
    """The first of the last lines; without a rate where no completion was scored."""
    rate = "" if running_rate is None else f", running correct rate: {percent(running_rate)}"
    return f"Training complete. {condition}, {steps} steps{rate}"
