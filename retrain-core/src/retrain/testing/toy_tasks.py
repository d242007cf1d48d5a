"""Tasks and hostile texts for testing rewards and environments."""

from __future__ import annotations

import json
from collections.abc import Sequence

from retrain.kernel.errors import ConfigError, Problem
from retrain.kernel.plugins.build import build_part
from retrain.kernel.types import Example, Kind
from retrain.testing.bench import Bench

MAX_EXAMPLES = 4
HUGE_CHARS = 200_000

TOYS = (
    Example(id="toy-sum", prompt="What is 12 + 30?", reference="42"),
    Example(id="toy-fraction", prompt="Half of one third?", reference=r"\frac{1}{6}", info={"level": 2}),
    Example(id="toy-word", prompt=({"role": "user", "content": "Capital of France?"},), reference="Paris"),
)
HOSTILE = {
    "nothing": "",
    "white space": " \n\t\u00a0\u2003",
    "a null character": "\x00 42 \x00",
    "terminal control": "\x1b[31mred\x1b[0m \x07\x08",
    "half a surrogate pair": "\ud800 42",
    "right-to-left marks and emoji": "\u202e24\u202c \U0001f9d1\u200d\U0001f680 e\u0301",
    "an open box": r"\boxed{" * 50,
    "a box that holds nothing": r"\boxed{}",
    "unbalanced braces": "}{" * 500 + r"\boxed{{{}",
    "not a number": r"\boxed{nan} \boxed{inf} \boxed{1e999}",
    "a huge power": r"\boxed{9^{9^{9^{9}}}}",
    "a division by zero": r"\boxed{\frac{1}{0}}",
    "markup and code": "<script>alert(1)</script> __import__('os').system('false') {{7*7}} %s %n ${HOME}",
    "one long word": "a" * HUGE_CHARS,
    "many lines": "4 2\n" * (HUGE_CHARS // 4),
}


def examples_for(bench: Bench) -> tuple[Example, ...]:
    """The first examples of the configured data source, or toy examples if none is configured."""
    if "source" not in bench.given.get("data", {}):
        return TOYS
    config, context = bench.config, bench.context()
    source = build_part(
        Kind.DATA_SOURCE, config.data.source, "data.source", context, config.data.options, "data.options"
    )
    found: tuple[Example, ...] = source.load().examples[:MAX_EXAMPLES]
    if not found:
        what = f"data source {config.data.source!r} gave no examples to try the reward on"
        raise ConfigError(Problem(what=what, fix="give a `config` whose [data] source has examples"))
    return found


def as_text(examples: Sequence[Example]) -> str:
    """The examples as text, to detect whether they were modified."""
    return json.dumps(
        [[e.id, e.prompt, e.reference, e.task, dict(e.info)] for e in examples], default=repr, sort_keys=True
    )
