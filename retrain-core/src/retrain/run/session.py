"""One training session: checks folders, builds parts, opens records, runs the loop, and records how it ended."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from retrain.kernel.contracts.views import RunView, Watcher
from retrain.kernel.errors import PluginError, Problem, RecordError, ResumeError, RetrainError, StopRequested
from retrain.kernel.parts import Run
from retrain.kernel.progress import Progress
from retrain.kernel.registry import Plugins, has_hooks, refuse_faulty_hooks
from retrain.kernel.run import Trainer
from retrain.kernel.types import Determinism
from retrain.records.files import new_digest
from retrain.records.folder import RunFolder, check_run_folder, open_run_folder
from retrain.records.identity.collect import Identity
from retrain.records.identity.copies import write_inputs
from retrain.records.identity.inputs import places_entry
from retrain.records.manifest import build_manifest, config_toml
from retrain.records.reading import time_now
from retrain.records.record_names import PATHS
from retrain.records.run import Run as RunReader
from retrain.run.assemble import assemble
from retrain.run.backend import RunDevices, choose_devices
from retrain.run.check import identity_of
from retrain.run.collector import resume_collector
from retrain.run.configure import Checked
from retrain.run.interrupts import Interrupts
from retrain.run.notices import credit_notices, unclipped, without_effect
from retrain.run.run_records import RunRecords
from retrain.run.seed_sources import run_seeds
from retrain.tasks.tasks import Tasks
from retrain.text.chat import prompt_text
from retrain.text.secrets import hide_text
from retrain.text.terminal_text import OUTCOME_LEVEL, printable

if TYPE_CHECKING:
    from retrain.run.resume_plan import ResumePlan

LOG = logging.getLogger("retrain")
SAME_SEED = {
    Determinism.EXACT: "the same seed gives the same run anywhere",
    Determinism.SAME_MACHINE: "the same seed gives the same run on this machine",
    Determinism.NONE: "with this backend or engine the same seed does not give the same run",
}
PACED = "the same seed does not give the same run: measured times set the batch size ([backpressure])"


def train(checked: Checked, plugins: Plugins, interrupts: Interrupts | None = None) -> None:
    """Run a valid configuration to its end, from the beginning or from where it was stopped.

    `run.json` always records how it ended. StopRequested when a signal ended it; its checkpoint is saved.
    """
    config = checked.config
    interrupts = interrupts or Interrupts(grace_s=config.training.grace_s)
    if resume := config.resume.from_:
        # Only a resume reads checkpoints and old records.
        from retrain.run.restore import checked_plan, reopened

        with reopened(Path(resume).expanduser()) as folder:
            devices = choose_devices(config, plugins, RunReader(folder.path).started_manifest())
            identity = identity_of(config, plugins, checked.tables)
            plan = checked_plan(folder, replace(checked, config=devices.config), plugins, identity)
            if plan.is_complete(config.training.max_steps):
                message = "Already complete: %d steps are done. A larger `--max-steps` continues it."
                LOG.log(OUTCOME_LEVEL, message, plan.next_step)
                return
            _session(checked, devices, plugins, identity, interrupts, plan=plan, folder=folder)
    else:
        check_run_folder(config.logging.log_dir, config.backend.adapter_path, place=config.place("logging.log_dir"))
        devices = choose_devices(config, plugins)
        # After the folder and the devices are known to be usable, because it hashes gigabytes of weights.
        identity = identity_of(config, plugins, checked.tables)
        _session(checked, devices, plugins, identity, interrupts)


def _session(
    checked: Checked,
    devices: RunDevices,
    plugins: Plugins,
    identity: Identity,
    interrupts: Interrupts,
    *,
    plan: ResumePlan | None = None,
    folder: RunFolder | None = None,
) -> None:
    config = devices.config
    devices.log()
    if clipping := unclipped(config, plugins, checked.flow):
        LOG.info("%s", printable(clipping[0].upper() + clipping[1:]))
    for notice in credit_notices(config, plugins, checked.flow):
        LOG.warning("%s", printable(notice))
    for line in without_effect(config, plugins, checked.flow, checked.tables):
        LOG.info("%s", printable(line))
    seeds = run_seeds(config, plan.seed if plan else None)
    saved = plan.checkpoint.state if plan and plan.checkpoint else None
    examples = ExampleCheck(before=plan.manifest if plan else {}, anyway=config.resume.anyway)
    parts, watching_parts = assemble(
        config, plugins, checked.flow, seeds, interrupts, saved=saved, check_tasks=examples
    )
    try:
        apart = "".join(f", {source} {seed}" for source, seed in config.training.seeds.items())
        is_paced = not getattr(parts.pacer, "is_repeatable", False)
        repeats = PACED if is_paced else SAME_SEED[parts.backend.capabilities.determinism]
        LOG.info("Seed %d%s: %s", seeds.root, apart, repeats)
        folder = folder or open_run_folder(config.logging.log_dir, config.backend.adapter_path)
        condition = parts.algorithm.labels["condition"]
        manifest = build_manifest(config, plugins, seed=seeds.root, condition=condition) | devices.entry
        manifest |= {"identity": identity.summary(), **examples.entry}
        manifest[PATHS] = places_entry(config, checked.tables, plugins, folder.path)
        if plan:
            manifest |= plan.recorded(examples.accepted)
        first_step = parts.warm_up.first_step if parts.warm_up else 0
        progress = Progress(**saved["progress"]) if saved else Progress(step=first_step)
        view = RunView(
            config=config,
            condition=condition,
            folder=folder.path,
            seed=seeds.root,
            first_step=progress.step,
            capabilities=parts.backend.capabilities,
            manifest=manifest,
        )
        leave = partial(_leave, interrupts, view, folder, identity)
        records = RunRecords(folder, parts, progress, view, leave)
        watchers = tuple(each for each in watching_parts if isinstance(each, Watcher))
        run = Run(parts=parts, records=records, stops=interrupts, progress=progress, view=view, watchers=watchers)
        with watching(plugins, watching_parts):
            if plan:
                from retrain.run.restore import restore  # only a resume loads it

                restore(parts, plan, view, interrupts, folder)
            # An unchanged resume keeps the copies that its first start made.
            if plan is None or plan.changes:
                write_inputs(folder.path, identity, kept_as=f"until_step_{progress.step}")
            folder.write_manifest(_described(run) | manifest, config_toml(config, seed=seeds.root))
            resume_collector()
            with folder, interrupts.installed():
                _train(run, folder, manifest, is_restored=bool(plan and plan.checkpoint))
    finally:
        if folder:
            folder.close()
        parts.close()


def _leave(interrupts: Interrupts, view: RunView, folder: RunFolder, identity: Identity, failure: RetrainError) -> None:
    interrupts.give_up(failure)
    if folder.path != view.folder:
        with suppress(RecordError):
            write_inputs(folder.path, identity)


@contextmanager
def watching(plugins: Plugins, watchers: Sequence[object]) -> Iterator[None]:
    """Call the hooks of `watchers` during the block; when one is refused, none stays registered."""
    with ExitStack() as registered:
        for watcher in watchers:
            has_methods_only = isinstance(watcher, Watcher) and not has_hooks(watcher)
            # The panel, a plugin of the command, is registered already.
            if has_methods_only or plugins.pluggy.is_registered(watcher):
                continue
            kind = type(watcher)
            try:
                refuse_faulty_hooks(watcher, plugins.pluggy)
            except TypeError as error:
                what = f"the watcher {kind.__module__}.{kind.__qualname__} cannot be used: {error}"
                fix = "correct the object that retrain_watch_run returns"
                raise PluginError(Problem(code="plugin.bad-watcher", what=what, fix=fix)) from error
            plugins.pluggy.register(watcher, name=f"{kind.__module__}.{kind.__qualname__}#{id(watcher)}")
            registered.callback(plugins.pluggy.unregister, watcher)
        yield


def _train(run: Run, folder: RunFolder, manifest: dict[str, Any], *, is_restored: bool) -> None:
    ending = {"status": "failed"}
    try:
        Trainer(run).train(is_restored=is_restored)
        if lost := folder.leave_if_lost(for_checkpoint=True):
            raise lost
        ending = {"status": "done"}
    except StopRequested as stop:
        if failure := stop.failure or folder.failure:
            ending["error"] = _shown(failure)
            raise failure from stop
        ending = {"status": "stopped", "reason": stop.reason}
        stop.folder = folder.path
        raise
    except BaseException as error:
        ending = {"status": "failed", "error": _shown(error)}
        raise
    finally:
        folder.rewrite_manifest(_described(run) | manifest | {"ended": time_now()} | ending)


def _described(run: Run) -> dict[str, Any]:
    """Entries that watchers add to `run.json`; a faulty one is logged, and only these entries are lost."""
    entries: dict[str, Any] = {}
    try:
        for added in run.ask_watchers("describe_run", run.view):
            entries |= added
        json.dumps(entries, allow_nan=False)
    except (RetrainError, TypeError, ValueError) as error:
        LOG.warning("run.json lacks the entries of watchers: %s", error)
        return {}
    return entries


def _shown(error: BaseException) -> str:
    return hide_text(f"{type(error).__name__}: {error}")


KEY = "examples"  # of `run.json`


@dataclass(slots=True, kw_only=True)
class ExampleCheck:
    """Called with the tasks before the model loads; `entry` then goes into `run.json`.

    `before` is the `run.json` of the resumed run, empty for a new one. ResumeError when a source gives other tasks, or
    with `anyway` a line in `accepted`. A run that recorded none is not compared.
    """

    before: Mapping[str, Any] = field(default_factory=dict)
    anyway: bool = False
    entry: dict[str, Any] = field(default_factory=dict)
    accepted: list[str] = field(default_factory=list)

    def __call__(self, tasks: Tasks) -> None:
        digest = new_digest()
        for prompt in tasks.prompts:
            for part in (prompt_text(prompt.example), prompt.example.reference, prompt.example.task):
                # The lengths keep `ab`, `c` apart from `a`, `bc`; JSON may hold half a surrogate pair.
                digest.update(f"{len(part)}:{part}".encode("utf-8", "surrogatepass"))
        found = {"train": len(tasks.pool.train), "held_out": len(tasks.pool.held_out), "digest": digest.hexdigest()}
        self.entry = {KEY: found}
        before = self.before.get(KEY)
        if not isinstance(before, dict) or before == found:
            return
        was, now = (f"{each.get('train')} to train on, {each.get('held_out')} held out" for each in (before, found))
        counts = f"{now} as before, but prompts, references or order differ" if was == now else f"{was}, and now {now}"
        what = f"the data source gives other examples: {counts}"
        if not self.anyway:
            why = "the run would not be the one that was stopped"
            fix = "restore the data, or insist with --resume-anyway"
            raise ResumeError(Problem(code="resume.changed-data", where="[data] source", what=what, why=why, fix=fix))
        LOG.warning("Resuming although %s", what)
        self.accepted.append(what)
