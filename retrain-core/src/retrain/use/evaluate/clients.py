"""What to type to let the evaluations of others judge a policy: `retrain serve`, and their client."""

from __future__ import annotations

import shlex

from retrain.kernel.registry import Plugins
from retrain.run.opened import subject_config
from retrain.run.subject import find_subject

NAME, PORT = "policy", 8000
URL = f"http://127.0.0.1:{PORT}/v1"
CLIENTS = ("lm-eval", "inspect")


def client_lines(client: str, named: str, checkpoint: str, plugins: Plugins) -> list[str]:
    """Two command lines with a word on each: the server, and the client in another terminal."""
    subject = find_subject(named, checkpoint)
    chosen = ["--checkpoint", checkpoint] if checkpoint else []
    serve = shlex.join(["retrain", "serve", named, *chosen, "--name", NAME, "--port", str(PORT)])
    if client == "lm-eval":
        base = subject_config(subject, plugins).config.model.model
        folder = plugins.locate_model(base) or base
        given = f"model={NAME},base_url={URL}/completions,tokenizer={folder},tokenized_requests=False"
        words = ["lm_eval", "--model", "local-completions", "--model_args", given, "--tasks", "gsm8k"]
        call = f"OPENAI_API_KEY=TOKEN {shlex.join(words)}"
    else:
        words = ["inspect", "eval", "inspect_evals/gsm8k", "--model", f"openai-api/retrain/{NAME}"]
        call = f"RETRAIN_API_KEY=TOKEN RETRAIN_BASE_URL={URL} {shlex.join(words)}"
    return ["# in one terminal; it prints the token that TOKEN below stands for", serve, "# in another", call]
