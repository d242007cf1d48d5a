"""The run: draw prompts, sample, score, assign credit, train, record; then the same again."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from retrain.kernel import terminal_text
from retrain.kernel.contracts.algorithm import ControllerView
from retrain.kernel.contracts.tasks import Prompt, Streams
from retrain.kernel.contracts.views import BatchView, GroupsView, RunView
from retrain.kernel.errors import BackendError, NonFiniteError, OutOfMemoryError, Problem
from retrain.kernel.evaluate import eval_metrics, measured_by
from retrain.kernel.informative import GroupStatus
from retrain.kernel.overlap import Ahead, Draw, Scored
from retrain.kernel.pace import Pace
from retrain.kernel.progress import Clock, Progress
from retrain.kernel.seeding import Seeds
from retrain.kernel.types import Group, TrainReport
from retrain.rooms.credit.batch import Credited, assign
from retrain.rooms.metrics.metrics import execution_variance
from retrain.rooms.metrics.step_metrics import step_head, step_metrics
from retrain.rooms.metrics.step_records import generation_records, merge_fields, step_summary, token_records
from retrain.rooms.session.assemble import Parts
from retrain.rooms.session.interrupts import Interrupts, StopRequested
from retrain.rooms.session.records.folder import RunFolder
from retrain.rooms.session.savepoint import save_run
from retrain.rooms.terminal import lines

LOG = logging.getLogger("retrain")
BEFORE_TRAINING = -1
FAILURES = "failures"  # folder of the texts whose scoring failed


class Trainer:
    """One run, from `progress.step` to its last step; `run` and `step` read straight down.

    A stop that is asked for is raised inside sampling, scoring, training or evaluation. At each of these places the
    policy is either that of `progress.step` or that of its unfinished step, so a checkpoint can be written at once.
    """

    def __init__(self, parts: Parts, folder: RunFolder, interrupts: Interrupts, progress: Progress) -> None:
        self.parts = parts
        self.folder = folder
        self.interrupts = interrupts
        self.progress = progress
        self.config = parts.config
        self.notify = parts.plugins.notify
        self.last_metrics: Mapping[str, Any] = {}
        self.pace = Pace(parts.pacer, parts.config.training)
        self.ahead = Ahead(parts.backend, interrupts)
        self.view = RunView(
            config=parts.config,
            condition=parts.flow.condition,
            folder=folder.path,
            seed=parts.seeds.root,
            first_step=progress.step,
            capabilities=parts.backend.capabilities,
        )

    def run(self) -> None:
        """Train to the last step; records and the last checkpoint are on disk when it returns."""
        self.notify("retrain_run_start", run=self.view)
        error: BaseException | None = None
        try:
            self._steps()
            adapter = self._save("final")
            max_steps, rate = self.config.training.max_steps, self.progress.running_rate()
            LOG.log(terminal_text.OUTCOME_LEVEL, "%s", lines.training_complete(self.view.condition, max_steps, rate))
            LOG.log(terminal_text.OUTCOME_LEVEL, "Adapter saved to %s", adapter)
            LOG.log(terminal_text.OUTCOME_LEVEL, "Metrics saved to %s", self.folder.path / "metrics.jsonl")
        except StopRequested as caught:
            error = caught
            self.interrupts.settle()
            self._save(self._name())
            raise
        except BaseException as caught:
            error = caught
            raise
        finally:
            self.ahead.close()
            self.notify("retrain_run_end", run=self.view, error=error)

    def _steps(self) -> None:
        if self.ahead.is_on:
            self._catch_up()
        if self.progress.unfinished is not None:
            self.finish_step(self.progress.unfinished)
        elif self.progress.step == 0 and self.parts.pool.held_out and not self.progress.has_first_eval:
            before = self._evaluate(BEFORE_TRAINING)
            with self.interrupts.shield():
                self.folder.write_metrics(before)
                self.progress.has_first_eval = True
                self._announce(before)
            LOG.info("%s", lines.evaluation(before))
        while self.progress.step < self.config.training.max_steps:
            batch_size = self.ahead.size or self.pace.batch_size(self.progress.step)
            try:
                self.step(self.progress.step, batch_size)
            except OutOfMemoryError:
                is_done = self.progress.unfinished is not None  # what failed is its evaluation
                if is_done or not self.pace.backs_off(self.progress.step, batch_size):
                    raise
                self.ahead.forget()
                self.progress.is_ahead = False

    def _catch_up(self) -> None:
        """Draw again what a resumed run had drawn ahead, with the policy of then; publish the one of now."""
        step = self.progress.step + (self.progress.unfinished is not None)
        if self.progress.is_ahead and (draw := self._draw_of(step, self.progress.example_idx, Clock())):
            self.ahead.draw(draw)
        self.ahead.publish()

    def step(self, step: int, batch_size: int) -> None:
        """One optimizer step, or a step without one when no group can teach anything."""
        parts, training, clock = self.parts, self.config.training, Clock()
        self.notify("retrain_step_start", run=self.view, step=step)
        sepa_lambda = parts.controller.value(step) if parts.controller else 0.0

        prompts = parts.pool.draw(self.progress.example_idx, batch_size)
        try:
            groups, fields = self.ahead.take() or self._sample_and_score(step, prompts, clock)
        except NonFiniteError as error:
            self._reject_sampling(step, prompts, clock, error)
            return
        seen = GroupsView(step=step, groups=groups)
        self.notify("retrain_groups_scored", run=self.view, groups=seen)
        staleness = self.ahead.staleness(groups)
        credited = assign(
            groups, parts.flow, parts.detector, step=step, sepa_lambda=sepa_lambda, temperature=training.temperature
        )
        with self.interrupts.shield():
            report, reason = self._train(step, credited, clock, len(prompts))
            self.progress.count(groups)
            self.progress.example_idx += len(prompts)
            self.progress.is_ahead = self.ahead.is_on and report is not None
            metrics = step_metrics(
                parts,
                step,
                groups,
                credited,
                report,
                sepa_lambda=sepa_lambda,
                running_rate=self.progress.running_rate(),
                extras=lambda: self.notify("retrain_extra_metrics", run=self.view, groups=seen),
            )
            self._observe(step, metrics["correct_rate"], credited)
            metrics = merge_fields(metrics, fields, source="scoring") | staleness
            metrics |= clock.fields(halves=self.ahead.is_on) | ({"rejected": reason} if reason else {})
            metrics = self.pace.observed(metrics, batch_size, has_trained=report is not None)
            self._write_completions(step, prompts, groups, credited, report, metrics)
            self.progress.unfinished = metrics
        for line in lines.group_lines(groups, credited.statuses):
            LOG.log(terminal_text.GROUP_LEVEL, "%s", line)
        self.finish_step(metrics)

    def finish_step(self, metrics: dict[str, Any]) -> None:
        """Evaluate if it is time, write the step's line, save if it is time, and go on to the next step."""
        step = int(metrics["step"])
        if self.parts.pool.held_out and self._evaluates_after(step):
            metrics = metrics | self._evaluate(step)
        with self.interrupts.shield():
            self.notify("retrain_phase", run=self.view, step=step, phase="recording")
            metrics = metrics | self.parts.health.observe(metrics)
            self.folder.write_metrics(metrics)
            self.progress.unfinished = None
            self.progress.step = step + 1
            self.last_metrics = metrics
            self._announce(metrics)
            LOG.info("%s", lines.step_line(metrics))
            if "eval_correct_rate" in metrics:
                LOG.info("%s", lines.evaluation(metrics))
            self._count_rejection(metrics)
            every, is_last = self.config.training.save_every, self.progress.step == self.config.training.max_steps
            if (every and self.progress.step % every == 0 and not is_last) or self.parts.health.ends_the_run:
                self._save(self._name())
            self.parts.health.refuse_to_go_on(step)

    def _sample_and_score(self, step: int, prompts: list[Prompt], clock: Clock) -> Scored:
        """The step's scored groups, and what scoring has to say about itself."""
        parts = self.parts
        self.ahead.measure_anew()
        self.notify("retrain_phase", run=self.view, step=step, phase="sampling")
        with parts.rollouts.batch(f"step_{step:06d}", self.folder.path / FAILURES) as draw:
            with clock.timed("sample"):
                streams = Streams(seeds=parts.seeds, purpose="sample")
                completions = draw.sample(prompts, self.config.training.group_size, streams)
            self.notify("retrain_phase", run=self.view, step=step, phase="scoring")
            with clock.timed("score"):
                scores = draw.scores()
            fields = self.ahead.measured(draw.metrics())
        groups = tuple(
            Group(example=prompt.example, completions=group, scores=judged)
            for prompt, group, judged in zip(prompts, completions, scores, strict=True)
        )
        return groups, fields

    def _draw_of(self, step: int, cursor: int, clock: Clock) -> Draw | None:
        """How to draw a coming step from position `cursor` of the prompts on; None when there is no such step."""
        if step >= self.config.training.max_steps or not self.ahead.is_on:
            return None
        prompts = self.parts.pool.draw(cursor, self.pace.batch_size(step))
        return Draw(size=len(prompts), work=partial(self._sample_while_training, step, prompts, clock))

    def _sample_while_training(self, step: int, prompts: list[Prompt], clock: Clock) -> Scored:
        try:
            return self._sample_and_score(step, prompts, clock)
        finally:
            self.notify("retrain_phase", run=self.view, step=step - 1, phase="training")  # what is waited for now

    def _train(self, step: int, credited: Credited, clock: Clock, size: int) -> tuple[TrainReport | None, str]:
        """The backend's report and "", or no report and why the step was rejected ("" when there was nothing to do)."""
        if not credited.batch.rows:
            return None, ""
        self.notify("retrain_phase", run=self.view, step=step, phase="training")
        self.notify("retrain_batch_ready", run=self.view, batch=BatchView(step=step, batch=credited.batch))
        coming = self._draw_of(step + 1, self.progress.example_idx + size, clock)  # what can be done meanwhile
        try:
            report = self.ahead.train(partial(clock.timed("train")(self.parts.backend.train), credited.batch), coming)
        except NonFiniteError as error:
            return None, error.problems[0].what
        with clock.timed("train"):
            self.ahead.publish()
        return report, ""

    def _evaluate(self, step: int) -> dict[str, Any]:
        """Held-out correct rate and pass@k with the policy as it is; the same random streams every time."""
        self.notify("retrain_phase", run=self.view, step=step, phase="eval")
        started = time.perf_counter()
        table, measured = self.config.eval, measured_by(self.parts.backend)
        with self.parts.rollouts.batch(f"eval_{step + 1:06d}", self.folder.path / FAILURES) as draw:
            draw.sample(self.parts.pool.held_out, table.samples, Streams(seeds=Seeds(table.seed), purpose="eval"))
            scores = draw.scores()
        measured_by(self.parts.backend)  # about this evaluation: belongs to no step
        return {"step": step, **measured, **eval_metrics(scores), "eval_time_s": time.perf_counter() - started}

    def _write_completions(
        self,
        step: int,
        prompts: Sequence[Prompt],
        groups: tuple[Group, ...],
        credited: Credited,
        report: TrainReport | None,
        metrics: Mapping[str, Any],
    ) -> None:
        self.notify("retrain_phase", run=self.view, step=step, phase="recording")
        trained = [report is not None and status is GroupStatus.INFORMATIVE for status in credited.statuses]
        generations = generation_records(step, prompts, groups, credited, trained, self.parts.tokenizer)
        tokens = token_records(groups, credited, has_detector=self.parts.detector is not None)
        self.folder.write_completions(step, step_summary(metrics, groups), generations, tokens)

    def _reject_sampling(self, step: int, prompts: list[Prompt], clock: Clock, error: NonFiniteError) -> None:
        """A step whose completions could not be drawn: its prompts are passed over, its line says why."""
        reason = {"loss": None, "rejected": error.problems[0].what}
        with self.interrupts.shield():
            self.progress.example_idx += len(prompts)
            self.progress.is_ahead = False
            metrics = {**step_head(self.parts, step), **reason, **clock.fields()}
            metrics = self.pace.observed(metrics, len(prompts), has_trained=False)
            self.progress.unfinished = metrics
        self.finish_step(metrics)

    def _count_rejection(self, metrics: Mapping[str, Any]) -> None:
        self.progress.bad_steps_in_a_row = self.progress.bad_steps_in_a_row + 1 if "rejected" in metrics else 0
        limit = self.config.training.max_bad_steps
        if limit and self.progress.bad_steps_in_a_row >= limit:
            self._save(self._name())
            what = f"{limit} steps in a row were rejected; the last: {metrics['rejected']}"
            fix = "lower [training] lr, or set [optimizer] grad_clip_norm; earlier checkpoints are as they were"
            raise BackendError(Problem(where=f"step {metrics['step']}", what=what, fix=fix))

    def _observe(self, step: int, correct_rate: float, credited: Credited) -> None:
        if self.parts.controller:
            variance = execution_variance(credited)
            view = ControllerView(step=step, correct_rate=correct_rate, execution_variance=variance)
            self.parts.controller.observe(view)

    def _announce(self, metrics: Mapping[str, Any]) -> None:
        self.parts.recorders.step(metrics)
        self.notify("retrain_step_end", run=self.view, metrics=metrics)

    def _save(self, name: str) -> Path:
        with self.interrupts.shield():
            self.notify("retrain_phase", run=self.view, step=self.progress.step, phase="checkpoint")
            path = save_run(name, self.parts, self.folder, self.progress, self.view, self.last_metrics)
            self.interrupts.may_resume()
            return path

    def _name(self) -> str:
        """Name of a checkpoint of the policy as it is: by the number of steps that are in it."""
        return f"checkpoint_step_{self.progress.step + (self.progress.unfinished is not None)}"

    def _evaluates_after(self, step: int) -> bool:
        every = self.config.eval.every
        return step + 1 == self.config.training.max_steps or (every > 0 and (step + 1) % every == 0)
