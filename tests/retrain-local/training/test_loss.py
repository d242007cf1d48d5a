from __future__ import annotations

import pytest
import torch

from retrain.api import Config
from retrain.kernel.config.schema import AlgorithmTable
from retrain_local.training.loss import LossSettings, policy_loss

NEW, OLD, CREDIT = [-0.6, -0.9, -1.0, -0.1], [-1.0, -0.5, -2.0, -0.1], [1.0, -1.0, -1.0, 2.0]
IS_GRADIENT = [-1.491825, 0.670320, 2.718282, -2.0]
DOCUMENTED = [  # settings, sum of the loss, clipped tokens
    (LossSettings(), -0.103223, 0),
    (LossSettings(kind="ppo"), 0.318282, 2),
    (LossSettings(kind="ppo", high=1.28), 0.238282, 2),
    (LossSettings(kind="cispo", high=4.0), -2.226475, 0),
]


def loss_of(settings: LossSettings, new: list[float] = NEW) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Sum of the loss, gradient of it, clipped tokens."""
    new_N = torch.tensor(new, requires_grad=True)
    value, clipped = policy_loss(new_N, torch.tensor(OLD), torch.tensor(CREDIT), 1, settings)
    value.backward()
    assert new_N.grad is not None
    return value.detach(), new_N.grad, int(clipped)


@pytest.mark.parametrize(("settings", "total", "clipped"), DOCUMENTED)
def test_documented_vectors(settings: LossSettings, total: float, clipped: int) -> None:
    value, _, count = loss_of(settings)
    assert value.item() == pytest.approx(total, abs=2e-6)
    assert count == clipped


@pytest.mark.parametrize("settings", [LossSettings(), LossSettings(kind="cispo", high=4.0)])
def test_unclipped_losses_share_the_documented_gradient(settings: LossSettings) -> None:
    torch.testing.assert_close(loss_of(settings)[1], torch.tensor(IS_GRADIENT), atol=1e-5, rtol=0)


def test_ppo_stops_the_gradient_of_clipped_tokens() -> None:
    gradient = loss_of(LossSettings(kind="ppo"))[1]
    torch.testing.assert_close(gradient, torch.tensor([0.0, 0.0, 2.718282, -2.0]), atol=1e-5, rtol=0)


def test_cispo_keeps_the_gradient_of_clipped_tokens_at_the_cap() -> None:
    _, gradient, clipped = loss_of(LossSettings(kind="cispo", high=2.0))
    torch.testing.assert_close(gradient, torch.tensor([-1.491825, 0.670320, 2.0, -2.0]), atol=1e-5, rtol=0)
    assert clipped == 1


@pytest.mark.parametrize("kind", ["importance_sampling", "ppo", "cispo"])
def test_truncated_importance_weights_cap_the_mismatch(kind: str) -> None:
    high = 4.0 if kind == "cispo" else 1.2
    _, gradient, clipped = loss_of(LossSettings(kind=kind, high=high, tis_cap=2.0))
    factors = torch.tensor([1.491825, 0.670320, 2.0, 1.0])
    torch.testing.assert_close(gradient, -factors * torch.tensor(CREDIT), atol=1e-5, rtol=0)
    assert clipped == 1


@pytest.mark.parametrize("kind", ["importance_sampling", "ppo", "cispo"])
def test_the_mismatch_is_taken_to_the_engine_where_log_probabilities_were_recomputed(kind: str) -> None:
    high = 4.0 if kind == "cispo" else 1.2
    settings = LossSettings(kind=kind, high=high, tis_cap=2.0)
    new_N = torch.tensor(NEW, requires_grad=True)
    recomputed_N = torch.tensor(NEW)  # with the training model: no ratio is left but that to the engine
    value, clipped = policy_loss(new_N, recomputed_N, torch.tensor(CREDIT), 1, settings, torch.tensor(OLD))
    value.backward()
    factors = torch.tensor([1.491825, 0.670320, 2.0, 1.0])
    torch.testing.assert_close(new_N.grad, -factors * torch.tensor(CREDIT), atol=1e-5, rtol=0)
    assert clipped == 1


def test_without_a_cap_the_engines_own_numbers_count_for_nothing() -> None:
    given = torch.tensor(NEW), torch.tensor(OLD), torch.tensor(CREDIT), 1, LossSettings()
    alone, beside = policy_loss(*given), policy_loss(*given, torch.tensor(OLD) - 3.0)
    assert alone[0].item() == beside[0].item()


@pytest.mark.parametrize("kind", ["importance_sampling", "ppo", "cispo"])
def test_on_policy_every_loss_has_the_gradient_of_reinforce(kind: str) -> None:
    high = 4.0 if kind == "cispo" else 1.2
    _, gradient, clipped = loss_of(LossSettings(kind=kind, high=high), new=OLD)
    torch.testing.assert_close(gradient, -torch.tensor(CREDIT), atol=1e-6, rtol=0)
    assert clipped == 0


def test_settings_follow_the_configuration() -> None:
    def of(**values: object) -> LossSettings:
        return LossSettings.of(Config(tables={"algorithm": AlgorithmTable.model_validate(values)}))

    assert of() == LossSettings()
    assert of(loss="ppo", clip_eps=0.1, clip_eps_high=0.28) == LossSettings(kind="ppo", low=0.9, high=1.28)
    assert of(loss="cispo").high == 4.0
    assert of(loss="cispo", clip_eps_high=5.0, tis_cap=2.0) == LossSettings(kind="cispo", high=5.0, tis_cap=2.0)


def test_tokens_without_credit_stay_in_the_denominator() -> None:
    new = torch.tensor([0.4, -0.4, 1.0, 0.0])
    value, _ = policy_loss(new, torch.zeros(4), torch.tensor([1.0, 0.0, -1.0, 2.0]), 4, LossSettings())
    assert value.item() == pytest.approx(-0.193386, abs=1e-6)


def test_log_ratio_is_clamped() -> None:
    value, _ = policy_loss(torch.tensor([0.0]), torch.tensor([-500.0]), torch.tensor([-1.0]), 1, LossSettings())
    assert value.item() == pytest.approx(torch.tensor(20.0).exp().item())
