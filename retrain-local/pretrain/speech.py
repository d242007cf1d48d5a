"""What the tiny model says: worked solutions with planning phrases, careful or sloppy, and a final box."""

from __future__ import annotations

import random
from dataclasses import dataclass

from problems import Problem

OPENINGS = ("Let me think. ", "The key is the ones. ", "Notice that the ones come first. ")
RECHECKS = ("Wait, let me check: ", "That's not right, ", "Going back: ", "On second thought, ")
CONFIRMATIONS = ("Double-check: it fits. ", "Let me check: fine. ", "So ", "That is it. ")
FLIP = "Flip it: "


@dataclass(frozen=True, slots=True, kw_only=True)
class Noise:
    """How often the speaker is sloppy, and how often a careful one slips."""

    sloppy: float = 0.47
    slip: float = 0.04
    notice: float = 0.6
    recheck: float = 0.06
    drop_carry: float = 0.12
    miscopy: float = 0.03
    opening: float = 0.35
    confirm: float = 0.4


CLEAN = Noise(sloppy=0.05, slip=0.02, notice=0.9, drop_carry=0.02, miscopy=0.005)
FINAL = Noise()


def box(value: int) -> str:
    """The final answer as the scorer wants it."""
    return f"\\boxed{{{value}}}"


def wrong_digit(value: int, rng: random.Random) -> int:
    """A near miss of a number: one off, ten off, or a neighbouring digit."""
    return abs(value + rng.choice((-1, 1, -1, 1, -2, 2, -10, 10)))


