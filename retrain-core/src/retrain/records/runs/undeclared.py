"""Differences of compared runs that their conditions do not declare: keys, code, data, devices, held-out examples."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any

from retrain.records.identity.changes import ADDED, REMOVED, ChangeKind, changes_between
from retrain.records.reading import table_of
from retrain.records.run import Run, accepted_changes, compared_settings
from retrain.records.runs.curves import Metric, Summary
from retrain.records.runs.example_rates import HELD_OUT_SET, NoExamplesError, per_example
from retrain.records.runs.source import Candidate, Source
from retrain.text.amounts import first_few

MODES = frozenset({"algorithm.advantage_mode", "algorithm.transform_mode", "training.control"})
OF_A_PART = (ChangeKind.CODE, ChangeKind.DATA, ChangeKind.PACKAGE)  # come and go with the parts that a condition names
MOST_NAMES, MOST_FILES = 5, 3

Finding = tuple[str, str]  # a run, or a condition as a whole, and the difference


def undeclared(source: Source, compared: Sequence[Candidate], baseline: str) -> tuple[str, ...]:
    """Return a sentence per difference to the first run of the condition, and of that one to the baseline's first."""
    firsts: dict[str, Candidate] = {}
    for run in compared:
        firsts.setdefault(run.condition, run)
    reference = firsts.get(baseline) or next(iter(firsts.values()))
    found: list[Finding] = []
    for run in compared:
        first, declared = firsts[run.condition], source.declared.get(run.condition)
        against = reference if run is first else first
        actual = dict(compared_settings(run.record))
        tuned = source.tuned_values(run)
        partly = {path.rpartition(".")[0] for path in tuned}  # free tables with a tuned entry
        for path, value in {**(declared or {}), **tuned}.items():
            if path in actual and path not in partly and actual[path] != value:
                found.append((run.name, f"{path} is {actual[path]!r}, the campaign says {value!r}"))
        texts = [] if declared else [*_of_the_keys(run, against)]
        other = against.name if run.condition == against.condition else against.condition
        facts = (*_of_the_inputs(run, against), *_of_the_machine(run, against))
        texts += [f"{fact} (against {other})" for fact in facts]
        who = run.condition if run.condition != against.condition else run.name
        found += [(who, text) for text in texts]
        found += [(run.name, text) for text in accepted_changes(run.record)]
    return tuple(_sentences(found, compared))


def _of_the_keys(run: Candidate, against: Candidate) -> Iterator[str]:
    """Yield keys in which two runs differ although neither label shows them."""
    ours, theirs = (dict(compared_settings(each.record)) for each in (run, against))
    for path in sorted({*ours, *theirs}):
        # A label `adv+transform~key=value` names a key by its path or by its flag.
        table, _, name = path.partition(".")
        named = re.compile(rf"[~,](?:{re.escape(path)}|(?:{table}_)?{re.escape(name)})[=.]")
        is_shown = path in MODES or any(named.search(each.condition) for each in (run, against))
        if not is_shown and ours.get(path) != theirs.get(path):
            yield f"{path} is {ours.get(path)!r}, in {against.condition} it is {theirs.get(path)!r}"


def _of_the_inputs(run: Candidate, against: Candidate) -> Iterator[str]:
    """Yield changes of code, data, model files and plugins since the other run."""
    before, now = against.record.get("identity"), run.record.get("identity")
    if not isinstance(before, dict) or not isinstance(now, dict) or not changes_between(before, now):
        return  # the digests agree: no file need be read
    changes = changes_between(*(Run(each.folder).identity if each.folder else {} for each in (against, run)))
    if run.condition != against.condition:
        changes = [each for each in changes if each.kind not in OF_A_PART or each.what not in (ADDED, REMOVED)]
    for owner, group in groupby(changes, key=lambda change: change.owner):
        of_owner = list(group)
        if owner and len(of_owner) > MOST_FILES:
            yield f"{len(of_owner)} files of {owner} changed, such as {of_owner[0].where}"
            continue
        yield from map(str, of_owner)


def _of_the_machine(run: Candidate, against: Candidate) -> Iterator[str]:
    """Yield differences in library versions and between CPU and GPU: they round differently."""
    ours, theirs = (table_of(each.record, "libraries") for each in (run, against))
    for name in sorted(ours.keys() & theirs.keys()):  # versions of retrain record different libraries
        if ours[name] != theirs[name]:
            yield f"{name} {ours[name]}, not {theirs[name]}"
    used = [str(table_of(each.record, "devices").get("used", "")) for each in (run, against)]
    kinds = ["CPU" if each.startswith("cpu") else "GPU" for each in used]
    if all(used) and kinds[0] != kinds[1]:
        yield f"trained on a {kinds[0]}, not on a {kinds[1]}"


def _sentences(found: Sequence[Finding], compared: Sequence[Candidate]) -> Iterator[str]:
    labels, by_text = dict.fromkeys(run.condition for run in compared), dict[str, list[str]]()
    for name, text in found:
        by_text.setdefault(text, []).append(name)
    for text, names in by_text.items():
        # The conditions that are named or whose every run is, then the other runs.
        whole = [x for x in labels if x in names or all(run.name in names for run in compared if run.condition == x)]
        who = [*whole, *(run.name for run in compared if run.name in names and run.condition not in whole)]
        yield f"{first_few(who, MOST_NAMES)}: {text}"


SPLIT = ("eval.seed", "eval.examples", "eval.skip")  # these draw the held-out examples from the data
# Examples come from here; other keys of [data] change the wording or order of prompts.
FROM = re.compile(r"data\.(?:source|path|options|prompt_key|answer_key|messages_key)|environment\..*")


def other_examples(compared: Sequence[Candidate], metric: Metric, *, are_ids_alike: bool) -> tuple[str, ...]:
    """Return reasons why the runs do not share the held-out examples; paths count unless the ids are alike."""
    if not metric.is_eval or not compared:
        return ()
    try:
        name = per_example(Metric(metric.field, Summary.FINAL)).name
    except NoExamplesError:  # another field of the evaluation, such as a mean length: the held-out examples'
        name = HELD_OUT_SET
    first = compared[0]
    reference = _drawn(first, name, with_data=not are_ids_alike)
    found: list[Finding] = []
    for run in compared[1:]:
        drawn = _drawn(run, name, with_data=not are_ids_alike)
        for key in sorted({*drawn, *reference}):
            if drawn.get(key) != reference.get(key):
                found.append((run.name, f"{key} is {drawn.get(key)!r}, in {first.name} {reference.get(key)!r}"))
    return tuple(f"other held-out examples: {each}" for each in _sentences(found, compared))


def _drawn(run: Candidate, name: str, *, with_data: bool) -> dict[str, Any]:
    """Return the settings that decide which examples a set has."""
    found = {
        f"{table}.{key}": value
        for table in ("eval", "data", "environment")
        for key, value in table_of(run.record, "config", table).items()
    }
    if name != HELD_OUT_SET:
        sets = found.get("eval.sets")
        content = sets.get(name) if isinstance(sets, dict) else None
        return {f"eval.sets.{name}": content, "eval.seed": found.get("eval.seed")}
    return {key: each for key, each in found.items() if key in SPLIT or (with_data and FROM.fullmatch(key))}
