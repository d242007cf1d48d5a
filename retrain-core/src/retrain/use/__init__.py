"""A trained model at work: evaluated, talked to, sampled, served, exported, called by agents.

Begin with `retrain.run.subject` (a run, checkpoint or model by its name) and `retrain.run.opened` (loaded, ready to
answer). Imports nothing of campaigns, and nothing of what reads finished runs but the ledger.
"""
