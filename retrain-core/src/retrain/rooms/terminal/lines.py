"""The console lines of a run, and the watcher that logs them."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from retrain.kernel.hooks import hookimpl
from retrain.kernel.informative import GroupStatus, num_correct, verdicts
from retrain.kernel.types import Group
from retrain.rooms.credit.flow import build_flow
from retrain.rooms.credit.group_status import group_status
from retrain.rooms.tasks.scoring.build import has_verifier
from retrain.rooms.tasks.scoring.verdict import part_fields
from retrain.rooms.terminal.progress_lines import ProgressLines
from retrain.rooms.text.phase_progress import warm_up_left
from retrain.rooms.text.terminal_text import GROUP_LEVEL, OUTCOME_LEVEL, printable

if TYPE_CHECKING:
    from retrain.kernel.contracts.context import PluginContext
    from retrain.kernel.contracts.views import GroupsView, RunView

LOG = logging.getLogger("retrain")

ANSWER_CHARS = 40
QUANTILES = ("p10", "p50", "p90")
_CAUSES = {
    GroupStatus.ALL_RIGHT: "all correct",
    GroupStatus.ALL_WRONG: "all wrong",
    GroupStatus.NO_VERDICT: "no verdict",
    GroupStatus.SURPLUS: "surplus",
}
_OTHERS = {
    "all wrong": "all_wrong_groups",
    "all right": "all_right_groups",
    "all same": "tied_groups",
    "no verdict": "no_verdict_groups",
    "surplus": "surplus_groups",
}


class RunLines:
    """Logs a line per group, per step and per evaluation, and how the run ended."""

    def __init__(self, context: PluginContext) -> None:
        self._progress = ProgressLines(context)
        self._running_rate: float | None = None
        self._last_adapter: Path | None = None
        flow = build_flow(context.config, context.plugins)
        self._may_train_any = flow.advantage.compute_step is not None or not flow.needs_verdict
        self._has_verifier = has_verifier(context.config)

    @hookimpl
    def retrain_run_start(self) -> None:
        """Watch for long phases."""
        self._progress.start()

    @hookimpl
    def retrain_phase(self, step: int, phase: str) -> None:
        """Another phase begins."""
        self._progress.enter(step, phase)

    @hookimpl
    def retrain_groups_scored(self, groups: GroupsView) -> None:
        """A line per group, where anything judges them."""
        judged = groups.groups if self._has_verifier else ()
        for line in group_lines(judged, may_train_any=self._may_train_any):
            LOG.log(GROUP_LEVEL, "%s", line)

    @hookimpl
    def retrain_step_end(self, metrics: Mapping[str, Any]) -> None:
        """The step's line, and that of its evaluation."""
        if metrics["step"] >= 0:
            LOG.info("%s", step_line(metrics))
        elif "sft_loss" in metrics:
            LOG.info("%s", supervised_line(metrics))
        if "eval_correct_rate" in metrics:
            LOG.info("%s", evaluation(metrics))
        self._progress.last_line = time.monotonic()
        self._running_rate = metrics.get("running_correct_rate", self._running_rate)

    @hookimpl
    def retrain_checkpoint_saved(self, folder: Path) -> None:
        """Remember the last one; `retrain_run_end` shows it."""
        self._last_adapter = folder

    @hookimpl
    def retrain_run_end(self, run: RunView, error: BaseException | None) -> None:
        """The last lines of a run that reached its last step."""
        self._progress.end()
        if error is None:
            complete = training_complete(run.condition, run.config.training.max_steps, self._running_rate)
            LOG.log(OUTCOME_LEVEL, "%s", complete)
            what = "Adapter" if run.config.model.lora_rank else "Model"
            LOG.log(OUTCOME_LEVEL, "%s saved to %s", what, self._last_adapter)
            LOG.log(OUTCOME_LEVEL, "Metrics saved to %s", run.folder / "metrics.jsonl")
            devices = run.manifest.get("devices", {})
            if devices.get("why"):
                LOG.log(OUTCOME_LEVEL, "Trained on %s: %s", devices["used"], devices["why"])


def group_lines(groups: Sequence[Group], *, may_train_any: bool = False) -> list[str]:
    """A line per group, and below it why it has no information of its own, for which it is skipped.

    `may_train_any`: the advantage sees the whole step, or single tokens, and may give credit to such a group, too.
    """
    rows = []
    for group in groups:
        status = group_status(group)
        answer = printable(group.example.reference)
        shown = answer if len(answer) <= ANSWER_CHARS else answer[: ANSWER_CHARS - 3] + "..."
        rows.append(f"  group: {num_correct(group)}/{len(group.completions)} correct | answer={shown}")
        if status is GroupStatus.TIED:
            cause = f"all same, reward={verdicts(group)[0]}"
        elif status is not GroupStatus.INFORMATIVE:
            cause = _CAUSES[status]
        else:
            continue
        rows.append(f"    -> {cause}" if may_train_any else f"    -> skipped ({cause})")
    return rows


