"""A conversation with a policy: its turns, and the commands that look at it or change it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import click
import numpy as np

from retrain.credit.algorithm import build_algorithm
from retrain.credit.flow import build_flow
from retrain.kernel import types
from retrain.kernel.contracts.tasks import Prompt, Streams
from retrain.kernel.errors import ConfigError, Problem, RetrainError
from retrain.run.opened import Opened
from retrain.run.seed_sources import sample_seed
from retrain.run.streaming import stream_from
from retrain.run.subject import BASE, BEST, Subject, SubjectKind, find_subject
from retrain.tasks.prompts import encode_prompts
from retrain.tasks.rollout import SingleTurn
from retrain.tasks.scoring.build import build_rewards, data_reward
from retrain.tasks.scoring.service import ScoringService
from retrain.text.chat import encode
from retrain.text.terminal_text import printable
from retrain.text.thinking import template_args, thinking_of
from retrain.text.tokenizer import context_length, token_texts
from retrain.use.serving.text_stream import TextStream

GROUP_SIZE = 8  # answers that share the credit of a question
DIM = "bright_black"
HELP = """\
/reset               forget the conversation
/system TEXT         another system prompt; without a text, none
/temperature T       of the answers; 0 takes the likeliest token each time
/compare NAME        answer twice, by NAME as well: base, best, a number of steps, a run or an adapter; off ends it
/entropy             shade uncertain tokens, or stop it
/credit ANSWER       the credit that the run's algorithm gives to answers to your last question, ANSWER being right
/save FILE           write the conversation, as `retrain sample --prompts FILE` reads it
/quit                leave; so does Ctrl-D. Ctrl-C stops an answer"""
UNSURE = 2.5  # nats; at this entropy the colour is full
FAINTEST = 0.04  # of the full colour; below it none is given
Colour = tuple[int, int, int]
# The other end of a scale that begins at white; black text on them has a contrast of more than 7.
ORANGE, GREEN, RED = (255, 145, 45), (70, 205, 110), (255, 130, 120)


@dataclass(slots=True, kw_only=True, eq=False)
class Spoken:
    """One answer: printed as it arrives, and measured."""

    stream: TextStream
    is_shaded: bool
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    entropies: list[float] = field(default_factory=list)
    reason: types.StopReason | None = None

    def take(self, request: int, place: int, piece: types.Sample, *, is_done: bool) -> bool:
        entropies = [0.0] * len(piece.tokens_T) if piece.entropies_T is None else piece.entropies_T.tolist()
        for token, entropy in zip(piece.tokens_T.tolist(), entropies, strict=True):
            self._show(self.stream.add(token), entropy)
        self.tokens += piece.tokens_T.tolist()
        self.logprobs += piece.logprobs_T.tolist()
        self.entropies += entropies if piece.entropies_T is not None else []
        if is_done:
            self._show(self.stream.finish(), 0.0)
            self.reason = piece.stop_reason
        return True

    def more(self) -> Sequence[types.SampleRequest]:
        return ()

    def _show(self, text: str, entropy: float) -> None:
        if text:
            click.echo(shaded(text, entropy / UNSURE, ORANGE) if self.is_shaded else harmless(text), nl=False)

    def summary(self) -> str:
        if not self.logprobs:
            return "no token"
        text = f"{len(self.tokens)} tokens, mean log-probability {np.mean(self.logprobs):.2f}"
        if self.entropies:
            text += f", entropy {np.mean(self.entropies):.2f} nats on average, {max(self.entropies):.2f} at most"
        return text


class Conversation:
    """The turns so far, and the policies that answer; the next turn reads the first one's answers."""

    def __init__(self, source: Opened, *, plain: bool) -> None:
        self._source = source
        data, training = source.config.data, source.config.training
        # An environment writes its chats whole, so training added neither prompt nor instruction.
        is_bare = plain or bool(source.config.environment.provider)
        self.system = "" if is_bare else data.system_prompt
        self._instruction = "" if is_bare else data.instruction
        self.temperature = training.temperature
        self.messages: list[types.Message] = []
        self._voices: list[tuple[str, Path | None]] = [(source.subject.label, source.subject.folder)]  # None: the base
        self._is_shaded = False
        self._question = ""
        self._turns = 0
        self._limit = context_length(source.config, source.plugins)

    def introduce(self) -> None:
        _say(f"{self._voices[0][0]}, temperature {self.temperature:g}. /help lists the commands.")
        if self.system:
            _say(f"System prompt: {self.system}")
        if self._instruction:
            _say(f"As in training, each question ends with: {self._instruction}")

    def hear(self, line: str) -> bool:
        if not line.startswith("/"):
            if line.strip():
                self.ask(line)
            return True
        word, _, rest = line[1:].strip().partition(" ")
        if word in ("quit", "exit", "q"):
            return False
        try:
            self._command(word, rest.strip())
        except RetrainError as error:
            _say(str(error))
        return True

    def _command(self, word: str, rest: str) -> None:
        match word:
            case "help":
                click.echo(HELP)
            case "reset":
                self.messages = []
                _say("forgotten")
            case "system":
                self.system = rest
                _say("another system prompt" if rest else "no system prompt")
            case "temperature":
                self._set_temperature(rest)
            case "compare":
                self.compare(rest)
            case "entropy":
                self._toggle_entropy(rest)
            case "credit":
                self._show_credit(rest)
            case "save":
                self._save(rest)
            case _:
                _say(f"there is no /{word}; /help lists the commands")

    def ask(self, question: str) -> None:
        text = f"{question}\n{self._instruction}" if self._instruction else question
        turn: list[types.Message] = [*self.messages, {"role": "user", "content": text}]
        try:
            source = self._source
            arguments = template_args(source.config, source.tokenizer)
            (ids,) = encode([self._with_system(turn)], source.tokenizer, arguments, names=["the conversation"])
            if self._limit is not None and len(ids) >= self._limit:
                what = f"the conversation has {len(ids)} tokens, and the context of the model is {self._limit}"
                fix = "start again with /reset, or send a shorter message"
                raise ConfigError(Problem(code="chat.too-long", what=what, fix=fix))
            tokens_T = np.asarray(ids, dtype=np.int64)
            answers = [self._answer(*voice, tokens_T) for voice in self._voices]
        except RetrainError as error:
            _say(str(error))
            return
        self._question = question
        self._turns += 1
        self.messages = [*turn, {"role": "assistant", "content": answers[0]}]

    def compare(self, name: str) -> None:
        if name in ("", "off"):
            del self._voices[1:]
            _say("one answer from now on")
            return
        other = self._found(name)
        # A policy that does not fit is refused now, not at the next question.
        self._source.use(other.folder)
        label = other.label if name != BASE else "the base"
        self._voices[1:] = [(label, other.folder)]
        _say(f"{label} answers, too")

    def _found(self, name: str) -> Subject:
        own = self._source.subject
        if own.kind is SubjectKind.RUN and (name in (BASE, BEST, "final") or name.isdecimal()):
            return find_subject(own.run or own.named, name)
        if name == BASE:
            return Subject(named=own.model, kind=SubjectKind.MODEL, model=own.model)
        found = find_subject(name)
        if found.model != own.model:
            what = f"{found.label} was trained on another model than {own.label}"
            fix = f"compare policies on the same base, {own.model!r}; this one is on {found.model!r}"
            raise ConfigError(Problem(code="chat.other-base", where="compare", what=what, fix=fix))
        return found

    def _with_system(self, turn: Sequence[types.Message]) -> list[types.Message]:
        return [*([{"role": "system", "content": self.system}] if self.system else []), *turn]

    def _answer(self, name: str, folder: Path | None, tokens_T: types.Tokens) -> str:
        self._source.use(folder)
        if len(self._voices) > 1:
            click.echo(click.style(f"{harmless(name)}:", bold=True))
        backend = self._source.backend
        params = types.SamplingParams(
            max_tokens=self._source.config.training.max_tokens,
            temperature=self.temperature or 1.0,
            greedy=self.temperature == 0.0,
            entropy=backend.capabilities.provides_entropy,
        )
        spoken = Spoken(stream=TextStream(self._source.tokenizer), is_shaded=self._is_shaded)
        seed = sample_seed(self._source.context.seeds.root, self._turns, 0)
        try:
            stream_from(backend, [types.SampleRequest(prompt_T=tokens_T, seeds_G=(seed,))], params, spoken)
        except KeyboardInterrupt:
            click.echo(spoken.stream.finish(), nl=False)
            click.echo(click.style(" (stopped)", fg=DIM), nl=False)
        click.echo()
        if spoken.reason is types.StopReason.LENGTH:
            _say("(cut off: --max-tokens)")
        if self._is_shaded:
            _say(spoken.summary())
        return spoken.stream.text

    def _set_temperature(self, text: str) -> None:
        value = -1.0
        with suppress(ValueError):
            value = float(text)
        if not 0.0 <= value <= 10.0:
            _say("a number from 0 to 10, please: /temperature 0.7")
            return
        self.temperature = value
        _say("the likeliest token each time" if value == 0.0 else f"temperature {value:g}")

    def _toggle_entropy(self, text: str) -> None:
        if not self._source.backend.capabilities.provides_entropy:
            _say("this engine reports no entropies")
            return
        self._is_shaded = text == "on" if text else not self._is_shaded
        _say("orange is where the policy was unsure" if self._is_shaded else "no shading")

    def _show_credit(self, reference: str) -> None:
        if not self._question or not reference:
            _say("send a question first, then give its answer: /credit 42")
            return
        self._source.use(self._voices[0][1])
        found = credit_of(self._source, self._question, reference, size=GROUP_SIZE, number=self._turns)
        _say(f"{GROUP_SIZE} answers, {found.condition}; green is credit, red is blame")
        largest = max((float(np.abs(a.credit_A).max()) for a in found.answers if a.credit_A.size), default=0.0)
        for number, answer in enumerate(found.answers, start=1):
            score = answer.score.outcome.value if answer.score.value is None else f"reward {answer.score.value:g}"
            click.echo(click.style(f"{number}. {score}, credit {answer.credit_A.sum():+.3f}", bold=True))
            click.echo(by_credit(answer.texts, answer.credit_A, largest))
        if largest == 0.0:
            _say(f"no credit: {found.status.value.replace('_', ' ')}")

    def _save(self, name: str) -> None:
        if not name or not self.messages:
            _say("nothing has been said" if name else "a file, please: /save chat.jsonl")
            return
        entry = {"messages": self._with_system(self.messages), "subject": self._source.subject.label}
        try:
            # Mode `x` never overwrites a file.
            with Path(name).expanduser().open("x", encoding="utf-8") as file:
                file.write(json.dumps(entry, ensure_ascii=False) + "\n")
        except (OSError, ValueError) as error:
            _say(f"{name} cannot be written: {getattr(error, 'strerror', None) or error}")
            return
        _say(f"saved in {name}")


