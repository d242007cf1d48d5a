"""The `arithmetic` source: the home task of the built-in tiny model, made on the spot."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from retrain.api import LoadedData, PluginContext, Seeds, Table, key
from retrain_rewards.faults import refused
from retrain_rewards.sources.collector import Collector, refuse_foreign_keys, split_text

QUESTION = "What is {left} {sign} {right}?"  # the wording that the tiny model was taught
VALUE = {"+": operator.add, "-": operator.sub, "*": operator.mul}
MAX_DIGITS = 6
Operations = Annotated[list[Literal["+", "-", "*"]], BeforeValidator(split_text), Field(min_length=1)]


class ArithmeticOptions(Table):
    """`[data.options]` of `arithmetic`."""

    size: int = key(4000, "Distinct problems.", ge=1)
    seed: int = key(0, "Seed of the choice of problems, independent of the run's.", ge=0)
    operations: Operations = key(["+", "-", "*"], "Operations, in equal shares.")
    digits: int = key(2, "Digits at most; a product has one digit times exactly so many.", ge=1, le=MAX_DIGITS)
    operands: list[int] = key([], "Smallest and largest operand, instead of digits: [2, 12].")

    @model_validator(mode="after")
    def _is_a_range(self) -> Self:
        if self.operands and "digits" in self.model_fields_set:
            raise ValueError("digits and operands exclude each other: remove one of the two")
        bounds, limit = self.operands, 10**MAX_DIGITS
        if bounds and not (len(bounds) == 2 and 0 <= bounds[0] <= bounds[1] < limit):
            raise ValueError(f"operands = {bounds}: give the smallest and the largest, from 0 to {limit - 1}")
        return self


class Arithmetic:
    """`size` distinct problems, in an order that depends only on the options.

    Operands of `+` and `-` run over [0, 10^digits), so differences may be negative; a product has one factor in [1, 9]
    and one of exactly `digits` digits, in either order. With `operands` all three run over that range.
    """

    def __init__(self, context: PluginContext) -> None:
        refuse_foreign_keys(context, "arithmetic", ("path", "prompt_key", "answer_key"))
        self.options: Any = context.params
        self.where = context.config.place("data.options")

    def load(self) -> LoadedData:
        options = self.options
        counts = {sign: count_pairs(sign, options.digits, options.operands) for sign in options.operations}
        possible = sum(counts.values())
        if possible < options.size:
            what = f"{options.size} distinct problems wanted, but only {possible} exist"
            fix = f"set size to {possible} or less, or allow more digits or operations"
            raise refused(f"{self.where}.size", code="data.size-too-large", what=what, fix=fix)
        collector = Collector(source="arithmetic")
        for sign, index in _draw(shares(options.size, counts), counts, options):
            left, right = pair(sign, index, options.digits, options.operands)
            question = QUESTION.format(left=left, sign=sign, right=right)
            collector.add(question, str(VALUE[sign](left, right)), place=question, task="arithmetic")
        return collector.finish(where=self.where, read_from=f"seed {options.seed}")


def count_pairs(sign: str, digits: int, operands: Sequence[int] = ()) -> int:
    if operands:
        return (1 + operands[1] - operands[0]) ** 2
    if sign != "*":
        return int(10 ** (2 * digits))
    # Factors [1, 9] x [1, 9]; with more digits the short factor may be on either side, hence 2 x.
    return 81 if digits == 1 else 2 * 9 * 9 * int(10 ** (digits - 1))


def pair(sign: str, index: int, digits: int, operands: Sequence[int] = ()) -> tuple[int, int]:
    if operands:
        left, right = divmod(index, 1 + operands[1] - operands[0])
        return operands[0] + left, operands[0] + right
    if sign != "*":
        return divmod(index, int(10**digits))
    index, swapped = divmod(index, 2) if digits > 1 else (index, 0)
    # Bounds of the factor with exactly so many digits; the other one is in [1, 9].
    smallest = int(10 ** (digits - 1))
    one, other = divmod(index, 9 * smallest)
    return (smallest + other, 1 + one) if swapped else (1 + one, smallest + other)


def shares(size: int, counts: dict[str, int]) -> dict[str, int]:
    """Return equal parts of `size` <= sum of counts; operations with too few problems leave the rest to others."""
    taken: dict[str, int] = {}
    # The scarcest first, so that the others can share the rest.
    for sign in sorted(counts, key=counts.__getitem__):
        taken[sign] = min(counts[sign], (size - sum(taken.values())) // (len(counts) - len(taken)))
    return {sign: taken[sign] for sign in counts}


def _draw(wanted: dict[str, int], counts: dict[str, int], options: ArithmeticOptions) -> Iterator[tuple[str, int]]:
    seeds = Seeds(options.seed)
    drawn = {
        sign: seeds.stream("arithmetic", sign, *(options.operands or [options.digits])).choice(
            counts[sign], share, replace=False
        )
        for sign, share in wanted.items()
    }
    for turn in range(max(wanted.values())):
        yield from ((sign, int(indices[turn])) for sign, indices in drawn.items() if turn < len(indices))
