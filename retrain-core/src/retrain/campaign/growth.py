"""How a campaign differs from the one that a folder holds: seeds and conditions added, anything else changed."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from retrain.campaign.load import Campaign
from retrain.campaign.outcome import State
from retrain.campaign.settled import settle_campaign
from retrain.kernel.errors import Problem, ResumeError
from retrain.kernel.registry import Plugins
from retrain.records.files import hash_of
from retrain.records.reading import read_regular
from retrain.records.record_names import CAMPAIGN_CONTENT
from retrain.run.devices import KEY, SettledDevices

MOST_CHANGES = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Growth:
    """What a campaign adds to an earlier session of it, and `changes`: what else differs, each as a sentence.

    `devices` are those that its runs use, by condition.
    """

    seeds: tuple[int, ...] = ()
    conditions: tuple[str, ...] = ()
    changes: tuple[str, ...] = ()
    devices: Mapping[str, SettledDevices] = field(default_factory=dict)

    @property
    def adds_runs(self) -> bool:
        """Whether seeds or conditions were added."""
        return bool(self.seeds or self.conditions)

    def __str__(self) -> str:
        added = [f"seeds {', '.join(map(str, self.seeds))}"] * bool(self.seeds)
        return "; ".join([*added, *(f"condition {label}" for label in self.conditions)])


def growth_since(path: Path, before: Mapping[str, Any], campaign: Campaign, plugins: Plugins) -> Growth:
    """How `campaign` differs from the one in `path`, whose manifest is `before`.

    A key that the earlier version of retrain did not know counts as its default. ResumeError when `campaign.json`,
    which says what the earlier one was, is missing or damaged.
    """
    content = campaign.content()
    if before.get("sha256") == hash_of(content):
        devices, moved = settle_campaign(campaign, plugins, before, {})
        return Growth(changes=tuple(moved), devices=devices)
    then, now = _content_of(path), json.loads(json.dumps(content, default=str))
    defaults = json.loads(json.dumps({key.path: key.default for key in campaign.keys}, default=str))
    old, new = then["conditions"], now["conditions"]
    devices, moved = settle_campaign(campaign, plugins, before, {label: old[label].get(KEY, "") for label in old})
    seeds = [seed for seed in now["seeds"] if seed not in then["seeds"]]
    changes = list(moved)
    if set(then["seeds"]) - set(now["seeds"]):
        changes.append(f"seeds was {then['seeds']} and is now {now['seeds']}")
    for name in ("devices_per_run", "plan"):
        changes += _differences(then.get(name), now[name], name)
    for label, values in old.items():
        if label not in new:
            changes.append(f"condition {label} was set and is now absent")
            continue
        now_used = new[label] | ({KEY: values[KEY]} if label in devices and KEY in values else {})  # compared above
        changes += _differences({**defaults, **values}, {**defaults, **now_used}, f"conditions {label}")
    added = tuple(label for label in new if label not in old)
    return Growth(seeds=tuple(seeds), conditions=added, changes=tuple(changes), devices=devices)


def refusal(path: Path, before: Mapping[str, Any], campaign: Campaign, growth: Growth, *, fix: str) -> ResumeError:
    """The error that names what changed and what starting again would cost."""
    shown = list(growth.changes[:MOST_CHANGES])
    if len(growth.changes) > MOST_CHANGES:
        shown.append(f"and {len(growth.changes) - MOST_CHANGES} more differences")
    shown += [f"{growth} would be added"] * growth.adds_runs
    shown.append("new runs would not be comparable with those already there; nothing was changed")
    shown.append(rerun_sentence(before, campaign))
    return ResumeError(Problem(where=str(path), what="it is a different campaign", why="\n    ".join(shown), fix=fix))


def rerun_sentence(before: Mapping[str, Any], campaign: Campaign) -> str:
    """How much a new campaign would run again."""
    num_done = sum(entry.get("status") == State.DONE for entry in before["runs"])
    kept = f"; {num_done} of the {len(before['runs'])} earlier ones are done" if num_done else ""
    return f"a new campaign runs all {campaign.num_runs} runs from their first step{kept}"


def _content_of(path: Path) -> dict[str, Any]:
    try:
        content: dict[str, Any] = json.loads(read_regular(path / CAMPAIGN_CONTENT))
        list(content["seeds"]), [dict(values) for values in content["conditions"].values()]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        what = f"cannot be read: {type(error).__name__}: {error}"
        fix = "restore the file, or start a new campaign with --new and without --resume"
        raise ResumeError(Problem(where=str(path / CAMPAIGN_CONTENT), what=what, fix=fix)) from error
    return content


def _differences(before: Any, now: Any, path: str = "") -> list[str]:
    if isinstance(before, dict) and isinstance(now, dict):
        names = dict.fromkeys([*before, *now])
        inner = (_differences(before.get(name), now.get(name), f"{path} {name}".strip()) for name in names)
        return [difference for differences in inner for difference in differences]
    return [] if before == now else [f"{path} was {_shown(before)} and is now {_shown(now)}"]


def _shown(value: Any) -> str:
    return "absent" if value is None else "set" if isinstance(value, dict) else repr(value)
