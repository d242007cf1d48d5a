"""Which groups are informative is decided on raw scores, exactly."""

from __future__ import annotations

from collections.abc import Callable

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from retrain.kernel.types import Group, GroupStatus, group_status, num_correct, verdicts

MakeGroup = Callable[..., Group]


STATUSES: dict[GroupStatus, list[tuple[float | str | None, ...]]] = {
    GroupStatus.INFORMATIVE: [(1, 0), (0.5, 0.5000000000000001), (1, None, 0)],
    GroupStatus.ALL_RIGHT: [(1, 1), (2.5, 2.5), (1, None, 1)],
    GroupStatus.ALL_WRONG: [(0, 0), (-1, -1), (0.0, -0.0)],
    GroupStatus.TIED: [(0.5, 0.5)],
    GroupStatus.NO_VERDICT: [(1, None, "broken"), (None, None), (1,), ()],
}


def test_the_cause_of_a_group(make_group: MakeGroup) -> None:
    found = {status: [group_status(make_group(*values)) for values in rows] for status, rows in STATUSES.items()}
    assert found == {status: [status] * len(rows) for status, rows in STATUSES.items()}


@settings(max_examples=50, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(values=st.lists(st.one_of(st.none(), st.just("broken"), st.sampled_from([0.0, 0.5, 1.0]), st.floats(-2, 2))))
def test_informative_means_two_different_verdicts(values: list[float | str | None], make_group: MakeGroup) -> None:
    group = make_group(*values)
    numbers = [value for value in values if isinstance(value, float)]
    assert verdicts(group) == numbers
    assert (group_status(group) is GroupStatus.INFORMATIVE) == (len(set(numbers)) > 1)
    assert num_correct(group) == sum(number > 0.5 for number in numbers)
