"""`[algorithm] level = "turn"`: a loss by sequence takes its ratio over the tokens of each turn."""

from __future__ import annotations

import numpy as np
import pytest

from retrain.api import Config, LossTrial, TrainBatch, TrainRow, load_plugins
from retrain.credit.configured_loss import check_loss
from retrain.kernel.config.resolved import Layer, Origin
from retrain.kernel.config.schema import AlgorithmTable, BackendTable
from retrain_local.training.step_loss import evaluate_loss


def row(turns: list[int] | None, credit: list[float], new: list[float]) -> tuple[TrainRow, np.ndarray]:
    count = len(credit)
    action_T = np.arange(count + 1) > 0
    made = TrainRow(
        tokens_T=np.arange(count + 1),
        action_T=action_T,
        logprobs_T=np.zeros(count + 1),
        advantages_T=np.array([0.0, *credit]),
        turns_T=None if turns is None else np.array([0, *turns]),
    )
    return made, np.array([0.0, *new])


def config(**keys: object) -> Config:
    return Config(
        tables={"algorithm": AlgorithmTable(**keys), "backend": BackendTable(backend="local")},
        origins={"algorithm.loss": Origin(layer=Layer.FILE, place="loss")},
    )


def value(level: str, *rows: tuple[TrainRow, np.ndarray]) -> tuple[float, list[list[float]]]:
    batch = TrainBatch(step=0, rows=tuple(r for r, _ in rows), temperature=1.0)
    trial = LossTrial(batch=batch, logprobs=[new for _, new in rows], packs=[list(range(len(rows)))])
    found = evaluate_loss(config(loss="gspo", clip_eps=0.5, clip_eps_high=0.5, level=level), load_plugins({}), trial)
    return found.loss, [gradient.tolist() for gradient in found.gradients]


def test_two_turns_in_one_row_have_the_ratios_of_two_rows() -> None:
    credit, new = [1.0, 1.0, -0.5, -0.5, -0.5], [0.2, -0.1, 0.3, 0.1, -0.3]
    whole, _ = value("turn", row([0, 0, 3, 3, 3], credit, new), row(None, [2.0], [0.1]))
    first, last = np.exp(np.mean(new[:2])), np.exp(np.mean(new[2:]))
    mean = (2 * 1.0 * first + 3 * -0.5 * last) / 5
    assert whole == pytest.approx(-(mean + 2.0 * np.exp(0.1)) / 2, abs=1e-12)


def test_a_row_of_one_turn_has_the_loss_of_the_sequence() -> None:
    rows = [row([4, 4], [1.0, 1.0], [0.2, -0.3]), row(None, [-1.0, -1.0, -1.0], [0.1, 0.0, 0.2])]
    assert value("turn", *rows) == value("sequence", *rows)


@pytest.mark.parametrize(("loss", "codes"), [("gspo", []), ("ppo", ["loss.no-level"])])
def test_a_loss_by_token_refuses_the_level(loss: str, codes: list[str]) -> None:
    found = check_loss(config(loss=loss, level="turn"), load_plugins({}))
    assert [problem.code for problem in found] == codes


def test_another_backend_refuses_it_by_name() -> None:
    given = config(loss="ppo", level="turn")
    tinker = Config(tables={**given.tables, "backend": BackendTable(backend="tinker")}, origins=given.origins)
    (problem,) = check_loss(tinker, load_plugins({}))
    assert (problem.code, problem.where) == ("backend.ignored-key", tinker.place("algorithm.level"))
