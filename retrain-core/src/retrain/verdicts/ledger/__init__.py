"""`ledger.jsonl`: what was run, looked at and concluded, in a chain of hashes."""
