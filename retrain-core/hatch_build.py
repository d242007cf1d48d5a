"""Puts the plugin templates, which stand at the top of the repository, into the sdist and the wheel."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

PLACE = {"sdist": "templates", "wheel": "retrain/cli/scaffold/templates"}


class TemplatesHook(BuildHookInterface[Any]):
    """In the repository they are in `../templates`, in an unpacked sdist in `templates`."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Add the folder to what is built; an editable wheel reads the repository's own."""
        root = Path(self.root)
        folders = [folder for folder in (root / "templates", root.parent / "templates") if folder.is_dir()]
        if not folders:
            raise FileNotFoundError(f"no templates in {root} or beside it: build from the repository or from an sdist")
        if version != "editable":
            build_data["force_include"][str(folders[0])] = PLACE[self.target_name]
