"""What each step makes of a text, exactly: rewrites, names and statements around a value, and answers in words."""

import pytest
from sympy import Basic

from retrain_rewards.answers import form, notation, rewrites, statements, text, units
from retrain_rewards.answers.notation import Notation, notation_of
from tests.kit.tables import cells

# A cell without an arrow is a text that stays as it is; `;` separates arguments and parts of a result.
EXACT = {
    rewrites.with_plain_numbers: r"""
    0.4\dot{6} => \frac{7}{15}  0.\overline{9} => 1  .\bar3 => \frac{1}{3}  12\frac{1}{8}\% => 12.125\%
    1\frac{1}{1024}\% => \frac{1025}{1024}\%  2\text{ trillion} => 2000000000000  3 thousand => 3000
    2 million => 2000000  1,200, 3,400 => 1200, 3400  5 \times 10^0 => 5  0 \times 10^{-3} => 0 \times 10^{-3}
    1.5 \times 10^{30} => 1500000000000000000000000000000  1.5 \times 10^{31} => 1.5 \times 10^{31}
    123456789012345678901234567890 \times 10^{1} => 1234567890123456789012345678900
    200000000000000000000000000000.0 \times 10^1 => 2 \times 10^{30}  0.123\ldots  1,200,x
    """,
    text.plain: r"""
        \\frac{1}{2} => \frac{1}{2}  ٣ => 3  \mathrm{x}\mathrm{y} => \text{x}\text{y}
        \text{5 cm} => 5\text{ centimeter}  \frac{{{1}}}{{2}} => \frac{1}{2}  {\}1} => \}1  }{a} => }{a}
        2½ => 2\frac{1}{2}  √((a)+√4)√9 => \sqrt{(a)+\sqrt{4}}\sqrt{9}
    """,
    rewrites.with_digits: r"""
    twenty and five  one thousand two million  two thousand three thousand  one hundred twenty-one => 121
    one hundred ten five  eleven one  negative two thirds => -\frac{2}{3}  three quarters => \frac{3}{4}
    two halves => \frac{2}{2}  one hundred and five => 105  zero => 0  two thousand and one => 2001
    one million two thousand => 1002000  twenty-one red apples => 21\text{ red apples}  twenty ten  ten five  hundred
    ten hundred  and five  two hundred zero  one third of halves
    ninety-nine thousand nine hundred ninety-nine => 99999  one billion two => 1000000002
    """,
    rewrites.with_plain_rows: r"""
    \{\begin{array}{c}5\end{array} => \begin{cases}5\end{cases}  \begin{array}{c}5\end{array} => 5
    \begin{cases}x=1\\y\end{cases}
    """,
    rewrites.with_plain_vectors: r"""
    -\vec{i}-\vec{j} => \begin{pmatrix}-1\\-1\end{pmatrix}  i+j => \begin{pmatrix}1\\1\end{pmatrix}  j+k  \mathbf{i}
    \mathbf{i}\mathbf{j}  1+2\mathbf{i}+\mathbf{j}
    """,
    rewrites.with_plain_intervals: r"""
    (-\infty,1)or(2,3) => (-\infty,1) \cup (2,3)
    """,
    rewrites.with_both_signs: r"""
    x = \pm 2 => x = 2, x = -2  1 \pm 2 \pm 3  1 \pm 2 \mp 3
    """,
    rewrites.pair_as_column: r"""
    (1,2,3) => \begin{pmatrix}1\\2\\3\end{pmatrix}
    """,
    statements.as_set: r"""
    x<-1 \text{ or } x>2 => x ; (-\infty,-1) \cup (2,\infty)  x < y => ;  x = 3 => ;  1 < x \le 2 => x ; (1,2]
    3 \ge x => x ; (-\infty,3]  x \ne 1 \text{ or } x > 2 => ;  x = 3 \text{ or } x > 5 => x ; \{3\} \cup (5,\infty)
    x = 3 \text{ and } x < 5 => ;  x = y \text{ or } x > 5 => ;  1 < x \text{ and } y < 3 => ;
    x > 1 \text{ and } x > 2 => ;  x \ne 1 \text{ and } x \ne 2 => x ; \mathbb{R} \setminus \{1,2\}
    x < \infty => x ; (-\infty,\infty)  |x| < y => ;  x < 1 < 2 => ;  0 < 1 < x < 2 => ;  1 < x < y+1 => ;
    3 \ne x => x ; \mathbb{R} \setminus \{3\}  5 > x >= 2 => x ; [2,5)
    \{x : |x| >= 2\} => x ; (-\infty,-2] \cup [2,\infty)  |x| \le 2 => x ; [-2,2]  1 < x > 2 => ;
    x<1 \text{ or } y>2 => ;  x \ne 3 => x ; \mathbb{R} \setminus \{3\}
    |t| > \frac{1}{2} => t ; (-\infty,-\frac{1}{2}) \cup (\frac{1}{2},\infty)
    """,
    statements.both_as_sets: r"""
    1<x<2 ; 1<y<2  1<x<2 ; x<y  x<y ; 1<x<2  1<x<2 ; x \in (1,2) => (1,2) ; x \in (1,2)  [1,2] ; 1<x<2 => [1,2] ; (1,2)
    """,
    statements.spellings: r"""
    5) => empty  f(1) \text{ or } f(2) => f(1) ; f(2)  1 or 2 or 3 or 4 => empty  \text{ or }5 => empty
    1 \text{ or } 2 \text{ (or } 35) => 1 ; 2 ; 35
    """,
    statements.decimals: r"""
    x \approx 5 =>  \frac{1}{3} \approx 33.3\% => \frac{1}{3} ; 33.3\% ; 0.333
    x = \sqrt2 \approx 1.4 => \sqrt2 ; 1.4 ; 1.4
    2\text{ cm} \approx 2.1\text{ cm} => 2\text{ cm} ; 2.1\text{ cm} ; 2.1
    """,
    statements.without_names: r"""
    x = y = 5 ; 5  5, k \in \mathbb{Z} ; 5  k, k \in \mathbb{Z} ; n, n \in \mathbb{Z}  f(x) = 5 ; 6 => 5 ; 6
    5 ; x = 6 => 5 ; 6  x^2 for all x ; x^2 => x^2 ; x^2
    """,
    notation.notation_of: r"""
    \emptyset => words no solution  0:1:2 => ratio 0 1 2  1.5:3:6 => ratio 1 2 4
    f=\begin{cases} 2 & \text{if } x>0 \\ 1 & x<0 \\ \end{cases} z => cases 1x<0 2x>0  \text{cat} => words cat
    \text{ ab } =>  the red, blue and old car. => words red blue and old car  yes => words yes
    none => words no solution  option b => choice B  B) 5 => choice B ; 5  (a) + 1 =>  5:30 pm => time 5 30 0 p
    5:30 =>  7 PM => time 7 0 0 p  the 5th of Mar => date march 5  May =>  2020 May 5 => date may 5 2020  May 1 2 3 =>
    5 cats in May =>  ma 5 =>  FF_{16} => numeral FF 16  F_{16} =>  0_2 => numeral 0 2  1 0_2 => numeral 10 2
    10_{37} =>  1_²=>
    """,
    notation.verdict_without_mathematics: r"""
    (A) 5 ; (A) 6 => 5 ; 6  (A) 5 ; (A) => True  5 ; (A) 6 => 5 ; 6  5 ; (A) => False  (A) cats ; cats => cats ; cats
    5:30 pm ; 5:30 am => False  5:05 ; 5:05:00 => True  101_2 ; 101 => True  101_2 ; 101_{2} => True
    5 ; May 5 => False  1:2:3 ; 2:4:6 => True  \text{all reals} ; \text{cats} => (-\infty,\infty) ; \text{cats}
    \frac34 ; 6:8 => \frac34 ; 6:8  3:4 ; 3:4 => 3:4 ; 3:4  3 ; 3:1 => 3 ; 3:1  \frac12 ; 1:2 => \frac12 ; \frac{1}{2}
    """,
    units.with_plain_unit: r"""
    5\text{inches square} => 5\text{ inch^2}  5\text{positive integers} => 5\text{ integer positive}
    5\text{degrees Celsius} => 5\text{ coulomb}  5\text{degrees} => 5\text{ degree}  5\text{kms} => 5\text{ kilometer}
    5\text{Mg} => 5\text{ Mgram}  5\text{m kg s A K mol} => 5\text{ ampere kelvin kilogram meter mole second}
    5\text{kg/m)s} => 5\text{ kilogram meter^-1 second}  5\text{square}  5\text{p.m.}  5\text{permille}
    5\text{m kg s A K mol cd}  5 m  2 x => 2 {x}  5 m^2 => 5\text{ meter^2}  5^\circ C => 5\text{ coulomb}  sin x
    5 a b c d e f g h km => 5 a b c d e f g h k{m}  5\frac{\text{m}}{\text{s}^2} => 5\text{ meter second^-2}
    10^{-3} km => 10^{-3}\text{ kilometer}  1 2 3 4 5 6 7 8 9 km => 1 2 3 4 5 6 7 8 9\text{ kilometer}  5^\text{ km}
    \pi km => \pi\text{ kilometer}  5 \circ => 5\text{ degree}  5\text{hbar}  x + foo + 2 x
    """,
    form.form_of: r"""
    \frac{6}{2} => Ratio(6, 2)  2\frac12 => Mixed(2, Ratio(1, 2))  ((1,2)) => ((), 1, 2)  (1,2,3) => ((), 1, 2, 3)
    -0 => 0  -(-5) => -1*(-5)  -(-x) => -1*(-1)*x  (6)/2 => Ratio(6, 2)  5/x => 5/x  x/2 => x/2  \{1;2\} => ({}, 1, 2)
    6\div2 => Computed(6\div2)  1,2;3 => (list, (list, 1, 2), 3)  x,y\in\{1\} => (list, x, (\in, y, 1))  e => E
    x\notin\{1\} => (\notin, x, ({}, 1))  \begin{pmatrix}1\\2\end{pmatrix}^T => Matrix([[1, 2]])  e^{x} => E**x
    2(3) => Computed(2 (3))  \frac{d}{dx} x => Derivative(x, x)  2 \times 10^5 => 2*10**5  R/r => R/r
    """,
    form.value_of: r"""
    R/r => r/r ; R/r  2\frac12 => 5/2 ; 2\frac{1}{2}
    """,
}
GROUPS = [value for module in (text, rewrites) for value in vars(module).values()]
REWRITES = {
    each: None
    for value in GROUPS
    for each in (value if isinstance(value, tuple) else (value,))
    if isinstance(each, rewrites.Rewrite)
}


