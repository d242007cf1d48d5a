"""Every extension point of retrain, in life-cycle order.

A plugin is a module or object found through the entry-point group `retrain`; it implements any of these hooks with
`retrain.api.hookimpl`. Registration hooks receive a callable and call it with one `PluginSpec` per name they offer,
importing nothing heavy. Life-cycle hooks receive read-only views. Unless stated otherwise, an exception in a
registration hook disables only that plugin (`retrain plugins` and every message about a missing name show its error),
and an exception in a life-cycle hook stops the run with the plugin's name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import pluggy

if TYPE_CHECKING:
    from pathlib import Path

    from retrain.kernel.config.resolved import Config
    from retrain.kernel.contracts.algorithm import Credit, Shaper
    from retrain.kernel.contracts.backend import Backend
    from retrain.kernel.contracts.context import PluginContext
    from retrain.kernel.contracts.diagnosis import Diagnosis
    from retrain.kernel.contracts.report import ReportSection
    from retrain.kernel.contracts.tasks import Evaluation, LoadedTasks
    from retrain.kernel.contracts.views import EvalView, GroupsView, RunView
    from retrain.kernel.declared import ConfigClaim, MetricSpec, PluginSpec
    from retrain.kernel.errors import Problem, RetrainError
    from retrain.kernel.registry import Plugins
    from retrain.kernel.types import TrainReport

    Register = Callable[[PluginSpec], None]

PROJECT = "retrain"
hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)


# ---------------------------------------------------------------- registration: once per process, before the config


@hookspec
def retrain_register_config_tables(register: Register) -> None:
    """Offer a TOML table: `name` is the table, `factory` a pydantic model, `traits` its `TableTraits`.

    With `TableTraits(extends=True)` the model's keys are added to a table that another plugin offers.
    """


@hookspec
def retrain_register_commands(register: Register) -> None:
    """Offer `retrain NAME ...`: `factory` is a `click.Command`, imported only when the command is typed."""


@hookspec
def retrain_register_init_templates(register: Register) -> None:
    """Offer `retrain init --template NAME`: `factory` is the TOML text or a function that returns it.

    `traits` names the file to write when it is not `retrain.toml`.
    """


@hookspec
def retrain_register_data_sources(register: Register) -> None:
    """Offer a `[data] source`: `factory(context) -> DataSource`."""


@hookspec
def retrain_register_environments(register: Register) -> None:
    """Offer an `[environment] provider`: `factory(context) -> Environment`. Traits `plays_data`: tasks of `[data]`."""


@hookspec
def retrain_register_rewards(register: Register) -> None:
    """Offer a `[reward] type`: `factory(context) -> Reward`. `traits={"instruction": text}`: for the prompts."""


@hookspec
def retrain_register_backends(register: Register) -> None:
    """Offer a `[backend] backend`: `factory(context) -> Backend`; `traits` are its `Capabilities`.

    `params` is the model of `[backend.options]`, `functions` its `BackendFunctions`, called without building it.
    """


@hookspec
def retrain_register_inference_engines(register: Register) -> None:
    """Offer an `[inference] engine`: `factory(context, policy) -> Engine`; `traits` are its `EngineTraits`."""


@hookspec
def retrain_register_advantages(register: Register) -> None:
    """Offer an `advantage_mode`: `f(rewards_G)`, `f(rewards_G, params)`, `f(ctx)` or an `AdvantageSpec`.

    `params` is the model of `[algorithm.advantage_params]`.
    """


@hookspec
def retrain_register_transforms(register: Register) -> None:
    """Offer a `transform_mode`: a `TransformSpec`, a function that returns one, or `f(ctx) -> TransformOutput`.

    A transform may also carry `stages`: steps of the credit pipeline that the flags of any `TransformSpec` enable.
    """


@hookspec
def retrain_register_uncertainties(register: Register) -> None:
    """Offer an `uncertainty_kind`: an `UncertaintySpec` or `f(ctx) -> one non-negative number per token`."""


@hookspec
def retrain_register_algorithms(register: Register) -> None:
    """Offer an `algorithm_mode` in place of advantage and transform: an `AlgorithmSpec`, or `f(ctx)`.

    With `traits=Needs(...)` it is a whole `Algorithm`: `factory(context) -> Algorithm`. It assigns credit to all
    groups once per step, and checkpoints keep its state. `params` is then the model of `[algorithm.params]`.
    """


@hookspec
def retrain_register_recipes(register: Register) -> None:
    """Offer an `[algorithm] recipe`: `factory` is `{"table.key": value}`, defaults that any key that is set beats."""


@hookspec
def retrain_register_losses(register: Register) -> None:
    """Offer an `[algorithm] loss`: a `LossSpec` or `f(ctx) -> one term per token`; `traits` are its `LossTraits`.

    `params` is the model of `[algorithm.loss_params]`.
    """


@hookspec
def retrain_register_planning_detectors(register: Register) -> None:
    """Offer a `[planning] detector`: `factory(context) -> PlanningDetector`."""


@hookspec
def retrain_register_controllers(register: Register) -> None:
    """Offer a stateful schedule that a `TransformSpec` names: `factory(context) -> Controller`."""


@hookspec
def retrain_register_recorders(register: Register) -> None:
    """Offer a name for `[logging] recorders`: `factory(context) -> Recorder`."""


@hookspec
def retrain_register_health_monitors(register: Register) -> None:
    """Offer a name for `[health] monitors`: `factory(context) -> HealthMonitor`."""


@hookspec
def retrain_register_pacers(register: Register) -> None:
    """Offer a `[backpressure] pacer`, to set the batch size of each step: `factory(context) -> Pacer`."""


@hookspec
def retrain_register_launchers(register: Register) -> None:
    """Offer a way to start the runs of a campaign: `factory(context) -> Launcher`."""


@hookspec
def retrain_register_samplers(register: Register) -> None:
    """Offer a `[data] sampler`, to choose the prompts of each step: `factory(context, examples) -> Sampler`.

    `params` is the model of `[data.sampler_params]`.
    """


# ---------------------------------------------------------------- the manual: once per command


@hookspec
def retrain_describe_metrics() -> Iterable[MetricSpec] | None:
    """Explain the fields that this plugin adds to `metrics.jsonl`, for the manual and the metrics pages.

    Import nothing heavy.
    """


# ---------------------------------------------------------------- a configuration file: once per command


@hookspec(firstresult=True)
def retrain_claim_config(document: Mapping[str, Any]) -> ConfigClaim | None:
    """Claim a TOML file that is not a training run: `retrain FILE` and `retrain explain FILE` then follow the claim.

    `document` is the parsed file, not yet checked. None leaves it to other plugins, and finally to training.
    """


@hookspec
def retrain_check_config(config: Config, plugins: Plugins, will_run: bool) -> Sequence[Problem] | None:
    """Further problems with a training run's configuration, reported together with all others; import nothing heavy.

    For rules that span several tables, on the plugin's own parts. Not `will_run`: estimates need nothing installed.
    """


@hookspec
def retrain_explain(config: Config, plugins: Plugins) -> Mapping[str, Any] | None:
    """Rows to add to `retrain explain` of a training run, as JSON; import nothing heavy."""


@hookspec
def retrain_diagnose(config: Config | None, plugins: Plugins) -> Sequence[Diagnosis] | None:
    """Findings for `retrain doctor` about this plugin's needs: extras, devices, servers, keys.

    `config` is the user's; None means no configuration, and then nothing is `needed`. Libraries may be
    imported, models may not be loaded, and no check may take longer than a few seconds. An exception becomes a failed
    finding with the plugin's name.
    """


# ---------------------------------------------------------------- a run: each once, unless stated otherwise


@hookspec
def retrain_watch_run(context: PluginContext) -> object | None:
    """A watcher of this run: a `Watcher`, or an object with implementations of hooks; None = nothing to watch.

    Called once per run, before data and model load: build the configured parts here, so that faults surface
    early. Its methods and hooks are called until the run ends.
    """


@hookspec
def retrain_tasks_loaded(context: PluginContext, tasks: LoadedTasks) -> None:
    """The tasks of a run are loaded and their verifier is up; the model is not. Raise RewardError to refuse the run.

    Not called by commands that only look at the tasks, such as `retrain audit`.
    """


@hookspec(firstresult=True)
def retrain_evaluation(context: PluginContext, tasks: LoadedTasks) -> Evaluation | None:
    """The evaluation of a run's policy; None = not this plugin's. The tasks are loaded, the model is not."""


@hookspec
def retrain_shape_rewards(context: PluginContext, backend: Backend) -> Sequence[Shaper] | None:
    """Shapers that change rewards between scoring and credit. Once per run, when all parts are built.

    Shapers of several plugins work one after another; each gets the previous one's result. A shaper with
    hooks is a watcher too (see `retrain_watch_run`): it may keep state and add fields.
    """


@hookspec
def retrain_load_state(run: RunView, state: Mapping[str, Any]) -> None:
    """The merged state of all plugins, as saved. Once per resume, before `retrain_run_start`."""


@hookspec
def retrain_run_start(run: RunView) -> None:
    """All parts are built and the run folder exists; the first step has not begun."""


@hookspec
def retrain_groups_scored(run: RunView, groups: GroupsView) -> None:
    """Every completion of the step is scored and has its credit; `groups.batch` is trained next. Once per step."""


@hookspec
def retrain_extra_metrics(
    run: RunView | None,
    groups: GroupsView | None,
    credit: Credit | None,
    report: TrainReport | None,
    evaluation: EvalView | None,
) -> Mapping[str, Any] | None:
    """Fields to add to a line of `metrics.jsonl`: finite numbers, text or booleans. Once per step and per evaluation.

    For a step `evaluation` is None, and `report` too when nothing was trained; a field that already exists is an error
    naming the plugin. For an evaluation all else is None, since `retrain eval` has no run; name its fields `eval_...`.
    """


@hookspec
def retrain_step_end(run: RunView, metrics: Mapping[str, Any]) -> RetrainError | None:
    """The step's line is written. Once per step, a warm-up's included, and once with `step` = -1 for the first eval.

    An error that is returned, not raised, ends the run once a checkpoint is saved; after the first eval it is ignored.
    """


@hookspec
def retrain_save_state(run: RunView, name: str, folder: Path | None) -> Mapping[str, Any] | None:
    """State of the plugin for the checkpoint `name`, as JSON: `{"plugin-name": {...}}`. Twice per checkpoint.

    First without a `folder`. Then the checkpoint is complete in `folder`, PEFT adapter included: read it during the
    call; the result is ignored. `final` is the last one.
    """


@hookspec
def retrain_run_end(run: RunView, error: BaseException | None) -> None:
    """The run is over, by success (`error` is None) or not. Always called when `retrain_run_start` was."""


@hookspec
def retrain_report_sections(run: RunView, campaign: Path | None) -> Mapping[str, str | ReportSection] | None:
    """Sections for a report, `{"title": "text"}` or `{"title": ReportSection(...)}`. Once per condition of a report.

    `run` is a run of the condition, `campaign` the folder of the campaign that the report covers, or None for a report
    on runs. Texts of all plugins are shown together; a `ReportSection` is a separate section, with plots. The same
    answer for several conditions is shown once. Everything is escaped. Keys of the run's `config.toml` that this
    installation cannot read have their defaults.
    """


# ---------------------------------------------------------------- a campaign


@hookspec
def retrain_campaign_run_done(
    config: Config, tables: frozenset[str], run: Path, campaign: Path, is_first: bool
) -> Mapping[str, Any] | None:
    """A run of a campaign has reached its last step; the result goes into `manifest.json`: `{"squeeze": {...}}`.

    `config` is the campaign's, `tables` names the tables that its file sets, `run` and `campaign` are folders. Once per
    run, in a thread of the campaign's process. An exception is logged and ends nothing.
    """
