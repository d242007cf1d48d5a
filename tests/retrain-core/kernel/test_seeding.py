"""Streams: the same for the same keys on every machine, different for any other."""

import subprocess
import sys

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from retrain.kernel.seeding import Seeds, generator

PARTS = st.text(st.characters(exclude_categories=("Cs",)), max_size=5)
KEYS = st.lists(st.one_of(st.integers(), PARTS), max_size=4).map(tuple)

# Pinned: a change here changes every recorded run.
PINNED = {
    (0, "sample"): 6569037220625076913,
    (42, "sample", "example-1", 0, 3): 7155122986526516708,
    (42, "shuffle", 7): 373136876055104217,
    (2**31 - 1, "lora", "é"): 718619167908092571,
}
PINNED_DRAWS = [6, 0, 1, 5, 7, 9, 8, 4, 2, 3]


def test_seeds_and_streams_are_pinned_in_any_process():
    assert {key: Seeds(key[0]).derive(*key[1:]) for key in PINNED} == PINNED
    assert Seeds(1).stream("shuffle", 0).permutation(10).tolist() == PINNED_DRAWS
    code = "from retrain.kernel.seeding import Seeds; print(Seeds(42).derive('sample', 'example-1', 0, 3))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True, env={"PYTHONHASHSEED": "1"})
    assert int(done.stdout) == PINNED[42, "sample", "example-1", 0, 3]


@settings(max_examples=50)
@given(st.integers(0, 2**31 - 1), st.integers(0, 2**31 - 1), KEYS, KEYS)
def test_seeds_differ_by_root_and_by_every_key(root, other, keys, others):
    seed = Seeds(root).derive("p", *keys)
    assert 0 <= seed < 2**63
    assert seed == Seeds(root).derive("p", *keys)
    assert (Seeds(other).derive("p", *others) == seed) == ((other, *others) == (root, *keys))
    assert Seeds(root).derive("q", *keys) != seed


def test_streams_differ_by_every_key_and_are_uncorrelated():
    seeds = Seeds(1)
    assert len({seeds.derive("p", 1), seeds.derive("p", "1"), seeds.derive("p1"), seeds.derive("p", 1, "")}) == 4
    assert seeds.derive("p", "a", "b") != seeds.derive("p", "ab")
    draws = np.array([generator(Seeds(0).derive("sample", i)).standard_normal(256) for i in range(64)])
    correlations = np.corrcoef(draws)[np.triu_indices(64, 1)]
    assert abs(correlations.mean()) < 0.01
    assert np.abs(correlations).max() < 0.4
    drawn = {Seeds.from_config(-1).root for _ in range(20)}
    assert len(drawn) > 10
    assert all(0 <= root < 2**31 for root in drawn)
    assert Seeds.from_config(7) == Seeds(7)
