"""The run: draw prompts, sample, score, assign credit, train, record; then the same again."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from retrain.loop import lines
from retrain.loop.assemble import Parts
from retrain.loop.batch import Credited, assign
from retrain.loop.evaluate import eval_metrics
from retrain.loop.informative import Cause, num_correct
from retrain.loop.metrics import (
    execution_variance,
    group_metrics,
    length_metrics,
    reward_metrics,
    token_metrics,
    train_metrics,
)
from retrain.loop.rollout import sample_groups
from retrain.loop.scoring import score_groups
from retrain.loop.step_records import generation_records, merge_fields, step_summary, token_records
from retrain.loop.views import BatchView, GroupsView, RunView
from retrain.plugins.protocols import ControllerView
from retrain.records.folder import RunFolder
from retrain.seeding import Seeds
from retrain.types import Group, SamplingParams, TrainReport

LOG = logging.getLogger("retrain")
BEFORE_TRAINING = -1


@dataclass(slots=True)
class Progress:
    """What moves from step to step; all of it goes into `trainer_state.json`."""

    step: int = 0
    example_idx: int = 0
    total_correct: int = 0
    total_completions: int = 0


class Clock:
    """Seconds spent in a step and in each of its phases."""

    def __init__(self) -> None:
        self.started = time.perf_counter()
        self.phase_s = dict.fromkeys(("sample", "score", "train"), 0.0)

    @contextmanager
    def timed(self, phase: str) -> Iterator[None]:
        """Add the time of the block to a phase."""
        started = time.perf_counter()
        try:
            yield
        finally:
            self.phase_s[phase] += time.perf_counter() - started

    def fields(self) -> dict[str, float]:
        """Timing fields of the metrics line."""
        phases = {f"{phase}_time_s": seconds for phase, seconds in self.phase_s.items()}
        return {"step_time_s": time.perf_counter() - self.started, **phases}


class Trainer:
    """One run from its first step to its last; `run` reads straight down."""

    def __init__(self, parts: Parts, folder: RunFolder) -> None:
        self.parts = parts
        self.folder = folder
        self.progress = Progress()
        self.config = parts.config
        self.notify = parts.plugins.notify
        training = parts.config.training
        self.sampling = SamplingParams(
            max_tokens=training.max_tokens,
            temperature=training.temperature,
            entropy=parts.backend.capabilities.provides_entropy,
        )
        self.view = RunView(
            config=parts.config,
            condition=parts.flow.condition,
            folder=folder.path,
            seed=parts.seeds.root,
            first_step=0,
            backend=parts.backend,
        )

    def run(self) -> None:
        """Train to the last step; records and the last adapter are on disk when it returns."""
        max_steps = self.config.training.max_steps
        self.notify("retrain_run_start", run=self.view)
        error: BaseException | None = None
        try:
            if self.progress.step == 0 and self._evaluates():
                before = self._evaluate(BEFORE_TRAINING)
                self.folder.write_metrics(before)
                self._announce(before)
                LOG.info("%s", lines.evaluation(before))
            while self.progress.step < max_steps:
                self.step(self.progress.step)
                self.progress.step += 1
                if self._is_due(self.config.training.save_every) and self.progress.step < max_steps:
                    self._save(f"checkpoint_step_{self.progress.step}")
            adapter = self._save("final")
            LOG.info("%s", lines.training_complete(self.parts.flow.condition, max_steps, self._running_rate()))
            LOG.info("Adapter saved to %s", adapter)
            LOG.info("Metrics saved to %s", self.folder.path / "metrics.jsonl")
        except BaseException as caught:
            error = caught
            raise
        finally:
            self.notify("retrain_run_end", run=self.view, error=error)
            for recorder in self.parts.recorders:
                recorder.finish()

    def step(self, step: int) -> None:
        """One optimizer step, or a step without one when no group can teach anything."""
        parts, config, clock = self.parts, self.config, Clock()
        self.notify("retrain_step_start", run=self.view, step=step)
        sepa_lambda = parts.controller.value(step) if parts.controller else 0.0

        prompts = parts.pool.draw(self.progress.example_idx, config.training.batch_size)
        groups = self._sample_and_score(step, prompts, clock)
        credited = assign(
            groups,
            parts.flow,
            parts.detector,
            step=step,
            sepa_lambda=sepa_lambda,
            temperature=config.training.temperature,
        )
        report = self._train(step, credited, clock)

        self._count(groups)
        metrics = self._metrics(step, groups, credited, report, sepa_lambda)
        self._observe(step, metrics["correct_rate"], credited)
        metrics |= clock.fields()
        if self._evaluates() and self._is_last_or_due(step):
            metrics |= self._evaluate(step)
        trained = [report is not None and cause is Cause.INFORMATIVE for cause in credited.causes]
        generations = generation_records(step, prompts, groups, credited, trained, parts.tokenizer)
        tokens = token_records(groups, credited, has_detector=parts.detector is not None)
        self.folder.write_step(metrics, step_summary(metrics, groups), generations, tokens)
        self._announce(metrics)
        for line in lines.group_lines(groups, credited.causes):
            LOG.log(lines.GROUP_LEVEL, "%s", line)
        LOG.info("%s", lines.step_line(metrics))
        if "eval_correct_rate" in metrics:
            LOG.info("%s", lines.evaluation(metrics))

    def _sample_and_score(self, step: int, prompts: list[Any], clock: Clock) -> tuple[Group, ...]:
        parts = self.parts
        self.notify("retrain_phase", run=self.view, step=step, phase="sampling")
        with clock.timed("sample"):
            completions = sample_groups(
                parts.backend,
                prompts,
                group_size=self.config.training.group_size,
                params=self.sampling,
                seeds=parts.seeds,
                purpose="sample",
                tokenizer=parts.tokenizer,
            )
        self.notify("retrain_phase", run=self.view, step=step, phase="scoring")
        with clock.timed("score"):
            examples = [prompt.example for prompt in prompts]
            scores = score_groups(parts.reward, examples, completions)
        groups = tuple(
            Group(example=example, completions=group, scores=judged)
            for example, group, judged in zip(examples, completions, scores, strict=True)
        )
        self.notify("retrain_groups_scored", run=self.view, groups=GroupsView(step=step, groups=groups))
        return groups

    def _train(self, step: int, credited: Credited, clock: Clock) -> TrainReport | None:
        if not credited.batch.rows:
            return None
        self.notify("retrain_phase", run=self.view, step=step, phase="training")
        self.notify("retrain_batch_ready", run=self.view, batch=BatchView(step=step, batch=credited.batch))
        with clock.timed("train"):
            report = self.parts.backend.train(credited.batch)
            self.parts.backend.publish()
        return report

    def _evaluate(self, step: int) -> dict[str, Any]:
        """Held-out correct rate and pass@k with the policy as it is; the same random streams every time."""
        parts, config = self.parts, self.config
        self.notify("retrain_phase", run=self.view, step=step, phase="eval")
        started = time.perf_counter()
        completions = sample_groups(
            parts.backend,
            parts.pool.held_out,
            group_size=config.eval.samples,
            params=self.sampling,
            seeds=Seeds(config.eval.seed),
            purpose="eval",
            tokenizer=parts.tokenizer,
        )
        scores = score_groups(parts.reward, [prompt.example for prompt in parts.pool.held_out], completions)
        return {"step": step, **eval_metrics(scores), "eval_time_s": time.perf_counter() - started}

    def _metrics(
        self, step: int, groups: tuple[Group, ...], credited: Credited, report: TrainReport | None, sepa_lambda: float
    ) -> dict[str, Any]:
        flow, capabilities, training = self.parts.flow, self.parts.backend.capabilities, self.config.training
        metrics: dict[str, Any] = {
            "step": step,
            "algorithm_mode": self.config.algorithm.algorithm_mode,
            "advantage_mode": flow.advantage.name,
            "transform_mode": flow.transform.name,
            "uncertainty_kind": flow.uncertainty.name,
            "condition": flow.condition,
            "backend_reports_sync_loss": capabilities.reports_sync_loss,
            "backend_preserves_token_advantages": capabilities.preserves_token_advantages,
            **train_metrics(report),
            **reward_metrics(groups),
            "running_correct_rate": self._running_rate(),
            **group_metrics(credited.causes),
            "sepa_lambda": sepa_lambda,
            "num_datums": len(credited.batch.rows) if report else 0,
            **length_metrics(groups),
            **token_metrics(credited, flow.uncertainty.name),
            "batch_size": training.batch_size,
            "group_size": training.group_size,
        }
        if self.parts.controller:
            metrics = merge_fields(metrics, self.parts.controller.metrics(), source=f"controller {flow.controller!r}")
        metrics = merge_fields(metrics, credited.result.metrics, source=flow.condition)
        view = GroupsView(step=step, groups=groups)
        for extra in self.notify("retrain_extra_metrics", run=self.view, groups=view):
            metrics = merge_fields(metrics, extra or {}, source="a plugin")
        return metrics

    def _observe(self, step: int, correct_rate: float, credited: Credited) -> None:
        if self.parts.controller:
            variance = execution_variance(credited)
            view = ControllerView(step=step, correct_rate=correct_rate, execution_variance=variance)
            self.parts.controller.observe(view)

    def _announce(self, metrics: Mapping[str, Any]) -> None:
        for recorder in self.parts.recorders:
            recorder.step(metrics)
        self.notify("retrain_step_end", run=self.view, metrics=metrics)

    def _save(self, name: str) -> Path:
        path = self.folder.save_adapter(name, self.parts.backend.save_adapter)
        progress, training = self.progress, self.config.training
        controller = self.parts.controller
        self.folder.write_state(
            {
                "step": progress.step - 1,
                "example_idx": progress.example_idx,
                "total_correct": progress.total_correct,
                "total_completions": progress.total_completions,
                "current_batch_size": training.batch_size,
                "current_group_size": training.group_size,
                "checkpoint_name": name,
                "sepa": dict(controller.state()) if controller else {},
            }
        )
        return path

    def _count(self, groups: tuple[Group, ...]) -> None:
        self.progress.example_idx += len(groups)
        self.progress.total_correct += sum(num_correct(group) for group in groups)
        self.progress.total_completions += sum(len(group.completions) for group in groups)

    def _running_rate(self) -> float:
        return self.progress.total_correct / max(self.progress.total_completions, 1)

    def _evaluates(self) -> bool:
        return bool(self.parts.pool.held_out)

    def _is_due(self, every: int) -> bool:
        return every > 0 and self.progress.step % every == 0

    def _is_last_or_due(self, step: int) -> bool:
        every = self.config.eval.every
        return step + 1 == self.config.training.max_steps or (every > 0 and (step + 1) % every == 0)
