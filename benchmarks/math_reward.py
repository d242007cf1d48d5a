"""What the `math` reward costs beside math-verify alone: `python benchmarks/math_reward.py [--json FILE]`.

Scores 500 generated pairs (fractions, decimals, sets, intervals, matrices, units, negative exponents, roots; half of
them equal) with the reward, and compares the same pairs by `math_verify.parse` and `verify` called directly, in turns
within one process. `reference parsed once` lets the direct way keep its parsed references, as the reward does. The same
again for 500 answers, two thirds of them right and the others gamed (`benchmarks/answer_pairs.py`): math-verify finds
them all equal, so that the reward looks at the form of each.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np

from retrain.api import Example, generator
from retrain_rewards.boxed import boxed
from retrain_rewards.verifiers.math_reward import MathReward

PAIRS = 500
REPEATS = 7
UNITS = (r"\text{ cm}", r"\text{ meters}", r"\,\text{m}", r"^\circ", r"\%", r" \text{ dollars}")
Pair = tuple[str, str, str]  # (kind, reference, answer)


def pairs(count: int = PAIRS, seed: int = 0) -> list[Pair]:
    """Pairs of every kind in turn, equal and unequal by chance, always the same for a seed."""
    rng = generator(seed)
    kinds: tuple[Callable[[np.random.Generator, bool], tuple[str, str]], ...] = (
        *(_fractions, _decimals, _sets, _intervals, _matrices, _units, _powers, _roots),
    )
    made = []
    for number in range(count):
        kind = kinds[number % len(kinds)]
        reference, answer = kind(rng, bool(rng.integers(2)))
        made.append((kind.__name__.strip("_"), reference, answer))
    return made


def _fractions(rng: np.random.Generator, equal: bool) -> tuple[str, str]:
    top, bottom, times = (int(n) for n in rng.integers(1, 40, 3))
    other = top * times if equal else top * times + 1
    forms = (
        rf"\dfrac{{{other}}}{{{bottom * times}}}",
        f"{other}/{bottom * times}",
        rf"-\frac{{{-other}}}{{{bottom * times}}}",
    )
    return rf"\frac{{{top}}}{{{bottom}}}", forms[int(rng.integers(3))]


def _decimals(rng: np.random.Generator, equal: bool) -> tuple[str, str]:
    hundredths = int(rng.integers(-5000, 5000))
    value = Fraction(hundredths if equal else hundredths + 1, 100)
    forms = (f"{float(value)}", rf"\frac{{{value.numerator}}}{{{value.denominator}}}", f"{float(value):.4f}")
    return f"{hundredths / 100}", forms[int(rng.integers(3))]


def _sets(rng: np.random.Generator, equal: bool) -> tuple[str, str]:
    members = [int(n) for n in rng.choice(50, int(rng.integers(2, 6)), replace=False)]
    others = [int(n) for n in rng.permutation(members)]
    if not equal:
        others[0] += 60
    shown = ", ".join(str(n) for n in others)
    return rf"\{{{','.join(map(str, members))}\}}", (rf"\{{{shown}\}}", rf"\left\{{ {shown} \right\}}", shown)[
        int(rng.integers(3))
    ]


def _intervals(rng: np.random.Generator, equal: bool) -> tuple[str, str]:
    low, wide = int(rng.integers(-20, 20)), int(rng.integers(1, 20))
    left, right = "[("[int(rng.integers(2))], "])"[int(rng.integers(2))]
    end = low + wide if equal else low + wide + 1
    forms = (f"{left}{low}, {end}{right}", rf"\left{left} {low}, \frac{{{2 * end}}}{{2}} \right{right}")
    return f"{left}{low},{low + wide}{right}", forms[int(rng.integers(2))]


def _matrices(rng: np.random.Generator, equal: bool) -> tuple[str, str]:
    cells = [[int(n) for n in row] for row in rng.integers(-9, 10, (2, int(rng.integers(1, 4))))]
    reference = _matrix(cells, "pmatrix", lambda n: str(n))
    if not equal:
        cells[-1][-1] += 1
    return reference, _matrix(cells, "bmatrix" if rng.integers(2) else "pmatrix", lambda n: rf"\frac{{{2 * n}}}{{2}}")


def _matrix(cells: list[list[int]], name: str, shown: Callable[[int], str]) -> str:
    rows = r" \\ ".join(" & ".join(shown(n) for n in row) for row in cells)
    return rf"\begin{{{name}}} {rows} \end{{{name}}}"


def _units(rng: np.random.Generator, equal: bool) -> tuple[str, str]:
    amount, unit = int(rng.integers(1, 2000)), UNITS[int(rng.integers(len(UNITS)))]
    other = amount if equal else amount + 1
    return f"{amount}{unit}", (f"{other}", f"{other}{unit}.", f"{other}.0{unit}")[int(rng.integers(3))]


def _powers(rng: np.random.Generator, equal: bool) -> tuple[str, str]:
    base, exponent = int(rng.integers(2, 9)), int(rng.integers(1, 7))
    down = base**exponent if equal else base**exponent + 1
    forms = (rf"\frac{{1}}{{{down}}}", f"1/{down}", rf"{down}^{{-1}}")
    return f"{base}^{{-{exponent}}}", forms[int(rng.integers(3))]


def _roots(rng: np.random.Generator, equal: bool) -> tuple[str, str]:
    outside, inside = int(rng.integers(2, 9)), int(rng.integers(2, 9))
    squared = outside * outside * inside
    return rf"{outside}\sqrt{{{inside}}} + x", rf"x + \sqrt{{{squared if equal else squared + 1}}}"


def answers(count: int = PAIRS) -> list[Pair]:
    """Right and gamed answers, all equal to their references for math-verify."""
    from answer_pairs import gamed_pairs, right_pairs  # beside this script

    right = 2 * count // 3
    made = [*right_pairs(right), *gamed_pairs(count - right)]
    return [(pair.kind, pair.reference, pair.answer) for pair in made]


def measure(made: list[Pair], repeats: int = REPEATS) -> dict[str, Any]:
    """Median seconds of processor time over all pairs, each way, and speed relative to math-verify alone."""
    from math_verify import parse, verify

    reward = MathReward(time_limit_s=8.0)
    reward.prepare()
    tasks = [(Example(id=str(i), prompt="", reference=gold), boxed(answer)) for i, (_, gold, answer) in enumerate(made)]
    golds = [parse(boxed(gold)) for _, gold, _ in made]
    ways: dict[str, Callable[[], object]] = {
        "reward": lambda: [reward.score(example, text) for example, text in tasks],
        "direct": lambda: [verify(parse(boxed(example.reference)), parse(text)) for example, text in tasks],
        "direct, reference parsed once": lambda: [
            verify(gold, parse(text)) for gold, (_, text) in zip(golds, tasks, strict=True)
        ],
    }
    times: dict[str, list[float]] = {name: [] for name in ways}
    for turn in range(repeats + 1):
        for name in sorted(ways, key=lambda name: (list(ways).index(name) + turn) % len(ways)):  # none always last
            started = time.process_time()
            ways[name]()
            if turn:  # the first turn fills the caches of all
                times[name].append(time.process_time() - started)
    medians = {name: statistics.median(values) for name, values in times.items()}
    speeds = {name: medians[name] / medians["reward"] for name in ways if name != "reward"}
    return {"pairs": len(made), "repeats": repeats, "median_s": medians, "speed_of_reward_against": speeds}


def main() -> None:
    """Measure and print; `--json FILE` also writes the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    parser.add_argument("--repeats", type=int, default=REPEATS)
    arguments = parser.parse_args()
    figures: dict[str, Any] = {"machine": platform.platform(), "python": platform.python_version()}
    for title, made in (("half of them equal", pairs()), ("right and gamed answers", answers())):
        figures[title] = found = measure(made, arguments.repeats)
        print(f"{found['pairs']} pairs, {title}")
        for name, seconds in found["median_s"].items():
            print(f"  {name:32} {seconds:7.3f} s   {found['pairs'] / seconds:7.0f} pairs/s")
        for name, ratio in found["speed_of_reward_against"].items():
            print(f"  speed of the reward against {name}: {100 * ratio:.0f} %")
    if arguments.json:
        arguments.json.write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
