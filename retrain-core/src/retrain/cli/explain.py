"""`retrain explain`: shows a configuration's effect and the origin of each value, without model or data."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click

from retrain.credit.configured_loss import applicable_losses, capability_fields
from retrain.credit.fit import idle_part
from retrain.credit.flow import CreditFlow
from retrain.credit.recipes import configured_recipe, departures
from retrain.kernel.config.load import all_keys
from retrain.kernel.config.resolved import Config
from retrain.kernel.config.toml_file import toml_text
from retrain.kernel.plugins.resolve import declared_capabilities
from retrain.kernel.registry import Plugins
from retrain.run.check import value_rows, with_plugin_rows
from retrain.run.configure import Checked, claim_of, load_checked, missing_file
from retrain.run.notices import credit_notices, unclipped, without_effect
from retrain.run.steps.updates import Course
from retrain.run.tables import registered_tables
from retrain.text.command_options import config_argument, json_option
from retrain.text.secrets import hide

LOSS_KEYS = ("clip_eps", "clip_eps_high", "dual_clip", "aggregation", "off_policy_mask")
# LoRA needs about ten times the rate of full fine-tuning; below this the run may barely move.
FULL_TUNING_LR = 5e-6
EPILOG = """\b
Examples:
  retrain explain                     show what `retrain` would do here
  retrain explain my.toml --lr 1e-4 --json
  retrain explain --keys              list every key, its flag and its default
  retrain explain --schema > retrain.schema.json    for a file that begins with `#:schema ./retrain.schema.json`

