"""A run: evaluation before training, steps until the last one, checkpoints, and the unfinished step of a resume."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from retrain.kernel.contracts.tasks import Evaluation
from retrain.kernel.errors import BackendError, OutOfMemoryError, Problem, RetrainError, StopRequested
from retrain.kernel.parts import Run
from retrain.kernel.progress import Clock, Fields
from retrain.kernel.step import FAILURES, Step

BEFORE_TRAINING = -1
FINAL = "final"  # name of the last checkpoint


class Trainer:
    """One run, from `progress.step` to its last step."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self.step = Step(run)
        self._last: Mapping[str, Any] = {}

    def train(self, *, is_restored: bool = False) -> None:
        """Train to the last step; records and the last checkpoint are on disk when it returns.

        `is_restored`: the parts continue from a checkpoint. A stop raises StopRequested after a checkpoint.
        """
        run = self.run
        error: BaseException | None = None
        try:
            run.notify("retrain_run_start")
            self._steps(is_restored=is_restored)
            self._save(FINAL)
        except StopRequested as stop:
            error = stop
            # Before saving: a second request while the checkpoint is written must still be able to end the process.
            run.stops.acknowledge()
            self._save(self._checkpoint())
            raise
        except BaseException as caught:
            error = caught
            raise
        finally:
            # Threads end first, so that no hook meets a sampler at work.
            self.step.overlap.close()
            run.notify("retrain_run_end", error=error)

    def _steps(self, *, is_restored: bool) -> None:
        run, progress = self.run, self.run.progress
        while run.parts.warm_up and progress.step < 0:
            run.enter(progress.step, "training")
            with run.stops.shield():
                self._finish(run.parts.warm_up.take(progress.step, run.parts.backend.train))
            # As after a resume, the sampler still has the policy before these updates.
            is_restored = True
        first, cursor = progress.step + (progress.unfinished is not None), progress.example_idx
        self.step.overlap.start(Clock(), partial(self.step.upcoming, first, cursor), is_restored=is_restored)
        if progress.unfinished is not None:
            self._finish(progress.unfinished)
        elif progress.step == 0 and run.parts.evaluation and not progress.has_first_eval:
            before = self._evaluate(run.parts.evaluation, BEFORE_TRAINING)
            with run.stops.shield():
                run.records.write_metrics(before)
                progress.has_first_eval = True
                run.notify("retrain_step_end", metrics=before)
        while progress.step < run.parts.config.training.max_steps:
            batch_size = self.step.batch_size(progress.step)
            try:
                self._finish(self.step.take(progress.step, batch_size))
            # An unfinished step is trained already, and it was the evaluation that did not fit.
            except OutOfMemoryError:
                if progress.unfinished is not None or not self.step.backs_off(progress.step, batch_size):
                    raise

    def _finish(self, line: Fields) -> None:
        """Evaluate if due, write the step's line, save a checkpoint if due, and advance to the next step.

        Watchers see the line before it is written (`step_line`), hooks after (`retrain_step_end`); an error that a hook
        returns ends the run once the checkpoint is saved.
        """
        run, progress, training = self.run, self.run.progress, self.run.parts.config.training
        step = int(line["step"])
        if run.parts.evaluation and run.parts.evaluation.is_due(step):
            line = line | self._evaluate(run.parts.evaluation, step)
        with run.stops.shield():
            run.enter(step, "recording")
            for added in run.ask_watchers("step_line", line):
                line = line | dict(added)
            run.records.write_metrics(line)
            progress.unfinished = None
            # Warm-up ends with step -2, because the line of step -1 is the evaluation before training.
            progress.step = step + 1 if step + 1 != BEFORE_TRAINING else 0
            self._last = line
            endings = [self._rejected_too_often(line), *run.notify("retrain_step_end", metrics=line)]
            ending = next((error for error in endings if isinstance(error, RetrainError)), None)
            is_due = training.save_every and progress.step % training.save_every == 0
            # The last step is not saved here: the run saves it under the name `final`.
            if ending or (is_due and progress.step < training.max_steps):
                self._save(self._checkpoint())
            if ending:
                raise ending

    def _evaluate(self, evaluation: Evaluation, step: int) -> Fields:
        self.run.enter(step, "eval")
        with self.step.overlap.evaluation() as of_step:
            found = evaluation.measure(step, self.run.parts.backend, self.run.records.path / FAILURES)
        return {"step": step, **of_step, **found}

    def _rejected_too_often(self, line: Mapping[str, Any]) -> RetrainError | None:
        """Return the error that ends the run after too many rejected steps in a row; None to continue."""
        progress, limit = self.run.progress, self.run.parts.config.training.max_bad_steps
        progress.bad_steps_in_a_row = progress.bad_steps_in_a_row + 1 if "rejected" in line else 0
        if not limit or progress.bad_steps_in_a_row < limit:
            return None
        where, what = f"step {line['step']}", f"{limit} steps in a row were rejected; the last: {line['rejected']}"
        fix = "lower [training] lr, or set [optimizer] grad_clip_norm; earlier checkpoints are unchanged"
        return BackendError(Problem(code="run.steps-rejected", where=where, what=what, fix=fix))

    def _save(self, name: str) -> None:
        run = self.run
        with run.stops.shield():
            run.enter(run.progress.step, "checkpoint")
            run.notify("retrain_save_state", name=name, folder=run.records.save(name, self._last))
            # Last, because a forced exit before this point cannot be resumed.
            run.stops.may_resume()

    def _checkpoint(self) -> str:
        progress = self.run.progress
        return f"checkpoint_step_{progress.step + (progress.unfinished is not None)}"
