"""Somebody else's clients ask a server of ours: the package of OpenAI, and the evaluators that people use."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.client, pytest.mark.timeout(240)]
QUESTIONS = ["What is 2 + 2?", "What is 9 * 8?", "What is 30 + 12?", "What is 7 - 5?"]
SETTINGS = ["--max-tokens=24", "--temperature=1.0", "--data-instruction="]
TASK = """\
task: NAME
dataset_path: json
dataset_kwargs: {data_files: {test: FOLDER/sums.jsonl}}
test_split: test
doc_to_text: "{{question}}"
"""
SUMS = """
output_type: generate_until
doc_to_target: "{{answer}}"
generation_kwargs: {until: ["\\n\\n"], max_gen_toks: 24, do_sample: false, temperature: 0.0}
metric_list: [{metric: exact_match}]
"""
CHOICES = """
output_type: multiple_choice
doc_to_choice: [" 4", " 72", " 42"]
doc_to_target: 0
target_delimiter: ""
metric_list: [{metric: acc}]
"""


@dataclass
class Serving:
    url: str
    token: str
    greedy: list[str]


def retrain(*words: str, at: Path) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "retrain", *words]
    return subprocess.Popen(command, cwd=at, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


@pytest.fixture(scope="module")
def serving(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    folder = tmp_path_factory.mktemp("serving")
    (folder / "questions.txt").write_text("\n".join(QUESTIONS))
    sampled = retrain("sample", "builtin:tiny", "--prompts=questions.txt", "--greedy", "--raw", *SETTINGS, at=folder)
    lines = [json.loads(line) for line in (sampled.communicate()[0] or "").splitlines() if line.startswith("{")]
    greedy = [line["completions"][0] for line in sorted(lines, key=lambda line: int(line["index"]))]
    process = retrain("serve", "builtin:tiny", "--name=tiny", "--port=0", *SETTINGS, at=folder)
    assert process.stdout is not None
    first = next(line for line in process.stdout if line.startswith("Serving"))
    exported = next(process.stdout)
    yield Serving(url=first.split()[-1], token=exported.split("OPENAI_API_KEY=")[1].strip(), greedy=greedy)
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=30)
    assert process.returncode == 0, output
    assert output.strip().endswith("stopped")


def test_the_package_of_openai(serving: Serving) -> None:
    openai = pytest.importorskip("openai")
    client = openai.OpenAI(base_url=serving.url, api_key=serving.token, max_retries=0)
    assert [model.id for model in client.models.list()] == ["tiny", "base"]
    for question, wanted in zip(QUESTIONS, serving.greedy, strict=True):
        found = client.completions.create(model="tiny", prompt=question, temperature=0, max_tokens=24, logprobs=1)
        assert found.choices[0].text == wanted
        logprobs = found.choices[0].logprobs
        assert logprobs.token_logprobs == [max(tops.values()) for tops in logprobs.top_logprobs]
        pieces = client.completions.create(model="tiny", prompt=question, temperature=0, max_tokens=24, stream=True)
        assert "".join(piece.choices[0].text for piece in pieces) == wanted
    messages = [{"role": "user", "content": QUESTIONS[0]}]
    asked: dict[str, Any] = {"model": "tiny", "messages": messages, "temperature": 0, "max_completion_tokens": 24}
    chat = client.chat.completions.create(**asked, logprobs=True, top_logprobs=2)
    assert chat.choices[0].message.role == "assistant"
    content = chat.choices[0].logprobs.content
    assert "".join(entry.token for entry in content) == chat.choices[0].message.content
    assert all(entry.logprob == entry.top_logprobs[0].logprob for entry in content)
    stream = client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True})
    *chunks, last = list(stream)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == chat.choices[0].message.content
    assert last.usage == chat.usage
    with pytest.raises(openai.BadRequestError, match="top_p"):
        client.chat.completions.create(**asked, top_p=0.5)
    with pytest.raises(openai.NotFoundError, match="nope"):
        client.completions.create(model="nope", prompt="a")
    with pytest.raises(openai.AuthenticationError):
        openai.OpenAI(base_url=serving.url, api_key="wrong", max_retries=0).models.list()


def test_lm_eval(serving: Serving, tmp_path: Path) -> None:
    """Its greedy answers are ours, and its log-likelihoods those of the model's own forward pass."""
    pytest.importorskip("lm_eval")
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    from retrain_local.plugin import BUILTIN_MODELS

    model_folder = str(BUILTIN_MODELS["tiny"])
    rows = [
        {"question": question, "answer": wanted} for question, wanted in zip(QUESTIONS, serving.greedy, strict=True)
    ]
    (tmp_path / "sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for name, task in (("sums", SUMS), ("choices", CHOICES)):
        (tmp_path / f"{name}.yaml").write_text(TASK.replace("NAME", name).replace("FOLDER", str(tmp_path)) + task)
    arguments = f"model=tiny,base_url={serving.url}/completions,tokenizer={model_folder},num_concurrent=4,max_retries=1"
    command = [sys.executable, "-m", "lm_eval", "--model", "local-completions", "--model_args", arguments]
    command += ["--tasks", "sums,choices", "--include_path", str(tmp_path), "--log_samples", "--output_path", "out"]
    offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_HOME": str(tmp_path / "hub")}
    environment = {**os.environ, **offline, "OPENAI_API_KEY": serving.token}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    samples = {
        name: [
            json.loads(line) for line in next(tmp_path.glob(f"out/**/samples_{name}_*.jsonl")).read_text().splitlines()
        ]
        for name in ("sums", "choices")
    }
    assert [sample["filtered_resps"][0] for sample in samples["sums"]] == serving.greedy
    assert all(sample["exact_match"] == 1.0 for sample in samples["sums"])
    tokenizer = transformers.AutoTokenizer.from_pretrained(model_folder)
    model = transformers.AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32).eval()
    for sample in samples["choices"]:
        for choice, (given, _) in zip((" 4", " 72", " 42"), sample["filtered_resps"], strict=True):
            context = tokenizer(sample["doc"]["question"])["input_ids"]
            ids = tokenizer(sample["doc"]["question"] + choice)["input_ids"]
            with torch.no_grad():
                logprobs_TV = torch.log_softmax(model(torch.tensor([ids])).logits[0].double(), -1)
            wanted = sum(float(logprobs_TV[at - 1, ids[at]]) for at in range(len(context), len(ids)))
            assert float(given) == pytest.approx(wanted, abs=1e-3)
