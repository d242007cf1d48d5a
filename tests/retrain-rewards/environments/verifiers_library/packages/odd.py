"""Classic: a story without a chat, a set for evaluation only, pictures, and a kind that needs a sandbox."""

from typing import Any

import verifiers as vf
from datasets import Dataset

PICTURE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
PROMPTS = {"story": "Once upon a", "pictures": [{"role": "user", "content": [PICTURE]}]}


class SandboxEnv(vf.SingleTurnEnv):
    """Has the name of the library's own class, without the sandbox that it would start."""


def length(completion: Any) -> float:
    return float(len(completion[-1].content))


def load_environment(kind: str) -> vf.Environment:
    rows = Dataset.from_list([{"prompt": PROMPTS.get(kind, "1 + 1 = ?"), "answer": "2"}])
    made = SandboxEnv if kind == "sandbox" else vf.SingleTurnEnv
    return made(**{"eval_dataset" if kind == "evaluation" else "dataset": rows}, rubric=vf.Rubric(funcs=[length]))
