"""An adapter whose settings are damaged is refused with its folder."""

from __future__ import annotations

from pathlib import Path

import pytest

from retrain.kernel.errors import ConfigError
from retrain_local.export.merged import read_adapter_file


@pytest.mark.parametrize(
    "settings",
    ['{"peft_type": "LORA"}', '{"peft_type": "LORA", "lora_alpha": 1' + "0" * 400 + "}", "[" * 100_000, "[]"],
)
def test_damaged_settings_are_refused(tmp_path: Path, settings: str) -> None:
    (tmp_path / "adapter_config.json").write_text(settings)
    with pytest.raises(ConfigError) as caught:
        read_adapter_file(tmp_path)
    assert caught.value.problems[0].where == str(tmp_path)
