"""Settings that differ between conditions; inputs and versions that should not differ."""

from __future__ import annotations

from collections.abc import Sequence

from retrain.report.gather import Material
from retrain.report.inputs import differing_inputs
from retrain.report.markup import note, section, table
from retrain.report.settings import Differences, common, differences, versions
from retrain.report.text import joined, text

MOST_COLUMNS = 10
VALUE_CHARS = 120


def settings_section(material: Material) -> str:
    """Differing settings by condition; code and packages if runs used several versions."""
    if len(material.runs) < 2:
        return ""
    found = differences({label: [run.record for run in material.of(label)] for label in material.source.conditions})
    same = "No setting differs except for seeds, paths and settings that do not affect training."
    tables = (_table(found) if found.keys else note(same), differing_inputs(material), _mixed(material))
    return section("settings", "What differs", *tables)


def _table(found: Differences) -> str:
    """The longer of both dimensions runs down."""
    labels = list(found.values)
    title = "Settings that differ"
    if len(found.keys) <= len(labels) or len(labels) > MOST_COLUMNS:
        rows = [(text(label), *(_cell(found.values[label][key]) for key in found.keys)) for label in labels]
        return table(title, ("condition", *found.keys), rows, num_names=99)
    by_key = [
        (f"<code>{text(key)}</code>", *(_cell(found.values[label][key]) for label in labels)) for key in found.keys
    ]
    return table(title, ("setting", *labels), by_key, num_names=99)


def _cell(value: str) -> str:
    return f"<code>{text(value, VALUE_CHARS)}</code>"


def _mixed(material: Material) -> str:
    """A warning if runs used different code or packages, which makes a comparison unfair."""
    records = [run.record for run in material.runs]
    rows = [(text(name), _values(each)) for name, each in versions(records).items() if len(each) > 1]
    commits = common(records, "git.commit")
    rows += [("git commit", _values([commit[:12] for commit in commits]))] if len(commits) > 1 else []
    machines = common(records, "hardware.system")
    rows += [("system", _values(machines))] if len(machines) > 1 else []
    if not rows:
        return ""
    warning = note("Runs were not all made with the same code and packages: differences may come from that.")
    mixed = table("Mixed", ("what", "values"), rows, num_names=2, is_caption_shown=False)
    return f'<div class="alert">{warning}{mixed}</div>'


def _values(values: Sequence[str]) -> str:
    return joined(values[:20])
