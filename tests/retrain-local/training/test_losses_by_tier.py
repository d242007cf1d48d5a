"""Value and gradient of every loss, and the sums of squared probabilities, in all tiers: transformers' own numbers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from retrain.api import LogprobRow, Seeds, TrainBatch, load_plugins
from retrain.run.tables import registered_tables
from retrain_local.training.packs import ActionTokens
from retrain_local.training.regularisers import Columns
from retrain_local.training.step_loss import PolicyLoss
from tests.kit.causal_types import small_model
from tests.kit.local_backend import REQUESTS, Local, saved
from tests.kit.plain_path import distance, joined, own_logprobs, plain_model

PLUGINS = load_plugins()
TABLE = registered_tables(PLUGINS)["algorithm"].model
TIERS = {"llama": "native", "gptj": "paged", "doge": "plain"}
LOSSES: dict[str, dict[str, Any]] = {
    **{name: {"loss": name} for name in ("sapo", "gmpo", "vespo", "dppo_tv", "dppo_kl", "m2po", "dro")},
    "luspo": {"loss": "luspo", "clip_eps": 0.2, "clip_eps_high": 0.28},
    "off_policy_mask": {"loss": "ppo", "off_policy_mask": 0.01},
}


@pytest.fixture(scope="module", params=TIERS)
def moved(request: Any, local: Local, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, TrainBatch, Any]:
    """A backend of a tier, samples that it has left behind by one update, and its model in transformers and PEFT."""
    folder = tmp_path_factory.mktemp(request.param)
    small_model(request.param).save_pretrained(folder / "model")
    backend = local.make(folder / "model")
    assert backend._pair.trained.tier == TIERS[request.param]
    for step in range(2):
        backend.train(local.roll(backend, requests=REQUESTS, max_tokens=12, step=step))
        backend.publish()
    batch = local.roll(backend, requests=REQUESTS, max_tokens=12, step=2)
    backend.train(batch)
    model = plain_model(folder / "model", saved(folder / "adapter", backend.save_adapter)).eval()
    return backend, batch, model


@pytest.mark.parametrize("name", LOSSES)
def test_value_and_gradient_are_those_of_transformers(
    name: str, moved: tuple[Any, TrainBatch, Any], local: Local
) -> None:
    backend, batch, model = moved
    config = local.context(tables={"algorithm": TABLE(**LOSSES[name])}).config
    loss, numbers = PolicyLoss.of(config, PLUGINS), range(len(batch.rows))
    model.zero_grad()
    rows = [own_logprobs(model, torch.from_numpy(row.tokens_T)) for row in batch.rows]
    now = [np.concatenate([[0.0], row.detach().numpy()]) for row in rows]
    dropped = torch.from_numpy(np.concatenate(loss.marked(batch, now, Seeds(0)).dropped))
    new_M = torch.cat([each[torch.from_numpy(row.action_T[1:])] for each, row in zip(rows, batch.rows, strict=True)])
    tokens = ActionTokens.of(numbers, batch.rows)
    wanted, clipped = loss.of_pack(new_M, tokens, loss.denominator(batch), columns=Columns(dropped_M=dropped))
    wanted.backward()
    theirs = joined({key: p.grad for key, p in model.named_parameters() if p.grad is not None})
    trainer = backend._trainer
    trainer._limits.train_tokens = 20  # several packs
    found_N, value, count = trainer.gradient(batch, numbers, loss)
    trainer._limits.train_tokens = 0
    sizes = [p.numel() for p in trainer.parameters.values()]
    ours = joined(dict(zip(trainer.parameters, torch.from_numpy(found_N).split(sizes), strict=True)))
    assert value == pytest.approx(wanted.item(), rel=1e-4, abs=1e-6)
    assert distance(ours, theirs) < 1e-4
    assert count == int(clipped)


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_sums_of_squared_probabilities(temperature: float, moved: tuple[Any, TrainBatch, Any]) -> None:
    backend, batch, model = moved
    rows = [LogprobRow(row.tokens_T, row.action_T) for row in batch.rows]
    for row, found_T in zip(rows, backend.squared_probs(rows, temperature), strict=True):
        with torch.no_grad():
            logits_TV = model(input_ids=torch.from_numpy(row.tokens_T)[None], use_cache=False).logits[0, :-1]
        wanted_T = torch.softmax(logits_TV.double() / temperature, -1).square().sum(-1).numpy()
        assert found_T[0] == 0.0
        np.testing.assert_allclose(found_T[1:], wanted_T * row.action_T[1:], rtol=1e-4)


def test_m2po_sees_that_the_sampler_is_stale_in_the_first_update(
    moved: tuple[Any, TrainBatch, Any], local: Local
) -> None:
    """With a weight of the mismatch the ratio is that of the updates, and nothing has moved before the first."""
    backend, batch, _ = moved
    trainer = backend._trainer
    found = {}
    for name, keys in (("plain", {}), ("weighted", {"tis_cap": 2.0})):
        table = TABLE(loss="m2po", loss_params={"tau": 1e-6}, **keys)
        loss = PolicyLoss.of(local.context(tables={"algorithm": table}).config, PLUGINS)
        own, trainer._loss = trainer._loss, loss
        found[name] = trainer._marked(batch)
        trainer._loss = own
    assert np.concatenate(found["plain"].dropped).any()
    assert not np.concatenate(found["weighted"].dropped).any()
