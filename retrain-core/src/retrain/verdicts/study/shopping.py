"""How often, and in how many ways, the same runs were looked at, and where the plan was registered."""

from __future__ import annotations

from dataclasses import dataclass

from retrain.verdicts.ledger.looks import Looks


@dataclass(frozen=True, slots=True, kw_only=True)
class Shopping:
    """Every look on record at these runs, this one included; `registered_in` is the file of the plan, empty without.

    The same choices on the same records are one look. The chance of a false verdict is that of one planned look only.
    """

    looks: Looks
    registered_in: str = ""


def shopping_sentence(shopping: Shopping | None) -> str:
    """`3 looks, at 2 metrics, with 3 choices of ...`; nothing without a ledger."""
    if shopping is None:
        return ""
    looks, metrics, choices = len(shopping.looks.looks), len(shopping.looks.metrics), shopping.looks.num_choices
    parts = [_counted(looks, "look")]
    parts += [f"at {metrics} metrics"] if metrics > 1 else []
    parts += [f"with {choices} choices of metric, side, alpha, baseline and budget"] if choices > metrics else []
    plan = f"; plan registered in {shopping.registered_in}" if shopping.registered_in else ""
    return ", ".join(parts) + plan


def _counted(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"
