"""The stand-in of the quick tests does what PRIME-RL's trainer does, and batches arrive in its own types."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from safetensors import safe_open

from retrain.api import TrainBatch
from retrain_prime_rl.packing import Layout, encode, pack
from tests.end_to_end.running import retrain
from tests.kit.sampled_rows import make_row
from tests.prime_rl.checkout import NEEDS_CHECKOUT, theirs
from tests.prime_rl.their_trainer import TheirTrainer
from tests.prime_rl_stack import rank, wire_check
from tests.prime_rl_stack.stack import Server, Stack, serving

pytestmark = [pytest.mark.server, NEEDS_CHECKOUT]
TYPES = ("prime_rl.transports.rollouts.types", "prime_rl.transport.types")  # the latter before v0.8.1.dev44


@pytest.mark.parametrize("all_weights", [False, True], ids=["lora", "all-weights"])
def test_both_leave_the_same_files_at_the_start_and_after_three_steps(tmp_path, all_weights):
    seen = []
    for name in ("theirs", "ours"):
        folder = tmp_path / name
        folder.mkdir()
        lora = {"lora": ""} if all_weights else {}
        stack = TheirTrainer(folder=folder, checkpoints="", **lora) if name == "theirs" else Stack(folder=folder)
        with serving(folder) as server, closing(stack):
            seen.append(facts(stack, server, all_weights=all_weights))
    assert seen[0] == seen[1]


def facts(stack: Stack, server: Server, *, all_weights: bool) -> dict[str, Any]:
    """What lies in the output folder when the trainer has started, and when the run is done."""
    stack.write_toml(server)
    if not isinstance(stack, TheirTrainer):
        for number in range(stack.ranks):
            stack.start_rank(number)
        stack.start_trainer(*(["--all-weights"] if all_weights else []))
    else:
        stack.start_trainer()
    at_start = names(stack.output_dir / "broadcasts")
    outcome = retrain(cwd=stack.folder)
    assert outcome.code == 0, outcome.err
    steps = [line["step"] for line in stack.trained()]
    newest = stack.output_dir / "broadcasts" / "step_3"
    return {
        "at the start": at_start,
        "steps": steps,
        "broadcasts": names(stack.output_dir / "broadcasts"),
        "batches": names(stack.output_dir / "rollouts"),
        "weights": tensor_names(newest) if not all_weights else [],
        "is an adapter": (newest / "adapter_config.json").exists(),
        "is stable": (newest / "STABLE").exists(),
    }


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def tensor_names(folder: Path) -> list[str]:
    with safe_open(folder / "adapter_model.safetensors", framework="np") as file:
        return sorted(file.keys())


def test_both_read_the_same_fields_from_the_same_first_file(tmp_path):
    msgspec, rollouts = theirs("msgspec"), theirs("prime_rl.transports.rollouts")
    assert tuple(field.name for field in msgspec.structs.fields(rollouts.MicroBatch)) == wire_check.FIELDS
    first = theirs("prime_rl.trainer.ckpt").Progress().step
    assert rank._next_step(tmp_path, 1) == rank.FIRST_STEP == first
    config = theirs("prime_rl.configs.shared").FileSystemTransportConfig()
    receiver = rollouts.setup_micro_batch_receiver(tmp_path, 1, first, config)
    assert not receiver.can_receive()
    file = tmp_path / "rollouts" / f"step_{first}" / "rank_1.bin"
    file.parent.mkdir(parents=True)
    file.write_bytes(msgspec.msgpack.encode([]))
    assert receiver.can_receive()


def make_batch(lengths: tuple[int, ...]) -> TrainBatch:
    rows = tuple(make_row(length, seed=number) for number, length in enumerate(lengths))
    return TrainBatch(step=0, rows=rows, temperature=0.7)


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("padding", [1, 8])
def test_every_field_arrives_in_their_type(ranks, padding):
    msgspec, types = theirs("msgspec"), theirs(*TYPES)
    layout = Layout(seq_len=24, ranks=ranks, pad_to_multiple_of=padding)
    sent = pack(make_batch((6, 9, 5, 11, 7)), layout)
    for ours in sent:
        arrived = msgspec.msgpack.decode(encode(ours), type=list[types.MicroBatch])
        assert [msgspec.structs.asdict(each) for each in arrived] == [msgspec.structs.asdict(each) for each in ours]
        assert msgspec.msgpack.encode(arrived) == encode(ours)


def test_padding_is_theirs():
    msgspec, types = theirs("msgspec"), theirs(*TYPES)
    batch = make_batch((6, 9, 5, 11, 7))
    ((*plain,),) = pack(batch, Layout(seq_len=64))
    ((*padded,),) = pack(batch, Layout(seq_len=64, pad_to_multiple_of=8))
    for ours, bare in zip(padded, plain, strict=True):
        arrived = msgspec.msgpack.decode(encode([bare]), type=list[types.MicroBatch])[0]
        by_them = theirs("prime_rl.trainer.batch").pad_micro_batch(arrived, 8)
        assert len(by_them.input_ids) % 8 == 0
        assert msgspec.structs.asdict(ours) == msgspec.structs.asdict(by_them)
