"""Whether a plugin's distribution goes with this version of retrain-core, as its own metadata say."""

from __future__ import annotations

import re
from importlib.metadata import Distribution

from retrain import __version__

# `retrain-core<0.2,>=0.1.0`, as wheels have it; a requirement with a marker holds elsewhere, or for an extra.
REQUIREMENT = re.compile(r"retrain[-_.]+core(?![-\w.])\s*(?:\[[^\]]*\])?\s*\(?([^;)]*)\)?\s*", flags=re.IGNORECASE)


def unmet_requirement(distribution: Distribution) -> str:
    """What it requires of retrain-core and does not get, with the fix; empty when all is well."""
    for line in distribution.requires or ():
        found = REQUIREMENT.fullmatch(line)
        wanted = found.group(1).strip() if found else ""
        if wanted and wanted != f"=={__version__}" and not _is_met(wanted):
            return (
                f"it requires retrain-core {wanted}, and this is {__version__}; "
                f"fix: pip install --upgrade {distribution.name}, or install a retrain-core that it accepts"
            )
    return ""


def _is_met(wanted: str) -> bool:
    from packaging.specifiers import InvalidSpecifier, SpecifierSet  # only strangers need it

    try:
        return SpecifierSet(wanted).contains(__version__, prereleases=True)
    except InvalidSpecifier:
        return False