def shown(result):
    if isinstance(result, Notation):
        value = f" ; {result.value}" if result.value else ""
        return f"{result.kind} {' '.join(map(str, result.form)).strip()}{value}"
    if result is None or isinstance(result, str | bool):
        return " ".join(str("" if result is None else result).split())
    if isinstance(result, Basic):
        return str(result)
    return " ; ".join(map(str, result)).strip() or "empty"


@pytest.mark.parametrize("read", EXACT, ids=lambda read: read.__name__)
def test_texts_are_read_exactly(read):
    for cell in cells(EXACT[read]):
        before, arrow, after = (side.strip() for side in cell.partition("=>"))
        assert shown(read(*before.split(" ; "))) == (after if arrow else before), cell


@pytest.mark.parametrize("each", REWRITES, ids=lambda each: each.example[0])
def test_each_rewrite_does_what_its_example_says(each):
    before, after = each.example
    assert each(before) == after != before


def test_brackets_are_matched_and_lists_split_outside_of_them():
    places = {(r"{a{b}c}d", 0): 6, ("((a)", 0): -1, ("((a)", 1): 3, (r"{\}}", 0): 3, ("x(a)y", 1): 3, ("{a(}b}", 0): 3}
    assert {place: rewrites.closing(*place) for place in places} == places
    assert rewrites.members("(1,2),[3,4],{5,6},a") == ["(1,2)", "[3,4]", "{5,6}", "a"]
    assert rewrites.members("1-(2+3)+4,5", "+-") == ["1", "(2+3)", "4,5"]


@pytest.mark.parametrize("sign", [1, -1])
def test_decimals_are_rounded_or_cut_off_but_not_off_by_one(sign):
    for digits in ("3", "3.0", "3.46", "0.46"):
        value, last = float(digits), 10.0 ** -len(digits.partition(".")[2])
        written = digits if sign > 0 else f"-{digits}"
        for off, fits in ((-0.51, False), (-0.5, True), (0, True), (0.99, True), (1, False)):
            assert statements.rounds_to(sign * (value + off * last), written) is fits
        assert not statements.rounds_to(-sign * value, f"{sign * value}")
    assert statements.rounds_to(0.001, "0.00")
    assert not statements.rounds_to(sign * 1j, "0")
    assert not statements.rounds_to(3 + 0.1j, "3")


def test_a_base_is_a_number_or_its_name():
    names = (
        "two three four five six seven eight nine ten eleven twelve binary ternary octal decimal sixteen hexadecimal"
    )
    bases = [notation_of(f"10 base {name}").form[1] for name in names.split()]
    assert bases == [*range(2, 13), 2, 3, 8, 10, 16, 16]
