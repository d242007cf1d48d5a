"""Loss and gradient of a whole step of `[distil]` equal those of TRL 1.16's SDPO and SDFT trainers.

Ours goes the way of a run, from scored groups: contexts by the shaper, rows, the teacher's pass, packs, the trainer,
in fp32. TRL gets the contexts: its `compute_loss` in float64 judges the loss and the weights that teach.
"""

from __future__ import annotations

import json
import subprocess
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.torch import load_file

from retrain.api import (
    Completion,
    Group,
    PluginContext,
    SampleRequest,
    SamplingParams,
    TrainBatch,
)
from retrain.credit.algorithm import build_algorithm
from retrain.credit.flow import build_flow
from retrain.credit.self_teacher import SelfTeacherShaper
from retrain_local.backend import LocalBackend
from retrain_local.factory import create_backend
from tests.servers.test_trl import (
    GROUP_SIZE,
    MAX_TOKENS,
    PYTHON,
    STOP,
    backend_context,
    backend_of,
    batch_of,
    flat,
    groups_of,
    write_model,
)

pytestmark = [
    pytest.mark.server,
    pytest.mark.skipif(not PYTHON, reason="RETRAIN_TRL_PYTHON names no Python with TRL; `nox -s referee` does"),
]
SIDE = Path(__file__).with_name("trl_distil_side.py")
DISTILLATION = 'advantage_mode = "distillation"'
GRPO = 'advantage_mode = "grpo"\nadvantage_params = {scale = "std", ddof = 1}\nloss = "ppo"'


@dataclass(frozen=True, kw_only=True)
class Case:
    """Keys of `[distil]`, and TRL's trainer."""

    keys: dict[str, Any]
    trainer: str = "sdpo"
    algorithm: str = DISTILLATION
    temperature: float = 1.0


CASES = {
    "sdpo": Case(keys={"teacher": "ema"}),
    "sdpo_base": Case(keys={"teacher": "base"}, temperature=0.8),
    "sdpo_live": Case(keys={"teacher": "live"}),
    "topk": Case(keys={"teacher": "ema", "mode": "topk", "top_k": 20, "alpha": 0.0}),
    "topk_tail": Case(keys={"teacher": "live", "mode": "topk", "top_k": 20, "alpha": 0.3, "tail": True}),
    "full": Case(keys={"teacher": "base", "mode": "full", "alpha": 0.5}, temperature=0.8),
    "full_reverse": Case(keys={"teacher": "ema", "mode": "full"}),
    "mixed": Case(keys={"teacher": "ema", "weight": 0.3}, algorithm=GRPO),
    "mixed_full": Case(keys={"teacher": "base", "mode": "full", "alpha": 0.0, "weight": 0.6}, algorithm=GRPO),
    "sdft": Case(keys={"teacher": "base", "mode": "topk", "alpha": 0.5}, trainer="sdft"),
    "sdft_skip": Case(keys={"teacher": "ema", "mode": "full", "alpha": 0.5, "skip_tokens": 3}, trainer="sdft"),
}


class Words:
    """A tokenizer whose text is the ids themselves, so that a context of the shaper is any row of tokens."""

    eos_token_id = STOP[0]
    chat_template = None

    def __call__(self, texts: list[str], **_: Any) -> dict[str, Any]:
        return {"input_ids": [[int(word) for word in text.split()] for text in texts]}


def context_of(folder: Path, case: Case) -> PluginContext:
    keys = case.keys | {"template": "17 {privileged} {prompt}" if case.trainer == "sdft" else "{prompt} {solution}"}
    if case.trainer == "sdpo":
        keys["solution_template"] = "23 {solution} 29"
    lines = "\n".join(f"{name} = {json.dumps(value)}" for name, value in keys.items())
    context = backend_context(folder, f"{case.algorithm}\n[distil]\n{lines}")
    training = context.config.training.model_copy(update={"temperature": case.temperature})
    data = context.config.data.model_copy(update={"instruction": ""})
    config = replace(context.config, tables={**context.config.tables, "training": training, "data": data})
    return replace(context, config=config, tokenizer=Words())


def worded(group: Group, request: SampleRequest) -> Group:
    """The group with prompts and texts of `Words`; its second example has a demonstration."""
    prompt = " ".join(map(str, request.prompt_T.tolist()))
    completions = tuple(
        replace(c, text=" ".join(map(str, c.tokens_T[c.action_T].tolist())), reference_logprobs_T=None)
        for c in group.completions
    )
    example = replace(group.example, prompt=prompt, info={"privileged": "31 37 41"})
    return replace(group, example=example, completions=completions)


@dataclass(frozen=True, kw_only=True)
class Referee:
    folder: Path
    groups: tuple[Group, ...]
    losses: dict[str, float]


