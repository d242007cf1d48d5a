"""The heartbeat of a run, and the deadlines of its phases."""
