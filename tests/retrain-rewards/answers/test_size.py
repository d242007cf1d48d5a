"""How large a number a formula may mean: formulas exactly at the limits, and just beyond them."""

import pytest

from retrain_rewards.answers.size import refusal
from tests.kit.tables import cells

# Powers of one digit have as many digits as the exponent says, so these bounds are exact for the 20,000 digits allowed.
HARMLESS = cells(r"""
    9^{20000}  x^{20000}  9^{19999x}  9^{9999}+9^{10001}  9**20000  {9^{20000}}^  {9^{20000}}^1  \binom{20000}{5}
    9^{\binom{14}{7}}  99^{0.0001}  9^{x^{20}}  9^{141^2}  9^{19998}x!  5000!  99999^{5!}  \frac{9^{19999}}{2}
    9^{1,999}
""")
REFUSED = cells(r"""
    9^{20001}  x^{20001}  9^{20000x}  9^{10000}+9^{10001}  9**20001  )9^{20001}  (2)^{20001}  \{2\}^{20001}  9^{19999}!
    9^{-20001}  \binom{20001}{5}  9^{\binom{15}{7}}  9^{0.00001}  9^{142^2}  6000!  9^{6!}  99^{10001}
    \frac{9^{20000}}{2}  9^{29,999}
""")


@pytest.mark.parametrize("formula", [*HARMLESS, *REFUSED])
def test_a_number_of_the_most_digits_is_harmless_and_one_digit_more_is_refused(formula):
    assert bool(refusal(formula)) is (formula in REFUSED)


def test_length_and_depth_have_their_limits_and_brackets_side_by_side_are_not_deep():
    assert not refusal("7" * 1000)
    assert refusal("7" * (1001))
    assert not refusal("0." + "7" * 400)
    deep = "(" * 20 + "5" + ")" * 20
    assert not refusal("(1)" * 30 + deep)
    assert refusal("(1)" * 30 + f"({deep})")
