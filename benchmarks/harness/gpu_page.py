"""The page of a GPU proof: tests, figures against their limits, kernels by time, and the next three things to do."""

from __future__ import annotations

import re
import textwrap
from collections import Counter
from collections.abc import Iterator, Mapping
from statistics import median
from typing import Any

from harness import report
from harness.proof import DONE

Figures = Mapping[str, Any]
Parts = Mapping[str, Mapping[str, Any]]
COLUMNS = ("part", "of it", "measured", "limit", "reached", "wanted")
COUNTED = ("passed", "failed", "error", "skipped")
KERNELS, FAILURES, THINGS = 5, 10, 3  # lines of each on the page
NAME_CHARS, REASON_CHARS = 60, 160
ATTENTION = re.compile(r"attend|flash|fmha|attention", re.IGNORECASE)
SKIPPED = re.compile(r"SKIPPED \[(?P<count>\d+)\] \S+: (?P<reason>.*)")  # as `pytest -rs` prints it
PRODUCT = re.compile(r"gemm|gemv|nvjet|cutlass|cublas|xmma|\bb?mm\b|matmul", re.IGNORECASE)
PEER = ", TRL"  # ends the name of the part whose step is TRL's
SMALL = "small"  # key of a proof whose sizes only show that the parts work
SMALL_TEXT = "Small sizes: they show that the parts work, and their times mean nothing."


def page(where: Mapping[str, Any], parts: Parts) -> str:
    """The whole page as Markdown; without a figure, a sentence that says so."""
    rows = [row for name, part in parts.items() for row in _rows(name, part["figures"], parts)]
    if not rows:
        return "No figure has been measured on a GPU yet."
    lines = [f"| {' | '.join(COLUMNS)} |", "|---" * len(COLUMNS) + "|"]
    lines += [f"| {' | '.join(row)} |" for row in rows]
    for title, found in (("Tests", _not_passed(parts)), ("Next, by weight", _next_things(parts))):
        lines += ["", f"{title}:", "", *found]
    lost = [f"{name} ({part['status']})" for name, part in parts.items() if part["status"] != DONE]
    sentences = [f"`{report.command_line().removesuffix(' --report')}`; {report.describe(where)}."]
    sentences += [f"Not done: {', '.join(lost)}."] if lost else []
    sentences += [SMALL_TEXT] if where.get(SMALL) else []
    sentences += [] if any(name.endswith(PEER) for name in parts) else ["No step of TRL was measured."]
    return "\n".join([*lines, "", *_wrapped(" ".join(sentences))])


def _rows(name: str, figures: Figures, parts: Parts) -> Iterator[list[str]]:
    """Rows of a part, by the fields of its figures; its tests are one row."""
    files = [figure for figure in figures.values() if "exit_code" in figure]
    if files:
        counts = {key: sum(file.get(key, 0) for file in files) for key in COUNTED}
        counted = ", ".join(f"{count} {key}" for key, count in counts.items() if count or key != "error")
        yield [name, f"{len(files)} files", counted, "", "", "all pass"]
    for of, figure in figures.items():
        if of == "kernels":
            yield from _kernel_rows(name, figure)
        elif measured := _measured(name, of, figure, parts):
            yield [name, of, *measured]


def _measured(name: str, of: str, figure: Figures, parts: Parts) -> list[str]:
    """Measured, limit, reached and wanted; empty for figures that the page leaves out."""
    if "fraction" in figure:
        is_goal = "8-bit" not in name and of == "128 x 1024"
        told = [f"{figure['step_ms']:.2f} ms a token step", f"{figure['least_ms']:.2f} ms"]
        return [*told, f"{figure['fraction']:.0%} of bandwidth", "60 %" if is_goal else ""]
    if "step_ms" in figure:
        return [f"{figure['step_ms']:.2f} ms a token step", "", "", ""]
    if "mfu" in figure:
        return [f"{min(figure['step_s']):.2f} s", f"{figure['tflop']:.0f} Tflop", f"{figure['mfu']:.0%} MFU", "45 %"]
    if "times_the_limit" in figure:
        limit_s = figure["sample_limit_s"] + figure["train_limit_s"]
        return [f"{median(figure['step_s']):.2f} s", f"{limit_s:.2f} s", f"{figure['times_the_limit']:.2f} x", "1.6 x"]
    if name.endswith(PEER):
        ours = parts.get(name.removesuffix(PEER), {}).get("figures", {}).get("step")
        ratio = f"{median(figure['step_s']) / median(ours['step_s']):.2f} x ours" if ours else ""
        return [f"{median(figure['step_s']):.2f} s", "", ratio, ""]
    if "long_s" in figure or ("pack_tokens" in figure and "mfu" not in figure):
        return [f"peak {figure['peak_gb'] or 0:.1f} GB", "16 GB", "", ""]
    if "bytes_per_s" in figure:
        rates = f"{figure['bytes_per_s'] / 1e12:.2f} TB/s, {figure['operations_per_s'] / 1e12:.0f} Tflop/s"
        return [rates, "", "", ""]
    return []


