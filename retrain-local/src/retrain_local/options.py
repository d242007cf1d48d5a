"""`[backend.options]` of the local backend."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class LocalOptions(BaseModel):
    """The local backend takes no options: all it needs stands in the other tables."""

    model_config = ConfigDict(extra="forbid", frozen=True)
