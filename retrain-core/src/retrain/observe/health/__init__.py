"""Health: detects from its metrics a run that continues without learning, and says why."""