def _kernel_rows(name: str, table: Figures) -> Iterator[list[str]]:
    wall_s, kernel_s = table["wall_s"], table["kernel_s"]
    yield [
        name,
        "all kernels",
        f"{1e3 * kernel_s:.1f} ms, {table['launches']} launches",
        "",
        f"{kernel_s / wall_s:.0%}",
        "",
    ]
    for own_s, count, kernel in table["kernels"][:KERNELS]:
        short = kernel[:NAME_CHARS].replace("|", "/")
        yield [name, f"`{short}`", f"{1e3 * own_s:.1f} ms, {count} launches", "", f"{own_s / wall_s:.0%}", ""]


def _not_passed(parts: Parts) -> list[str]:
    """Failed tests with the message of each, and the reasons of the others that did not run."""
    files = [figure for figure in parts.get("tests", {}).get("figures", {}).values() if "exit_code" in figure]
    if not files:
        return ["- The part `tests` has not run."]
    failed, skipped = [], Counter[str]()
    for line in (line for file in files for line in file["not_passed"]):
        if found := SKIPPED.fullmatch(line):
            skipped[found["reason"]] += int(found["count"])
        else:
            failed.append(line)
    lines = failed[:FAILURES] + [f"and {len(failed) - FAILURES} more"] * (len(failed) > FAILURES)
    lines += [f"{count} skipped: {reason}" for reason, count in skipped.most_common()]
    return [f"- {line[:REASON_CHARS].replace('|', '/')}" for line in lines] or ["- None failed, none was skipped."]


def _next_things(parts: Parts) -> list[str]:
    """The largest losses of a step of the first shape whose decode, train and step have been measured."""
    for name in parts:
        shape = name.removeprefix("step ")
        of = [parts.get(f"{kind} {shape}", {}).get("figures", {}) for kind in ("step", "decode", "train")]
        if all(key in figures for key, figures in zip(("step", "kernels", "kernels"), of, strict=True)):
            step_s = median(of[0]["step"]["step_s"])
            lost = sorted(_losses(of[0]["step"], *of[1:]), reverse=True)[:THINGS]
            told = [f"{text}: {lost_s:.2f} s, {lost_s / step_s:.0%} of a step of {shape}" for lost_s, text in lost]
            return [f"{at}. {line}" for at, line in enumerate(told, 1)]
    return ["- Not known before decode, train and step of a shape are done."]


def _losses(step: Figures, decode: Figures, train: Figures) -> Iterator[tuple[float, str]]:
    """Seconds of a step above its limit, and where.

    The profiled calls are shorter than a step's: the shares of their kernels are taken for the shares of the step.
    Products and attention may take their limit; every other kernel, and every wait of the GPU, is lost.
    """
    sample_s, train_s = median(step["sample_s"]), median(step["train_s"])
    weights = next((each["weights_ms"] / each["least_ms"] for each in decode.values() if "weights_ms" in each), 1.0)
    limit_s = step["sample_limit_s"]
    limits = {"products": weights * limit_s, "attention": (1 - weights) * limit_s}
    yield from _phase_losses("decoding", sample_s, decode["kernels"], limits)
    limits = {"products and attention": step["train_limit_s"]}
    yield from _phase_losses("training", train_s, train["kernels"], limits)
    rest_s = median(step["step_s"]) - sample_s - train_s
    yield rest_s, "between sampling and training: scores, records, publishing"


def _phase_losses(
    phase: str, seconds: float, table: Figures, limits: Mapping[str, float]
) -> Iterator[tuple[float, str]]:
    scale = seconds / table["wall_s"]
    yield scale * max(0.0, table["wall_s"] - table["kernel_s"]), f"{phase}: the GPU waits for the host"
    taken_s = dict.fromkeys(limits, 0.0)
    for own_s, _, kernel in table["kernels"]:
        kind = "attention" if ATTENTION.search(kernel) else "products" if PRODUCT.search(kernel) else ""
        limited = next((each for each in limits if kind and kind in each), "")
        if limited:
            taken_s[limited] += scale * own_s
        else:
            yield scale * own_s, f"{phase}: `{kernel[:NAME_CHARS]}`"
    for each, limit_s in limits.items():
        yield max(0.0, taken_s[each] - limit_s), f"{phase}: {each} above the limit"


def _wrapped(text: str) -> list[str]:
    return textwrap.wrap(text, report.WIDTH, break_long_words=False, break_on_hyphens=False)
