"""One step, from top to bottom: draw prompts, sample, score, assign credit, train, record."""

from __future__ import annotations

from functools import partial

from retrain.kernel.contracts.algorithm import Credit
from retrain.kernel.contracts.tasks import Streams
from retrain.kernel.contracts.views import GroupsView, PaceView
from retrain.kernel.errors import NonFiniteError, PluginError, Problem
from retrain.kernel.parts import Planned, Run, Sampled
from retrain.kernel.progress import Clock, Fields, merge_fields, train_fields
from retrain.kernel.types import Group, TrainBatch, TrainReport

FAILURES = "failures"  # folder for the texts whose scoring failed


class Step:
    """Advances a run by one optimizer step.

    A stop is raised only during sampling, scoring or training. The policy is then the one after
    `progress.step` or its unfinished step, so a checkpoint can be written at once.
    """

    def __init__(self, run: Run) -> None:
        self.run = run
        self.overlap = run.parts.overlap(run, run.parts.select(self.sample_and_score))

    def take(self, step: int, batch_size: int) -> Fields:
        """Run one step over `batch_size` prompts and return its line; without informative groups nothing is trained."""
        run, parts, progress, clock = self.run, self.run.parts, self.run.progress, Clock()
        planned = Planned(step=step, cursor=progress.example_idx, batch_size=batch_size)
        sampled = self.overlap.collect(planned, clock)
        if sampled.error:
            return self._reject(planned, sampled, clock, sampled.error)
        # Before training, because publishing moves the version that staleness is counted from.
        groups, staleness = sampled.groups, self.overlap.staleness(sampled.groups)
        shaped, shaping = groups, Fields()
        for shaper in parts.shapers:
            shaped, added = shaper.shape(step, shaped)
            shaping = merge_fields(shaping, added, source=str(shaper))
        credit = parts.algorithm.assign(step, shaped)
        batch = TrainBatch(
            step=step,
            rows=credit.rows,
            temperature=parts.config.training.temperature,
            num_masked=credit.num_masked,
            masked_groups=credit.masked_groups,
        )
        view = GroupsView(step=step, groups=groups, batch=batch if credit.rows else None)
        run.notify("retrain_groups_scored", groups=view)
        with run.stops.shield():
            report, rejected = self._train(view.batch, clock, progress.example_idx + len(sampled.prompts))
            if getattr(parts.rollouts, "has_verifier", True):
                # Prompts of later rounds are drawn because the first ones taught nothing; that would bias a rate.
                progress.count([group for group in groups if not group.round])
            progress.example_idx += len(sampled.prompts)
            line = merge_fields(self._line(planned, sampled, credit, report), shaping, source="a shaper")
            facts = {"groups": view, "credit": credit, "report": report, "evaluation": None}
            for extra in run.notify("retrain_extra_metrics", **facts):
                line = merge_fields(line, extra or {}, source="a plugin")
            parts.algorithm.observe(step, shaped, credit)
            line |= staleness | self.overlap.finish(clock, has_trained=report is not None)
            line |= {"rejected": rejected} if rejected else {}
            line = self._pace(line, batch_size, has_trained=report is not None)
            run.enter(step, "recording")
            is_trained = report is not None
            run.records.write_completions(step, sampled.prompts, shaped, credit, is_trained=is_trained, metrics=line)
            # Last: with it, a checkpoint counts the step as trained, and a resume only evaluates and writes the line.
            progress.unfinished = line
        return line

    def sample_and_score(self, planned: Planned, clock: Clock) -> Sampled:
        """Sample and score a group of completions for every prompt; the two overlap where the backend allows it."""
        run, group_size = self.run, self.run.parts.config.training.group_size
        prompts = run.parts.prompts.draw(planned.cursor, planned.batch_size, planned.step)
        enter = run.enter if planned.is_announced else lambda step, phase: None
        enter(planned.step, "sampling")
        try:
            with run.parts.rollouts.batch(planned.label, run.records.path / FAILURES) as batch:
                with clock.timed("sample"):
                    completions_PG = batch.sample(prompts, group_size, Streams(seeds=run.parts.seeds, purpose="sample"))
                enter(planned.step, "scoring")
                with clock.timed("score"):
                    scores_PG = batch.scores()
                metrics = batch.metrics()
        except NonFiniteError as error:
            return Sampled(prompts=prompts, error=error)
        above = run.parts.config.scoring.correct_above
        groups = tuple(
            Group(example=prompt.example, completions=all_G, scores=scores_G, correct_above=above, round=planned.round)
            for prompt, all_G, scores_G in zip(prompts, completions_PG, scores_PG, strict=True)
        )
        return Sampled(prompts=prompts, groups=groups, metrics=metrics)

    def upcoming(self, step: int, cursor: int) -> Planned | None:
        """Return the plan of a step whose prompts begin at position `cursor`; None past the last step."""
        if step >= self.run.parts.config.training.max_steps:
            return None
        return Planned(step=step, cursor=cursor, batch_size=self.batch_size(step))

    def batch_size(self, step: int) -> int:
        """Prompts of a step: the number sampled already, otherwise the pacer's choice; PluginError when that is < 1."""
        size = self.overlap.batch_size or self.run.parts.pacer.batch_size(step)
        if size < 1:
            what = f"the pacer requested {size} prompts at step {step}"
            raise PluginError(Problem(code="plugin.bad-batch-size", what=what, fix="return at least 1"))
        return size

    def backs_off(self, step: int, batch_size: int) -> bool:
        """True if a step that ran out of memory, and changed nothing, can be retried with fewer prompts."""
        pacer, group_size = self.run.parts.pacer, self.run.parts.config.training.group_size
        pacer.observe(PaceView(step=step, batch_size=batch_size, group_size=group_size, out_of_memory=True))
        # Samples taken in advance have the old batch size.
        self.overlap.drop()
        return self.batch_size(step) < batch_size

    def _train(self, batch: TrainBatch | None, clock: Clock, cursor: int) -> tuple[TrainReport | None, str]:
        """Return the report and "", or None and the reason; the prompts of the next step begin at `cursor`."""
        if batch is None:
            return None, ""
        self.run.enter(batch.step, "training")
        try:
            report = self.overlap.train(batch, clock, partial(self.upcoming, batch.step + 1, cursor))
            return report, report.rejected
        except NonFiniteError as error:
            return None, error.problems[0].what

    def _line(self, planned: Planned, sampled: Sampled, credit: Credit, report: TrainReport | None) -> Fields:
        parts, capabilities = self.run.parts, self.run.parts.backend.capabilities
        line: Fields = {
            "step": planned.step,
            **parts.algorithm.labels,
            "backend_reports_sync_loss": capabilities.reports_sync_loss,
            "backend_preserves_token_advantages": capabilities.preserves_token_advantages,
            **train_fields(report),
            **self.run.progress.rate_fields(),
            "num_datums": len(credit.rows) if report else 0,
            "batch_size": planned.batch_size,
            "group_size": parts.config.training.group_size,
        }
        line = merge_fields(line, credit.metrics, source=parts.algorithm.labels["condition"])
        line = merge_fields(line, self.overlap.metrics(), source=f"backend {parts.config.backend.backend!r}")
        return merge_fields(line, sampled.metrics, source="scoring")

    def _pace(self, line: Fields, batch_size: int, *, has_trained: bool) -> Fields:
        """Show the step, timing included, to the pacer; return the line with the pacer's fields."""
        pacer = self.run.parts.pacer
        view = PaceView(
            step=int(line["step"]),
            batch_size=batch_size,
            group_size=self.run.parts.config.training.group_size,
            sampled_tokens=int(line.get("sampled_tokens", 0)),
            step_time_s=float(line["step_time_s"]),
            has_trained=has_trained,
        )
        pacer.observe(view)
        return merge_fields(line, pacer.metrics(), source="the pacer")

    def _reject(self, planned: Planned, sampled: Sampled, clock: Clock, error: NonFiniteError) -> Fields:
        """Skip the prompts of a step whose completions could not be sampled; its line gives the reason."""
        run = self.run
        with run.stops.shield():
            run.progress.example_idx += len(sampled.prompts)
            self.overlap.finish(clock, has_trained=False)
            line: Fields = {"step": planned.step, **run.parts.algorithm.labels, "loss": None}
            line |= {"rejected": error.problems[0].what} | clock.fields()
            line = self._pace(line, planned.batch_size, has_trained=False)
            run.progress.unfinished = line
        return line
