"""`retrain credit RUN`: the credit of stored completions, as assigned or under another flow; needs no model."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click
import numpy as np

from retrain.credit.algorithm import build_detector
from retrain.credit.flow import CreditFlow
from retrain.credit.pipeline import CreditGroup, CreditResult, assign_credit, named_rewards
from retrain.credit.specs import PlanningDetector
from retrain.kernel.contracts.context import PluginContext
from retrain.kernel.errors import ConfigError, Problem
from retrain.kernel.registry import Plugins
from retrain.kernel.seeding import Seeds
from retrain.kernel.types import Mask
from retrain.records.completions import turns_of
from retrain.records.files import write_text
from retrain.records.record_names import CONFIG_FILE
from retrain.records.run import Run, StoredCompletion, StoredStep
from retrain.report.heat import ShadedCompletion, ShadedStep, render, show
from retrain.run.configure import load_checked
from retrain.text.command_options import html_option, json_option, run_argument, set_option
from retrain.text.tokenizer import load_tokenizer, token_texts
from retrain.verdicts.ledger.looks import InterimLooks

MOST = 4
EPILOG = """\b
Examples:
  retrain credit logs/train                           the last step
  retrain credit logs/train --step 7 --transform gtpo_sepa --lambda 0.5
  retrain credit logs/train --html credit.html

\b
Exit codes: 0 done; 2 usage error, or nothing is stored for that step.
"""


@click.command("credit", epilog=EPILOG)
@run_argument()
@click.option("--step", type=int, help="Which step; the last one by default.")
@click.option("--transform", "transforms", multiple=True, help="Another transform_mode; repeat it to compare.")
@click.option("--advantage", "advantage_mode", default="", help="Another advantage_mode.")
@click.option("--uncertainty", "uncertainty_kind", default="", help="Another uncertainty_kind.")
@click.option("--lambda", "sepa_lambda", type=float, help="Pooling strength in [0, 1]; as in that step by default.")
@set_option("Change any other key.")
@html_option("Write a self-contained page.")
@click.option("--most", default=MOST, show_default=True, help="Completions shown in the terminal.")
@json_option()
@click.pass_obj
def command(
    plugins: Plugins,
    /,
    *,
    run: Path,
    html: Path | None,
    most: int,
    as_json: bool,
    step: int | None,
    transforms: tuple[str, ...],
    sepa_lambda: float | None,
    settings: tuple[str, ...],
    **modes: str,
) -> None:
    """Recompute the credit of RUN's stored completions and show it token by token."""
    overrides = [word for name, value in modes.items() if value for word in (f"--{name.replace('_', '-')}", value)]
    overrides += [word for setting in settings for word in ("--set", setting)]
    shaded = shade(run, plugins, step=step, transforms=transforms, sepa_lambda=sepa_lambda, overrides=overrides)
    InterimLooks("credit").at([run])
    if html is not None:
        write_text(html, render(shaded))
        click.echo(f"Wrote {html}", err=as_json)
    if as_json:
        click.echo(json.dumps(as_data(shaded)))
    elif html is None:
        from rich.console import Console

        show(shaded, Console(highlight=False), most=most)


def shade(
    run: Path,
    plugins: Plugins,
    *,
    step: int | None,
    transforms: Sequence[str],
    sepa_lambda: float | None,
    overrides: Sequence[str],
) -> ShadedStep:
    """Return a step's completions (by default the last step's) under each transform, ready to be shown.

    Transforms and lambda are the run's by default; `overrides` as on a command line.
    """
    stored = Run(run).step(step)
    if sepa_lambda is None:
        sepa_lambda = float(stored.metrics.get("sepa_lambda", 0.0))
    given = [[*overrides, "--transform-mode", each] for each in transforms] or [[*overrides]]
    checked = [load_checked([str(run / CONFIG_FILE), *arguments], plugins) for arguments in given]
    tokenizer = load_tokenizer(checked[0].config, plugins)
    replays = []
    for each in checked:
        context = PluginContext(config=each.config, seeds=Seeds(0), plugins=plugins, tokenizer=tokenizer)
        detector = build_detector(each.flow, context)
        replays.append(replay(stored, each.flow, detector, sepa_lambda=sepa_lambda, tokenizer=tokenizer))
    # planning marks come from the first flow that needs them
    marked = (masks for each, (_, masks, _) in zip(checked, replays, strict=True) if each.flow.needs_planning)
    masks = [mask for group in next(marked, replays[0][1]) for mask in group]
    token_credits = [[advs_T for group in result.token_advs for advs_T in group] for _, _, result in replays]
    above = checked[0].config.scoring.correct_above
    shaded = []
    for number, completion in enumerate(completion for group in replays[0][0] for completion in group):
        record, tokens = completion.record, completion.tokens
        prompt = record["prompt"]
        if not isinstance(prompt, str):
            prompt = "\n".join(f"{message.get('role', '')}: {message.get('content', '')}" for message in prompt)
        shaded.append(
            ShadedCompletion(
                group=record["group"],
                index=record["index"],
                example_id=record["example_id"],
                prompt=prompt,
                reference=record["reference"],
                reward=record["reward"],
                trained=record["trained"],
                token_texts=token_texts(tokenizer, tokens.tokens_T.tolist()),
                logprobs_T=tokens.logprobs_T,
                planning_T=masks[number],
                entropies_T=tokens.entropies_T,
                credits=[of_flow[number] for of_flow in token_credits],
                is_right=record["reward"] is not None and record["reward"] > above,
                turns=turns_of(record),
            )
        )
    labels = [each.flow.condition for each in checked]
    return ShadedStep(run=str(run), step=stored.step, sepa_lambda=sepa_lambda, labels=labels, completions=shaded)


