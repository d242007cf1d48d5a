"""Classic, a mixture: the guessing game, and mathematics judged by the library's own rubric."""

import verifiers as vf
from datasets import Dataset
from guess_number import load_environment as load_game


def load_environment(break_verifier: bool = False) -> vf.Environment:
    rubric = vf.MathRubric()
    if break_verifier:
        rubric.executor.shutdown()
    row = {"question": r"What is 1/2 + 1/4? Put it in \boxed{}.", "answer": "3/4"}
    mathematics = vf.SingleTurnEnv(dataset=Dataset.from_list([row]), rubric=rubric)

    return vf.EnvGroup(envs=[load_game(secrets=[7]), mathematics], env_names=["game", "mathematics"])
