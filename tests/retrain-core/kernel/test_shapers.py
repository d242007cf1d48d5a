"""Shapers: what changes rewards between scoring and credit, and what stays raw."""

import pytest

from retrain.kernel.errors import PluginError
from retrain.kernel.progress import merge_fields
from retrain.kernel.types import GroupStatus, Score, group_status, num_correct, verdicts
from retrain.run.assemble import NamedShaper
from tests.kit.overlapped import GENERATIONS, lines, steps

SHAPERS = """
from retrain.api import Score, hookimpl

class Shaper:
    def __init__(self, offsets):
        self.offsets = offsets
    def shape(self, step, groups):
        return tuple(
            group.shaped([Score.of(score.value + self.offsets[i % len(self.offsets)])
                          for i, score in enumerate(group.scores)])
            for group in groups
        ), {f"shaped_{len(self.offsets)}": float(len(groups))}

@hookimpl
def retrain_shape_rewards(context, backend):
    assert backend.capabilities and context.config
    return [Shaper([1.0, -2.0]), Shaper([0.25])]
"""


def test_credit_sees_the_shaped_rewards_and_the_records_the_raw_ones(command, distribution, toy_arguments, tmp_path):
    plain = [*toy_arguments, "--max-steps", "2", "--save-every", "0", "--batch-size", "6", "--group-size", "8"]
    assert command(*plain, "--log-dir", "plain").code == 0
    distribution("retrain-shaping", {"shaping": SHAPERS})
    assert command(*plain, "--log-dir", "shaped").code == 0
    before, after = steps(tmp_path / "plain"), steps(tmp_path / "shaped")
    assert all(line["shaped_2"] == line["shaped_1"] == 6.0 for line in after)
    assert not any("shaped_1" in line for line in before)
    # The first step samples from the same policy, so its scores are the same; its gradient is not.
    for field in ("mean_reward", "correct_rate", "useful_groups"):
        assert after[0][field] == before[0][field], field
    first = next(line["step"] for line in before if line["loss"] is not None)
    assert after[first]["grad_norm"] != before[first]["grad_norm"]
    assert {r["reward"] for r in lines(tmp_path / "shaped", GENERATIONS)} <= {0.0, 1.0}


@pytest.mark.parametrize(
    ("body", "told"),
    [
        ("raise ValueError('too long')", r"shaping\.Shaper raised ValueError: too long \(.*shaping\.py:"),
        ("return groups", r"shaping\.Shaper did not return its 2 groups"),
        ("return groups[1:], {}", r"shaping\.Shaper did not return its 2 groups in their order"),
        ("return groups, [1.0]", r"shaping\.Shaper did not return .* a dict of fields"),
        ("return groups, {'loss': 1.0}", "metric 'loss' of a shaper exists already"),
        ("return groups, {'x': [1.0]}", r"metric 'x' of shaper shaping\.Shaper is list"),
    ],
)
def test_what_a_shaper_does_wrong_is_reported_with_its_name(body, told, make_group):
    made = {"__name__": "shaping"}
    source = f"class Shaper:\n    def shape(self, step, groups):\n        {body}\n"
    exec(compile(source, "/plugins/shaping.py", "exec"), made)
    named = NamedShaper(made["Shaper"]())

    def merged():
        _, fields = named.shape(3, (make_group(1.0, 0.0), make_group(0.0, 0.0)))
        merge_fields({"loss": 0.5}, merge_fields({}, fields, source=str(named)), source="a shaper")

    with pytest.raises(PluginError, match=told):
        merged()


@pytest.mark.parametrize(
    ("raw", "shaped", "status"),
    [
        ([0.0, 0.0, 0.0], [0.0, -0.5, -1.0], GroupStatus.ALL_WRONG),  # shaping alone teaches nothing
        ([1.0, 0.0, 0.0], [0.0, 0.0, 0.0], GroupStatus.INFORMATIVE),
        ([1.0, 0.0, 0.0], [None, 0.0, 0.0], GroupStatus.ALL_WRONG),  # the one that differed was left out
        ([1.0, 0.0, 0.0], [1.0, None, None], GroupStatus.NO_VERDICT),
        ([1.0, 0.0, 0.0], [None, None, None], GroupStatus.NO_VERDICT),
        ([1.0, None, 0.0], [0.5, None, 0.5], GroupStatus.INFORMATIVE),
    ],
)
def test_what_a_shaped_group_teaches_is_decided_on_the_raw_scores_of_what_is_left(make_group, raw, shaped, status):
    group = make_group(*raw)
    once = group.shaped([Score.no_verdict("left out") if v is None else Score.of(v) for v in shaped])
    twice = once.shaped(once.scores)
    for each in (once, twice):
        assert group_status(each) is status
        assert verdicts(each) == verdicts(group) == [v for v in raw if v is not None]
        assert num_correct(each) == num_correct(group)
    assert [score.value for score in twice.raw_scores] == raw
