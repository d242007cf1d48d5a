"""Data source `{{ cookiecutter.name }}`: sums in which a digit is carried."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field
from retrain.api import ConfigError, Example, LoadedData, PluginContext, {% if cookiecutter.form == "file" %}PluginSpec, {% endif %}Problem, Seeds


class Options(BaseModel):
    """`[data.options]`: the size of the numbers, how many tasks, and which."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    digits: int = Field(default=2, ge=1, le=9)
    size: int = Field(default=300, ge=1, le=100_000)
    seed: int = Field(default=0, ge=0)


class Carrying:
    """`size` different sums of two numbers below 10^digits; `where` is the key that messages name."""

    def __init__(self, options: Options, where: str) -> None:
        self.options, self.where = options, where

    def load(self) -> LoadedData:
        """The tasks, the same in every run with these options; ConfigError when fewer exist."""
        digits, size = self.options.digits, self.options.size
        possible = 100**digits - 55**digits  # 55 pairs of digits add up to at most 9
        if size > possible:
            what = f"{size} tasks requested, {possible} exist"
            fix = f"size <= {possible}, or more digits"
            raise ConfigError(Problem(where=f"{self.where}.size", what=what, fix=fix))
        stream = Seeds(self.options.seed).stream("{{ cookiecutter.name }}", digits)
        pairs: dict[tuple[int, int], None] = {}  # an ordered set
        while len(pairs) < size:
            left, right = (int(number) for number in stream.integers(10**digits, size=2))
            if carries(left, right):
                pairs[left, right] = None
        examples = tuple(_example(left, right) for left, right in pairs)
        return LoadedData(examples=examples, notes=(f"{{ cookiecutter.name }}: {size} of {possible} sums",))


def carries(left: int, right: int) -> int:
    """The number of carries in left + right: each one lowers the digit sum by 9."""
    return (_digit_sum(left) + _digit_sum(right) - _digit_sum(left + right)) // 9


def create(context: PluginContext) -> Carrying:
    """The source that `[data.options]` describes."""
    options = context.params if isinstance(context.params, Options) else Options()
    return Carrying(options, context.config.place("data.options"))


def _example(left: int, right: int) -> Example:
    return Example(
        id=f"{{ cookiecutter.name }}-{left}-{right}",  # equal for equal tasks: held-out splits rely on it
        prompt=f"What is {left} + {right}?",
        reference=str(left + right),
        task="{{ cookiecutter.name }}",
    )


def _digit_sum(number: int) -> int:
    return sum(map(int, str(number)))
{% if cookiecutter.form == "file" %}


PLUGIN = PluginSpec(
    name="{{ cookiecutter.name }}",
    summary="{{ cookiecutter.description }}",
    factory=create,
    params=Options,
)
{% endif %}
