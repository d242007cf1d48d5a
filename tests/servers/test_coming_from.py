"""The tables of keys for those who come from another trainer name fields that TRL and verl have: `nox -s referee`."""

from __future__ import annotations

import ast
import os
import re
import subprocess
from pathlib import Path

import pytest
import yaml

from tests.docs.reading import rows_of_keys

pytestmark = pytest.mark.server
NAME = re.compile(r"`([\w.]+)`")
NOT_FIELDS = {  # of the class that the page speaks of
    *("model", "peft_config", "train_dataset", "reward_funcs", "prompt", "BitsAndBytesConfig"),
    *("r", "lora_alpha", "use_rslora", "use_dora"),
    *("normalize_then_sum", "sequence", "server", "colocate"),
}
WHERE = "import trl, transformers; print(trl.__file__); print(transformers.__file__)"


def fields_of(file: Path) -> set[str]:
    """The fields that the classes of a file declare."""
    tree = ast.parse(file.read_text(encoding="utf-8"))
    return {
        node.target.id
        for node in ast.walk(tree)
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
    }


@pytest.mark.skipif("RETRAIN_TRL_PYTHON" not in os.environ, reason="RETRAIN_TRL_PYTHON names no Python that has TRL")
def test_every_field_of_trl_exists() -> None:
    command = [os.environ["RETRAIN_TRL_PYTHON"], "-c", WHERE]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    trl, transformers = (Path(line).parent for line in done.stdout.split())
    known = fields_of(trl / "trainer/grpo_config.py") | fields_of(transformers / "training_args.py") | NOT_FIELDS
    named = {name for theirs, _ in rows_of_keys("TRL") for name in NAME.findall(theirs)}
    assert named <= known, named - known


@pytest.mark.skipif("RETRAIN_VERL" not in os.environ, reason="RETRAIN_VERL names no checkout of verl")
def test_every_key_of_verl_exists() -> None:
    config = Path(os.environ["RETRAIN_VERL"]) / "verl/trainer/config"
    document = yaml.safe_load((config / "_generated_ppo_trainer.yaml").read_text(encoding="utf-8"))
    optional = fields_of(config / "algorithm.py")  # not in the file, where their default is None
    for theirs, _ in rows_of_keys("verl"):
        for name in NAME.findall(theirs):
            path = re.sub(r"^(actor|rollout)\.", r"actor_rollout_ref.\1.", name).split(".")
            inner = document
            for part in path[:-1]:
                inner = inner[part]
            assert path[-1] in inner or path[-1] in optional, name
