"""Whether a difference can be believed: statistics, studies of runs, and the ledger of what was done."""
