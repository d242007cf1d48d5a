"""One policy on several devices, a process for each: every rank samples its share and trains on its share."""