def step_line(metrics: Mapping[str, Any]) -> str:
    """`Step 0 [maxrl+gtpo_sepa] | loss=... | reward=... | correct=... | ...`"""
    step = metrics["step"]
    if "num_datums" not in metrics:  # sampling failed
        return f"Step {step} [{metrics['condition']}] | rejected: {metrics['rejected']}"
    if "rejected" in metrics:
        head = f"Step {step} [{metrics['condition']}] | rejected: {metrics['rejected']}"
    elif metrics["loss"] is None:
        head = f"Step {step} [{metrics['condition']}] | no informative datums, skipping"
    else:
        note = " (placeholder)" if metrics["loss_is_placeholder"] else ""
        head = f"Step {step} [{metrics['condition']}] | loss={metrics['loss']:.4f}{note}"
    parts = [
        head,
        *(
            [*reward_texts(metrics), f"correct={100 * metrics['correct_rate']:.1f}%"]
            if "correct_rate" in metrics
            else []
        ),
        *([f"teacher_kl={metrics['teacher_kl_mean']:.4f}"] if "teacher_kl_mean" in metrics else []),
        f"datums={metrics['num_datums']}",
        f"bs={metrics['batch_size']}",
        f"gs={metrics['group_size']}",
        f"useful={_useful(metrics)}",
        *([f"rounds={metrics['rounds']} ({dropped_text(metrics)})"] if "rounds" in metrics else []),
        *([f"sepa_l={metrics['sepa_lambda']:.4f}"] if "sepa_lambda" in metrics else []),
        f"time={metrics['step_time_s']:.1f}s",
    ]
    return " | ".join(parts)


def supervised_line(metrics: Mapping[str, Any]) -> str:
    """`SFT, 19 steps left | loss=1.2031 | tokens=512 | time=0.4s`"""
    loss = f"loss={metrics['sft_loss']:.4f}" if "rejected" not in metrics else f"rejected: {metrics['rejected']}"
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
    """The same, or nothing where the correct rate says it all: no quantile that is neither 0 nor 1, and no parts."""
    texts = reward_texts(metrics, prefix)
    return texts if len(texts) > 1 or "(" in texts[0] else []


def _useful(metrics: Mapping[str, Any]) -> str:
    """`11/16 (3 all wrong, 2 all right)`."""
    others = [f"{count} {status}" for status, field in _OTHERS.items() if (count := metrics.get(field, 0))]
    return f"{metrics['useful_groups']}/{metrics['batch_size']}" + (f" ({', '.join(others)})" if others else "")


def dropped_text(metrics: Mapping[str, Any]) -> str:
    """With `[training] refill`: how much of what a step sampled was not trained, `83% of 5,120 tokens dropped`."""
    sampled, dropped = metrics.get("sampled_tokens", 0), metrics.get("dropped_tokens", 0)
    return f"{100 * dropped / max(sampled, 1):.0f}% of {sampled:,} tokens dropped"


def evaluation(metrics: Mapping[str, Any]) -> str:
    """`Eval before training | correct=48.4% [42.1, 54.7] | pass@4=81.3% | 64 held-out examples x 4`"""
    when = "before training" if metrics["step"] < 0 else f"after step {metrics['step']}"
    largest = max(int(name.rsplit("_", 1)[1]) for name in metrics if name.startswith("eval_pass_at_"))
    low, high = 100 * metrics["eval_ci_low"], 100 * metrics["eval_ci_high"]
    passed = 100 * metrics[f"eval_pass_at_{largest}"]
    size = f"{metrics['eval_examples']} held-out examples x {metrics['eval_samples']}"
    rate = 100 * metrics["eval_correct_rate"]
    head, tail = f"correct={rate:.1f}% [{low:.1f}, {high:.1f}]", f"pass@{largest}={passed:.1f}%"
    return " | ".join([f"Eval {when}", head, *graded_texts(metrics, "eval_"), tail, size])


def training_complete(condition: str, steps: int, running_rate: float | None) -> str:
    """The first of the last three lines; without a rate where nothing was judged."""
    rate = "" if running_rate is None else f", running correct rate: {100 * running_rate:.1f}%"
    return f"Training complete. {condition}, {steps} steps{rate}"