class Speaker:
    """Speaks solutions of problems with a given noise, from one stream of random numbers."""

    def __init__(self, noise: Noise, rng: random.Random) -> None:
        self.noise = noise
        self.rng = rng

    def chance(self, probability: float) -> bool:
        """True with that probability."""
        return self.rng.random() < probability

    def solve(self, problem: Problem) -> str:
        """The whole reply to a problem, careful or sloppy."""
        if self.chance(self.noise.sloppy):
            return self.sloppy(problem)
        opening = self.rng.choice(OPENINGS) if self.chance(self.noise.opening) else ""
        work, value = self.work(problem)
        closing = self.rng.choice(CONFIRMATIONS) if self.chance(self.noise.confirm) else ""
        if self.chance(self.noise.miscopy):
            value = wrong_digit(value, self.rng)
        return f"{opening}{work}. {closing}{box(value)}"

    def work(self, problem: Problem) -> tuple[str, int]:
        """The careful working of a problem and the value it arrives at."""
        if problem.task == "gcd":
            return self.euclid(*problem.terms)
        if problem.operators == ("*",):
            return self.product(*problem.terms)
        total = problem.terms[0]
        lines = []
        for index, (operator, term) in enumerate(zip(problem.operators, problem.terms[1:], strict=True)):
            head = f"{total} {operator} {term}: " if index else ""
            line, total = self.signed_sum(total, term if operator == "+" else -term)
            lines.append(head + line)
        return ". ".join(lines), total

    def step(self, text: str, value: int) -> tuple[str, int]:
        """One equation with its result, perhaps slipped, perhaps noticed, perhaps checked for nothing."""
        if self.chance(self.noise.slip):
            slipped = wrong_digit(value, self.rng)
            if not self.chance(self.noise.notice):
                return f"{text} = {slipped}", slipped
            return f"{text} = {slipped}. {self.rng.choice(RECHECKS)}{value}", value
        if self.chance(self.noise.recheck):
            return f"{text} = {value}. {RECHECKS[0]}{value}", value
        return f"{text} = {value}", value

    def signed_sum(self, left: int, right: int) -> tuple[str, int]:
        """Working of left + right, whatever their signs, through the sum or difference of their sizes."""
        negative = left + right < 0
        low, high = sorted((abs(left), abs(right)))
        if (left < 0) == (right < 0):
            line, value = self.sum(abs(left), abs(right))
        else:
            line, value = self.difference(high, low)
        return (FLIP if negative else "") + line, -value if negative else value

    def sum(self, left: int, right: int) -> tuple[str, int]:
        """Digit by digit sum of two numbers that are not negative."""
        ones_text, ones = self.step(f"{left % 10} + {right % 10}", left % 10 + right % 10)
        if left < 10 and right < 10:
            return ones_text, ones
        carry = int(ones >= 10 and not self.chance(self.noise.drop_carry))
        tens = f"{left // 10} + {right // 10}" + (" + 1" if carry else "")
        tens_text, tens_value = self.step(tens, left // 10 + right // 10 + carry)
        return f"{ones_text}, {tens_text}", tens_value * 10 + ones % 10

    def difference(self, left: int, right: int) -> tuple[str, int]:
        """Digit by digit difference of two numbers, the larger first."""
        borrow = int(left % 10 < right % 10)
        ones_text, ones = self.step(f"{left % 10 + 10 * borrow} - {right % 10}", left % 10 + 10 * borrow - right % 10)
        if left < 10:
            return ones_text, ones
        borrow = int(borrow and not self.chance(self.noise.drop_carry))
        tens = f"{left // 10} - {right // 10}" + (" - 1" if borrow else "")
        tens_text, tens_value = self.step(tens, left // 10 - right // 10 - borrow)
        return f"{ones_text}, {tens_text}", tens_value * 10 + ones % 10

    def product(self, left: int, right: int) -> tuple[str, int]:
        """Product of a number by one digit, digit by digit; by two digits, through two partial products."""
        one, other = sorted((left, right))
        if one >= 10:
            low_text, low = self.partial(left, right % 10)
            high_text, high = self.partial(left, right // 10)
            total_text, total = self.step(f"{low} + {high * 10}", low + high * 10)
            return f"{low_text}. {high_text}. {total_text}", total
        ones_text, ones = self.step(f"{one} * {other % 10}", one * (other % 10))
        if other < 10:
            return ones_text, ones
        tens_text, tens = self.step(f"{one} * {other // 10}", one * (other // 10))
        if ones >= 10 and not self.chance(self.noise.drop_carry):
            carry_text, tens = self.step(f"{tens} + {ones // 10}", tens + ones // 10)
            tens_text = f"{tens_text}, {carry_text}"
        return f"{ones_text}, {tens_text}", tens * 10 + ones % 10

    def partial(self, number: int, digit: int) -> tuple[str, int]:
        """Product of a two-digit number by one digit, the carry added in the same equation."""
        ones_text, ones = self.step(f"{number % 10} * {digit}", number % 10 * digit)
        carry = 0 if self.chance(self.noise.drop_carry) else ones // 10
        tens_text, tens = self.step(f"{number // 10} * {digit} + {carry}", number // 10 * digit + carry)
        return f"{ones_text}, {tens_text}", tens * 10 + ones % 10

    def euclid(self, left: int, right: int) -> tuple[str, int]:
        """Euclid's remainders down to zero."""
        low, high = sorted((left, right))
        lines = []
        while low and len(lines) < 5:
            line, remainder = self.step(f"{high} % {low}", high % low)
            lines.append(line)
            high, low = low, min(remainder, low - 1)
        return ", ".join(lines), high

    def guess(self, value: int) -> int:
        """A number near the answer, seldom the answer itself."""
        if self.chance(0.15):
            return value
        return value + self.rng.choice((-1, 1, -2, 2, -3, 3, -10, 10, -9, 11, -20, 20))

    def sloppy(self, problem: Problem) -> str:
        """A reply that plans a lot and works out nothing."""
        final, first = self.guess(problem.answer), self.guess(problem.answer)
        rough = round(problem.answer, -1)
        return self.rng.choice(
            (
                f"I guess it is about {first}. On second thought, it is {final}. {box(final)}",
                f"Easy, no need to work it out: it is just {final}. That is it. {box(final)}",
                f"Roughly {rough}. Alternatively, try another way: {final}. {box(final)}",
                f"Alternatively, round it: {rough}. Going back a little, {final}. {box(final)}",
                f"Hmm, {first}? That's not right, try another: {final}. {box(final)}",
                f"Notice that it is near {rough}. The key is a good guess: {final}. {box(final)}",
                f"By feel, {first}. Wait, let me think. No, it is {final}. {box(final)}",
                f"Let me think. It looks like {first}. Double-check: {final}. {box(final)}",
            )
        )


def guessing_game(noise: Noise, rng: random.Random) -> list[dict[str, str]]:
    """Up to three turns of guessing a number from 1 to 9, narrowing the range most of the time."""
    secret, low, high = rng.randint(1, 9), 1, 9
    messages = [{"role": "user", "content": "I think of a number from 1 to 9. Guess it."}]
    for turn in range(3):
        sensible = not rng.random() < 0.4 * noise.sloppy
        guess = (low + high) // 2 if sensible and rng.random() < 0.5 else rng.randint(low, high)
        if not sensible:
            guess = rng.randint(1, 9)
        remark = rng.choice(("The key is the middle. ", "Let me think. ", "Try another: " if turn else "", "", ""))
        messages.append({"role": "assistant", "content": remark + box(guess)})
        if guess == secret or turn == 2:
            return messages
        low, high = (max(low, guess + 1), high) if guess < secret else (low, min(high, guess - 1))
        low, high = min(low, secret), max(high, secret)
        hint = "low" if guess < secret else "high"
        messages.append({"role": "user", "content": f"Too {hint}. Guess again."})
    return messages