def _say(text: str) -> None:
    click.echo(click.style(harmless(text), fg=DIM), err=True)


def harmless(text: str) -> str:
    """Return a text of one or more lines without characters that could steer a terminal."""
    return "\n".join(printable(line.replace("\t", "    ")) for line in text.split("\n"))


def shaded(text: str, depth: float, colour: Colour) -> str:
    if depth < FAINTEST or not text:
        return harmless(text)
    red, green, blue = (round(255 - (255 - end) * min(depth, 1.0)) for end in colour)
    # A background colour that crosses a line break fills the rest of the line.
    lines = harmless(text).split("\n")
    return "\n".join(click.style(line, fg="black", bg=(red, green, blue)) if line else "" for line in lines)


def by_credit(texts: Sequence[str], credit_A: types.Floats, largest: float) -> str:
    """Colour the texts of tokens: green for credit, red for blame, full at the `largest` shown."""
    # The square root keeps small credit visible next to the largest.
    depths_A = np.sqrt(np.abs(credit_A) / largest) if largest > 0.0 else np.zeros(len(credit_A))
    pairs = zip(texts, depths_A.tolist(), (credit_A > 0).tolist(), strict=True)
    return "".join(shaded(text, depth, GREEN if is_praise else RED) for text, depth, is_praise in pairs)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CreditedAnswer:
    score: types.Score
    texts: Sequence[str]
    credit_A: types.Floats


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CreditedGroup:
    condition: str
    status: types.GroupStatus
    answers: Sequence[CreditedAnswer]


