"""Campaigns: conditions x seeds from one file. The table stands; the orchestrator is to come."""
