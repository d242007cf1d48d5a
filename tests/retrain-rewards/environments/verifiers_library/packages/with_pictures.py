"""Classic, with pictures in its prompts."""

from __future__ import annotations

import verifiers as vf
from datasets import Dataset


def load_environment() -> vf.Environment:
    """One picture."""
    picture = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    rows = Dataset.from_list([{"prompt": [{"role": "user", "content": [picture]}], "answer": ""}])
    return vf.SingleTurnEnv(dataset=rows, rubric=vf.Rubric(funcs=[]))