\b
Exit codes: 0 done; 2 usage or configuration error.
"""


@click.command(
    "explain", context_settings={"ignore_unknown_options": True, "allow_interspersed_args": True}, epilog=EPILOG
)
@json_option()
@click.option("--keys", "list_keys", is_flag=True, help="List every key, its flag, default and meaning instead.")
@click.option(
    "--schema", is_flag=True, help="Print the JSON Schema (draft 2020-12) of the configuration instead, for editors."
)
@config_argument()
@click.pass_obj
def command(plugins: Plugins, as_json: bool, list_keys: bool, schema: bool, arguments: tuple[str, ...]) -> None:
    """Show what CONFIG and its overrides would do, without loading model or data."""
    if schema:
        from retrain.cli.manual.json_schema import schema_text  # only for editors

        click.echo(schema_text(plugins), nl=False)
        return
    if list_keys:
        rows = [
            {"key": key.path, "flag": f"--{key.flag}"}
            | {name: getattr(key, name) for name in ("default", "description", "pending")}
            for key in all_keys(registered_tables(plugins))
        ]
        if as_json:
            click.echo(json.dumps(rows, indent=2))
            return
        for row in rows:
            note = f" (not yet: {row['pending']})" if row["pending"] else ""
            head = f"{row['key']:<34} {row['flag']:<30} {toml_text(row['default']):<20}"
            click.echo(f"{head} {row['description']}{note}")
        return
    claim, unnamed = claim_of(arguments, plugins), None
    if claim:
        content = hide(dict(claim.load_explain()(arguments, plugins)))
    else:
        checked = load_checked(arguments, plugins)
        content, unnamed = explain(checked, plugins), missing_file(checked.config, arguments)
    if as_json:
        click.echo(json.dumps(content, indent=2))
        return
    origins, recipes = content.pop("origins", {}), content.pop("recipes", {})
    warnings = content.pop("warnings", [])
    width = max(len(name) for name in content)
    for name, value in content.items():
        click.echo(f"{name:<{width}} : {_shown(value)}")
    sections = {"Non-default values and their origins": origins}
    sections |= {f"Values that {label} takes from its recipe": rows for label, rows in recipes.items()}
    for title, rows in sections.items():
        if rows:
            click.echo(f"\n{title}:")
        for path, row in rows.items():
            click.echo(f"  {path:<{width}} = {toml_text(row['value'])}  ({row['origin']})")
    if warnings:
        click.echo("\n  ".join(["\nWarnings:", *warnings]))
    if unnamed:
        click.echo(f"\n`retrain` refuses to run this: {unnamed}")


def _shown(value: Any) -> str:
    """A value on one line, `-` for an empty one."""
    if isinstance(value, Mapping):
        return ", ".join(f"{name}={_shown(each)}" for name, each in value.items()) or "-"
    if isinstance(value, list):
        return ", ".join(map(_shown, value)) or "-"
    return "-" if value is None else "yes" if value is True else "no" if value is False else str(value) or "-"


def explain(checked: Checked, plugins: Plugins) -> dict[str, Any]:
    """The explanation as plain data; secrets are hidden."""
    config, flow, training = checked.config, checked.flow, checked.config.training
    rank = config.model.lora_rank
    alpha = config.lora.alpha or 2 * rank
    completions = training.batch_size * training.group_size
    tables = config.as_dict()
    loss_keys = (f"{name} = {tables['algorithm'][name]}" for name in LOSS_KEYS if tables["algorithm"].get(name))
    loss = ", ".join([config.algorithm.loss, *loss_keys])
    content: dict[str, Any] = {
        "mode": "single",
        "config": config.source or "(defaults)",
        "model": config.model.model,
        "backend": config.backend.backend,
        "backend_options": config.backend.options,
        "backend_capabilities": capability_fields(
            declared_capabilities(config, plugins), config.backend.backend, plugins
        ),
        "condition": flow.condition,
        "algorithm_mode": config.algorithm.algorithm_mode,
        "advantage_mode": flow.advantage.name,
        "transform_mode": flow.transform.name,
        "uncertainty_kind": flow.uncertainty.name,
        **({"loss": loss} if applicable_losses(plugins, config.backend.backend) else {}),
        **({"clipping": clipping} if (clipping := unclipped(config, plugins, flow)) else {}),
        **({"idle": idle} if (idle := idle_part(config, plugins)) else {}),
        "max_steps": training.max_steps,
        "batch_size": training.batch_size,
        "group_size": training.group_size,
        "datums_per_step": completions,
        "total_datums": completions * training.max_steps,
        "max_tokens": training.max_tokens,
        "max_tokens_per_step": (completions + training.batch_size * flow.needs_greedy)
        * training.max_tokens
        * (1 + training.refill),
        "temperature": training.temperature,
        # A minibatch has at least one whole group.
        "updates_per_step": min(training.minibatches, training.batch_size) * training.epochs,
        "lr": training.lr,
        "lr_schedule": str(Course.of(config)),
        "seed": training.seed,
        "lora_rank": config.model.lora_rank,
        "lora_alpha": alpha,
        "lora_scale": alpha / (rank**0.5 if tables["lora"].get("rslora") else rank) if rank else 0.0,
        "data": ", ".join(config.data.task_names) or config.data.source,
        "reward_type": config.reward.type,
        "eval_examples": config.eval.examples,
        "log_dir": config.logging.log_dir,
        "adapter_path": config.backend.adapter_path or f"{config.logging.log_dir}/adapter",
        "wandb_project": getattr(config.logging, "wandb_project", "") or "(disabled)",  # a key of the trackers
    }
    content = with_plugin_rows(content, config, plugins)
    warnings = _warnings(config, flow)
    recipe = configured_recipe(config, plugins)
    if recipe and (names := sorted(departures(config, recipe, plugins))):
        warnings.append(f"{', '.join(names)}: set otherwise than {recipe.place} has it")
    warnings += credit_notices(config, plugins, flow)
    warnings += without_effect(config, plugins, flow, checked.tables)
    if config.environment.provider and (note := _history_note(config, plugins)):
        warnings.append(note)
    content |= {"origins": value_rows(config), "warnings": warnings}
    hidden: dict[str, Any] = hide(content)
    return hidden


def _history_note(config: Config, plugins: Plugins) -> str:
    """Return how the chat template changes earlier turns, if its tokenizer is on this machine."""
    from huggingface_hub import try_to_load_from_cache

    from retrain.text.tokenizer import load_tokenizer
    from retrain.text.transcript import history_note

    model = config.model.model
    is_folder = Path(plugins.locate_model(model) or model).expanduser().is_dir()
    if not is_folder and not isinstance(try_to_load_from_cache(model, "tokenizer_config.json"), str):
        return ""
    return history_note(config, load_tokenizer(config, plugins))


def _warnings(config: Config, flow: CreditFlow) -> list[str]:
    training, found = config.training, []
    if training.group_size == 1 and not flow.advantage.compute_step:
        found.append("group_size = 1: a group of one has no advantage, so nothing will be learnt")
    if training.save_every == 0:
        found.append("save_every = 0: only the last adapter is saved")
    if training.temperature > 2.0:
        found.append(f"temperature = {training.temperature}: completions will be close to noise")
    if endless := Course.of(config).warning:
        found.append(endless)
    if training.minibatches > training.batch_size:
        groups = f"a step has {training.batch_size} groups at most, so it has at most as many minibatches"
        found.append(f"minibatches = {training.minibatches}, batch_size = {training.batch_size}: {groups}")
    if config.model.lora_rank and training.lr < FULL_TUNING_LR:
        found.append(f"lr = {training.lr}: in the range of full fine-tuning; LoRA needs about ten times more")
    return found
