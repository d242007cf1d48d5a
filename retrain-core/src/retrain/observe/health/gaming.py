"""Monitor `gaming`: reports what the `gaming_*` fields of a line say, which `observe/gaming` measures."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from retrain.observe.health.contract import Finding
from retrain.records.record_names import GENERATIONS

if TYPE_CHECKING:
    from retrain.kernel.contracts.context import PluginContext

MEANINGS = {
    "length_shift": "the mean length left its trend within a few steps (gaming_length_shift {:+.2f}, a logarithm)",
    "entropy_shift": "the entropy left its trend within a few steps (gaming_entropy_shift {:+.2f}, a logarithm)",
    "ngram_share": "most rewarded completions share words that others and early ones lack (gaming_ngram_share {:.2f})",
    "answer_shift": "answers come before the reasoning (earlier by {:.0%} of the text)",
    "prompt_answers": "rewarded answers repeat the prompt ({:.0%} more than at the start)",
    "format_credit": "credit goes to the commonest tokens ({:+.0%} against the start)",
}


def build(context: PluginContext) -> GamingMonitor:
    """The monitor; it has no keys."""
    return GamingMonitor()


class GamingMonitor:
    """Finds `gaming` while the alarm of the shadow is on, and `gaming_suspected` without a shadow's word.

    It has no state: the fields carry that of `observe/gaming`.
    """

    def observe(self, metrics: Mapping[str, Any]) -> list[Finding]:
        """The finding of the step, the alarm before a suspicion."""
        if metrics.get("gaming_since") is not None:
            return [Finding(state="gaming", message=_alarm(metrics))]
        if names := metrics.get("gaming_suspected"):
            return [Finding(state="gaming_suspected", message=_suspicion(metrics, str(names).split(", ")))]
        return []

    def state(self) -> dict[str, Any]:
        """Nothing."""
        return {}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Nothing."""


def _alarm(metrics: Mapping[str, Any]) -> str:
    share = metrics.get("gaming_unconfirmed")
    told = "" if share is None else f"{share:.0%} of what it pays now; "
    example = f"for example {metrics['gaming_example']}; " if metrics.get("gaming_example") else ""
    tokens = f"the credit is on {metrics['gaming_tokens']}; " if metrics.get("gaming_tokens") else ""
    cause = (
        f"since step {metrics['gaming_since']} the reward pays more than before for what its shadow does not confirm"
    )
    return f"{cause}: {told}{example}{tokens}fix: read gaming.jsonl, and mend [reward] where it pays for these"


def _suspicion(metrics: Mapping[str, Any], names: list[str]) -> str:
    told = [MEANINGS[name].format(metrics[f"gaming_{name}"]) for name in names if f"gaming_{name}" in metrics]
    ngram = f": {metrics['gaming_ngram']!r}" if metrics.get("gaming_ngram") else ""
    fix = f"fix: read some completions in {GENERATIONS}, or set [reward] shadow to a second verifier"
    return f"the reward may be gamed: {'; '.join(told) or ', '.join(names)}{ngram}; {fix}"
