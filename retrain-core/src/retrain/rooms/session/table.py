"""`[resume]`: continue an earlier run."""

from __future__ import annotations

from retrain.kernel.config.keys import Table, key


class ResumeTable(Table):
    """Continue an earlier run."""

    from_: str = key("", "Run folder to continue (`--resume DIR`).", alias="from", free_on_resume=True)
    anyway: bool = key(
        False, "Continue although configuration, code or data make it a different run.", free_on_resume=True
    )