def credit_of(source: Opened, question: str, reference: str, *, size: int, number: int) -> CreditedGroup:
    """Sample `size` answers as a step of the run would, score them with its reward, and give credit.

    `number` distinguishes the groups of a session. ConfigError when the run's tasks come from an environment: a
    question with an answer is not such a task.
    """
    config = source.config
    if config.environment.provider:
        what = "the tasks of this run come from an environment"
        fix = "look at the credit of its steps: retrain credit"
        where = config.place("environment.provider")
        raise ConfigError(Problem(code="chat.environment-tasks", where=where, what=what, fix=fix))
    algorithm = build_algorithm(build_flow(config, source.plugins), source.context)
    example = types.Example(id=f"chat-{number}", prompt=question, reference=reference)
    (tokens_T,) = encode_prompts([example], source.tokenizer, config)
    params = types.SamplingParams(
        max_tokens=config.training.max_tokens,
        temperature=config.training.temperature,
        entropy=source.backend.capabilities.provides_entropy,
    )
    rewards = build_rewards(config, source.context, data_reward(config, source.context))
    with ScoringService(rewards, config.scoring) as scoring:
        rollouts = SingleTurn(
            backend=source.backend,
            tokenizer=source.tokenizer,
            scoring=scoring,
            params=params,
            thinking=thinking_of(config, source.tokenizer),
        )
        with rollouts.batch("chat") as batch:
            streams = Streams(seeds=source.context.seeds, purpose="chat")
            (completions,) = batch.sample([Prompt(example=example, tokens_T=tokens_T)], size, streams)
            (scores,) = batch.scores()
    group = types.Group(
        example=example, completions=completions, scores=scores, correct_above=config.scoring.correct_above
    )
    credit = algorithm.assign(source.subject.steps or 0, [group])
    answers = [
        CreditedAnswer(
            score=score,
            texts=token_texts(source.tokenizer, completion.tokens_T[completion.action_T].tolist()),
            credit_A=tokens.advantages_A,
        )
        for completion, score, tokens in zip(completions, scores, credit.tokens_PG[0], strict=True)
    ]
    condition = algorithm.labels.get("condition", "")
    return CreditedGroup(condition=condition, status=credit.statuses_P[0], answers=answers)
