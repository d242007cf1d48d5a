"""Tables of keys for those who come from another trainer: ours exist (theirs: tests/servers/test_coming_from.py)."""

from __future__ import annotations

import re

import pytest

from retrain.kernel.config.load import all_keys
from retrain.kernel.plugins.discover import load_plugins
from retrain.run.tables import registered_tables
from tests.docs.reading import SITE

ROW = re.compile(r"^\| (?P<theirs>[^|]+) \| (?P<ours>[^|]+) \| [^|]*\|$", re.MULTILINE)
OURS = re.compile(r"`\[(\w+)\] (\w+)`")


def rows(trainer: str) -> list[tuple[str, str]]:
    """Return the table of keys of a trainer: its name of a key, and ours."""
    page = (SITE / "coming-from.md").read_text(encoding="utf-8")
    section = page.partition(f"\n## {trainer}\n")[2].partition("\n## ")[0]
    return [(row["theirs"], row["ours"]) for row in ROW.finditer(section) if "---" not in row["theirs"]][1:]


@pytest.mark.parametrize("name", ["TRL", "verl"])
def test_every_key_of_ours_exists_or_the_row_says_that_there_is_none(name: str) -> None:
    known = {(key.table, key.name) for key in all_keys(registered_tables(load_plugins({})))}
    found = rows(name)
    assert len(found) > 30
    for theirs, ours in found:
        keys = OURS.findall(ours)
        assert keys or ours == "none" or "`retrain " in ours, theirs
        assert set(keys) <= known, (theirs, set(keys) - known)
