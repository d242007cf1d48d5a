"""The `reasoning_gym` source: any data set of that library by name."""

from __future__ import annotations

from typing import Any

from retrain.api import ConfigError, LoadedData, PluginContext, Problem, Table, key
from retrain_rewards.sources.collector import Collector, refuse_foreign_keys
from retrain_rewards.sources.reasoning_gym.entries import EntriesError, make_entries
from retrain_rewards.sources.reasoning_gym.library import LEVEL, check, from_plain
from retrain_rewards.sources.reasoning_gym.verifier import GymReward, data_set_of, harmless


class GymOptions(Table):
    """`[data.options]` of `reasoning_gym`."""

    name: str = key(..., "Data set of reasoning-gym, for example chain_sum.", min_length=1)
    size: int = key(1000, "Entries to make.", ge=1)
    seed: int = key(0, "Seed of the data set, independent of the run's.", ge=0)
    level: int = key(-1, "Difficulty by the data set's own curriculum, 0 the easiest; -1 = its defaults.", ge=-1)
    config: dict[str, Any] = key({}, "The data set's own options, for example {min_terms = 2}; they win over level.")


class ReasoningGym:
    """The entries of one data set, each in its example's `info`, and the data set's verifier.

    A data set without a single right answer leaves the reference empty, and its verifier uses the entry. An entry whose
    own answer must not reach the verifier (see `guards`; an unsolved integral) is left out, for no answer could be
    right.
    """

    def __init__(self, context: PluginContext) -> None:
        refuse_foreign_keys(context, "reasoning_gym", ("path", "prompt_key", "answer_key"))
        self.options: Any = context.params
        self.where = context.config.place("data.options")

    def load(self) -> LoadedData:
        """Make the entries; ConfigError on an unknown data set or option, or when the library cannot make them."""
        options = self.options
        check(options.name, options.config, options.level, where=self.where)
        config = {**options.config, "seed": options.seed, "size": options.size}
        if options.level >= 0:
            config |= {LEVEL: options.level}
        collector = Collector(source="reasoning_gym", has_verifier=True)
        try:
            for index, entry in enumerate(make_entries(options.name, config)):
                place = f"{options.name} entry {index}"
                question, answer = entry["question"], entry["answer"]
                if answer is not None and not harmless(data_set_of(from_plain(entry), options.name), answer):
                    collector.skip("no answer that may be verified", place=place)
                else:
                    collector.add(question, answer, place=place, task=options.name, info={"entry": entry})
        except EntriesError as error:
            what = f"reasoning-gym cannot make data set {options.name!r}: {error}"
            fix = "change its options or choose another"
            raise ConfigError(Problem(where=self.where, what=what, fix=fix)) from error
        read_from = f"{options.name}, seed {options.seed}"
        return collector.finish(where=self.where, read_from=read_from, reward=GymReward.of(options.name, config))