def as_data(step: ShadedStep) -> dict[str, Any]:
    return {
        "run": step.run,
        "step": step.step,
        "sepa_lambda": step.sepa_lambda,
        "flows": list(step.labels),
        "completions": [
            {name: getattr(c, name) for name in ("group", "index", "example_id", "reward", "trained")}
            | {
                "tokens": list(c.token_texts),
                "planning": c.planning_T.tolist(),
                "credit": [credit_T.tolist() for credit_T in c.credits],
            }
            | ({"turn_tokens": list(c.turns.lengths)} if c.turn_titles() else {})
            for c in step.completions
        ],
    }


def replay(
    stored: StoredStep,
    flow: CreditFlow,
    detector: PlanningDetector | None,
    *,
    sepa_lambda: float,
    tokenizer: Any = None,
) -> tuple[list[list[StoredCompletion]], tuple[tuple[Mask, ...], ...], CreditResult]:
    """Assign credit to the step's judged completions: completions, planning masks and result, group by group.

    Uninformative groups are included, to show the credit that they would have got. `tokenizer` decodes the tokens for a
    transform that needs their text. ConfigError for rewards of single tokens: they are not stored.
    """
    if flow.needs_token_rewards:
        what = f"{flow.condition} takes rewards of single tokens: a run does not store them"
        where, fix = f"step {stored.step}", "choose another --transform"
        raise ConfigError(Problem(code="credit.token-rewards", where=where, what=what, fix=fix))
    judged = [[c for c in group if c.reward is not None] for group in stored.groups]
    judged = [group for group in judged if group]
    masks = tuple(_masks(group, detector) for group in judged)
    entropies = [[c.tokens.entropies_T for c in group if c.tokens.entropies_T is not None] for group in judged]
    squares = [[c.tokens.squared_probs_T for c in group if c.tokens.squared_probs_T is not None] for group in judged]
    groups = [
        CreditGroup(
            rewards_G=np.array([c.reward for c in group], dtype=np.float64),
            logprobs_G=[c.tokens.logprobs_T for c in group],
            planning_G=planning,
            entropies_G=found if len(found) == len(group) else None,
            named_rewards=named_rewards([c.record.get("reward_parts") or {} for c in group]),
            greedy=_greedy(group[0]),
            squared_probs_G=squared if len(squared) == len(group) else None,
            tokens_G=[c.tokens.tokens_T for c in group] if flow.needs_text else None,
            texts_G=[token_texts(tokenizer, c.tokens.tokens_T.tolist()) for c in group] if flow.needs_text else None,
            turns_G=[turns_of(c.record) for c in group],
            name=f"step {stored.step} group {group[0].record['group']}",
        )
        for group, planning, found, squared in zip(judged, masks, entropies, squares, strict=True)
    ]
    return judged, masks, assign_credit(groups, flow, sepa_lambda=sepa_lambda)


def _greedy(member: StoredCompletion) -> float | None:
    value = member.record.get("greedy_reward")
    return float(np.nan if value is None else value) if "greedy_reward" in member.record else None


def _masks(group: Sequence[StoredCompletion], detector: PlanningDetector | None) -> tuple[Mask, ...]:
    stored = [c.tokens.planning_T for c in group if c.tokens.planning_T is not None]
    if len(stored) == len(group):
        return tuple(stored)
    if detector is None:
        return tuple(np.zeros(len(c.tokens.tokens_T), np.bool_) for c in group)
    return tuple(detector.masks([c.tokens.tokens_T for c in group]))
