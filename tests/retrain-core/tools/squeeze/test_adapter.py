"""Which folders are adapters, which factors belong together, and every way in which they do not."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from retrain.kernel.errors import ConfigError
from retrain.records.checkpoints import locate_adapter
from retrain.tools.squeeze.adapter import PREFIX, read_adapter
from tests.kit.problems import codes_in

Make = Callable[..., Path]
Random = Callable[..., tuple[np.ndarray, np.ndarray]]
Q = "layers.0.q_proj"


def _set(folder: Path, **changes: Any) -> None:
    file = folder / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def test_pairs_by_module(make_adapter: Make, random_factors: Random) -> None:
    layers = {Q: random_factors(0), "layers.0.mlp.up": random_factors(1, outer=3)}
    whole = np.ones((3, 2), np.int64)
    adapter = read_adapter(make_adapter(layers, lora_alpha=16, tensors={f"{PREFIX}lm_head.weight": whole}))
    assert [pair.module for pair in adapter.pairs] == ["layers.0.mlp.up", Q]
    assert [(pair.rank, pair.alpha, pair.scale) for pair in adapter.pairs] == [(4, 16.0, 4.0)] * 2
    assert [info.name for info in adapter.others] == [f"{PREFIX}lm_head.weight"]
    for pair in adapter.pairs:
        for found, wanted in zip(adapter.factors(pair), layers[pair.module], strict=True):
            np.testing.assert_array_equal(found, wanted)


def test_layers_are_in_the_order_of_their_numbers(make_adapter: Make, random_factors: Random) -> None:
    names = ["layers.2.q", "layers.10.q", "layers.1.v", "layers.1.q", "q", "layers.x"]
    adapter = read_adapter(make_adapter({name: random_factors(0) for name in names}))
    ordered = ["layers.1.q", "layers.1.v", "layers.2.q", "layers.10.q", "layers.x", "q"]
    assert [pair.module for pair in adapter.pairs] == ordered


def test_embeddings_and_convolutions(make_adapter: Make, random_factors: Random) -> None:
    stream = np.random.default_rng(0)
    tensors = {
        f"{PREFIX}embed.lora_embedding_A": stream.standard_normal((4, 50)),
        f"{PREFIX}embed.lora_embedding_B": stream.standard_normal((8, 4)),
        f"{PREFIX}conv.lora_A.weight": stream.standard_normal((4, 3, 5, 5)),
        f"{PREFIX}conv.lora_B.weight": stream.standard_normal((7, 4, 1, 1)),
        f"{PREFIX}q.lora_B.bias": stream.standard_normal(6),
    }
    adapter = read_adapter(make_adapter({"q": random_factors(0)}, tensors=tensors))
    shapes = {pair.module: tuple(f.shape for f in adapter.factors(pair)) for pair in adapter.pairs}
    assert shapes == {"embed": ((4, 50), (8, 4)), "conv": ((4, 75), (7, 4)), "q": ((4, 8), (6, 4))}
    assert [info.name for info in adapter.others] == [f"{PREFIX}q.lora_B.bias"]


@pytest.mark.parametrize(
    ("config", "scales"),
    [
        ({"lora_alpha": 8}, [2.0, 2.0]),
        ({"lora_alpha": 8, "use_rslora": True}, [4.0, 4.0]),
        ({"lora_alpha": 8, "alpha_pattern": {"q_proj": 1.0}}, [0.25, 2.0]),
        ({"lora_alpha": 8, "alpha_pattern": {"layers.0.q_proj": 2, ".*_proj": 4}}, [0.5, 1.0]),
        ({"lora_alpha": 8, "alpha_pattern": {"proj": 2, "^q_proj": 3}}, [2.0, 2.0]),
        ({"lora_alpha": 8, "r": 64, "rank_pattern": {"q_proj|v_proj": 4}}, [2.0, 2.0]),
        ({"lora_alpha": 0}, [0.0, 0.0]),
    ],
)
def test_scales_by_pattern(config: dict[str, Any], scales: list[float], make_adapter: Make, random_factors: Random):
    layers = {"layers.0.q_proj": random_factors(0), "layers.0.v_proj": random_factors(1)}
    adapter = read_adapter(make_adapter(layers, **config))
    assert [pair.scale for pair in adapter.pairs] == pytest.approx(scales)


def test_patterns_hold_as_in_peft(make_adapter: Make, random_factors: Random) -> None:
    peft = pytest.importorskip("peft.utils.other")
    names = ["q_proj", "layers.1.mlp.up", *(f"{part}_proj" for part in ("layers.0.q", "layers.0.qq", "layers.10.q"))]
    names.append("x.layers.0.q_proj")
    patterns = {"layers.0.q_proj": 1, r"layers\.\d.q_proj": 2, "q_proj": 3, "^layers.1.mlp.up": 4, "up": 5}
    layers = {name: random_factors(i) for i, name in enumerate(names)}
    adapter = read_adapter(make_adapter(layers, lora_alpha=9, alpha_pattern=patterns))
    found = {pair.module: pair.alpha for pair in adapter.pairs}
    assert found == {name: patterns.get(peft.get_pattern_key(patterns.keys(), name), 9) for name in names}


def test_the_newest_checkpoint_of_a_run_is_found(make_adapter: Make, random_factors: Random, tmp_path: Path) -> None:
    for name, step in (("run/adapter/checkpoint_step_5", 5), ("run/adapter/checkpoint_step_20", 20)):
        folder = make_adapter({Q: random_factors(step)}, name)
        (folder / "checkpoint.json").write_text(json.dumps({"next_step": step, "progress": {"unfinished": None}}))
    newest = tmp_path / "run/adapter/checkpoint_step_20"
    assert [locate_adapter(tmp_path / place) for place in ("run", "run/adapter", newest)] == [newest] * 3


def fault(folder: Path | str) -> list[str]:
    """The codes with which an adapter is refused; the message is harmless and has a fix."""
    with pytest.raises(ConfigError) as caught:
        read_adapter(folder)
    assert "fix: " in str(caught.value)
    assert "\x1b" not in str(caught.value)
    return codes_in(caught)


@pytest.mark.parametrize("place", ["tinker://abc/weights/final", "nowhere", "file", "."])
def test_places_without_an_adapter(place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").touch()
    assert len(fault(place)) == 1


BAD_CONFIGS: dict[str, Sequence[dict[str, Any]]] = {
    "squeeze.not-lora": ({"peft_type": "LOHA"}, {"peft_type": None}),
    "squeeze.lora-variant": ({"use_dora": True}, {"target_parameters": ["experts.up"]}),
    "squeeze.base-weights-in-factors": ({"init_lora_weights": "pissa_niter_4"}, {"init_lora_weights": "OLoRA"}),
    "squeeze.rank-differs": ({"r": 8}, {"rank_pattern": {"q_proj": 2}}),
    "squeeze.config-bad-value": (
        *({"r": 0}, {"r": True}, {"r": "4"}, {"rank_pattern": {"q_proj": 2.5}}, {"rank_pattern": ["q_proj"]}),
        *({"alpha_pattern": {"(": 2}}, {"alpha_pattern": {"q_proj": "2"}}, {"alpha_pattern": {"q\x1b": "x"}}),
        *({"lora_alpha": float("nan")}, {"lora_alpha": None}),
    ),
}


@pytest.mark.parametrize(("code", "changes"), [(code, each) for code, cases in BAD_CONFIGS.items() for each in cases])
def test_configurations_that_are_refused(
    code: str, changes: dict[str, Any], make_adapter: Make, random_factors: Random
) -> None:
    folder = make_adapter({Q: random_factors(0)})
    _set(folder, **changes)
    assert fault(folder) == [code]


@pytest.mark.parametrize("text", ["", "{", "[1]", "[" * 100_000, "\ud800"])
def test_a_configuration_that_is_no_json(text: str, make_adapter: Make, random_factors: Random) -> None:
    folder = make_adapter({Q: random_factors(0)})
    (folder / "adapter_config.json").write_bytes(text.encode("utf-8", "surrogatepass"))
    assert fault(folder) == ["squeeze.config-unreadable"]


A, B = "x.lora_A.weight", "x.lora_B.weight"
BAD_TENSORS: dict[str, Sequence[dict[str, tuple[int, ...]]]] = {
    "squeeze.unpaired-factor": ({A: (4, 8)}, {B: (4, 8)}, {A: (4, 8), "y.lora_B.weight": (6, 4)}),
    "squeeze.factor-shapes": (
        *({A: (4, 8), B: (4, 6)}, {A: (4,), B: (6, 4)}, {A: (4, 0), B: (6, 4)}),
        {A: (4, 8, 3, 3), B: (6, 4, 3, 3)},
    ),
    "squeeze.rank-differs": ({A: (2, 8), B: (6, 2)},),
    "squeeze.dora-weights": ({"x.lora_magnitude_vector": (6,)},),
    "squeeze.unknown-factor": ({"x.lora_A.default.weight": (4, 8)}, {"x.lora_E": (4, 1)}),
}


@pytest.mark.parametrize(("code", "shapes"), [(code, each) for code, cases in BAD_TENSORS.items() for each in cases])
def test_factors_that_do_not_belong_together(
    code: str, shapes: dict[str, tuple[int, ...]], make_adapter: Make, random_factors: Random
) -> None:
    tensors = {name: np.zeros(shape) for name, shape in shapes.items()}
    assert fault(make_adapter({Q: random_factors(0)}, tensors=tensors)) == [code]


def test_weights_that_are_missing_pickled_or_no_factors(make_adapter: Make, random_factors: Random) -> None:
    assert fault(make_adapter({}, "whole", tensors={"lm_head.weight": np.zeros((2, 2))})) == ["squeeze.no-factors"]
    folder = make_adapter({Q: random_factors(0)})
    pickled = (folder / "adapter_model.safetensors").rename(folder / "adapter_model.bin")
    assert fault(folder) == ["squeeze.pickled"]
    pickled.unlink()
    assert fault(folder) == ["squeeze.weights-missing"]