@pytest.fixture(scope="module")
def referee(tmp_path_factory: pytest.TempPathFactory) -> Referee:
    """Samples whose policy has moved since, an average of adapters between, and TRL's losses of all cases."""
    folder = tmp_path_factory.mktemp("distil")
    write_model(folder / "model")
    backend = backend_of(folder, "")
    (folder / "average").mkdir()
    backend.save_adapter(folder / "average")
    rng = np.random.default_rng(0)
    requests = [
        SampleRequest(prompt_T=rng.integers(0, 490, size=n), seeds_G=tuple(int(x) for x in rng.integers(0, 2**62, 4)))
        for n in (7, 3, 12, 5)
    ]
    sampled = backend.sample(requests, SamplingParams(max_tokens=MAX_TOKENS, temperature=1.0))
    # One group all right, one all wrong: the first has a teacher for each row, the second for none.
    groups = list(groups_of(requests, sampled, [0, 3], rng))
    groups[2] = groups[2].shaped([replace(score, value=0.0) for score in groups[2].scores])
    groups[2] = replace(groups[2], raw_scores=groups[2].scores)
    groups = [worded(group, request) for group, request in zip(groups, requests, strict=True)]
    moving = backend_context(folder, 'advantage_mode = "grpo"')
    for _ in range(2):
        backend.train(batch_of(moving, groups_of(requests, sampled, [0, 1, 2, 3], rng)))
    (folder / "adapter").mkdir()
    backend.save_adapter(folder / "adapter")
    cases, samples = {}, {}
    for name, case in CASES.items():
        made = step_of(folder, case, tuple(groups))
        samples[name] = [sample_of(row, completion) for row, completion in made.pairs]
        cases[name] = case.keys | {"trainer": case.trainer, "temperature": case.temperature, "samples": name}
    (folder / "samples.json").write_text(json.dumps(samples))
    (folder / "cases.json").write_text(json.dumps(cases))
    done = subprocess.run([PYTHON, str(SIDE), str(folder)], capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return Referee(folder=folder, groups=tuple(groups), losses=json.loads((folder / "losses.json").read_text()))


@dataclass(frozen=True, kw_only=True)
class Made:
    backend: LocalBackend
    batch: TrainBatch
    pairs: list[tuple[Any, Completion]]


def step_of(folder: Path, case: Case, groups: tuple[Group, ...]) -> Made:
    """The rows of a step, by shaper and algorithm, with the average of TRL's second adapter."""
    context = context_of(folder, case)
    backend = create_backend(context)
    backend.sample_from(folder / "adapter")  # a start from an adapter would make it the reference
    trainer = backend._trainer
    assert trainer is not None
    assert trainer.teacher is not None
    stored = load_file(folder / "average/adapter_model.safetensors")
    for name, average in trainer.teacher.average.items():
        average.copy_(stored[name.replace(".default.", ".")])
    shaped, fields = SelfTeacherShaper(context, backend).shape(0, groups)
    assert fields["teacher_rate"] == (1.0 if case.trainer == "sdft" else pytest.approx(12 / 16, abs=0.13))
    credit = build_algorithm(build_flow(context.config, context.plugins), context).assign(0, shaped)
    batch = TrainBatch(step=0, rows=credit.rows, temperature=case.temperature)
    completions = [completion for group in groups for completion in group.completions]
    assert len(credit.rows) == len(completions) == 4 * GROUP_SIZE  # every group is trained
    return Made(backend=backend, batch=batch, pairs=list(zip(credit.rows, completions, strict=True)))


def sample_of(row: Any, completion: Completion) -> dict[str, Any]:
    action_T = completion.action_T
    context = [] if row.teacher is None else row.teacher.tokens_T[~row.teacher.action_T].tolist()
    return {
        "prompt": completion.tokens_T[~action_T].tolist(),
        "completion": completion.tokens_T[action_T].tolist(),
        "context": context,
        "old": completion.logprobs_T[action_T].tolist(),
        "advantage": float(row.advantages_T[action_T][0]),
    }


@pytest.mark.parametrize("name", CASES)
def test_loss_and_gradient_equal_those_of_trl(referee: Referee, name: str) -> None:
    made = step_of(referee.folder, CASES[name], referee.groups)
    trainer = made.backend._trainer
    assert trainer is not None
    loss, _, gaps_N = trainer.accumulate(made.batch)
    assert np.abs(gaps_N).max() > 0.1  # off-policy
    theirs = load_file(str(referee.folder / f"{name}.safetensors"))
    ours = {key: p.grad.double() for key, p in trainer.parameters.items() if p.grad is not None}
    theirs = {key: value for key, value in theirs.items() if ".teacher." not in key}
    assert set(ours) == set(theirs)
    errors = {
        "loss": abs(loss - referee.losses[name]) / abs(referee.losses[name]),
        "gradient": float((flat(ours) - flat(theirs)).norm() / flat(theirs).norm()),
    }
    print(f"{name}: loss {referee.losses[name]:.6f}, relative errors {errors}")
    assert errors["loss"] < 1e-5
    assert errors["gradient"] < 1e-5
