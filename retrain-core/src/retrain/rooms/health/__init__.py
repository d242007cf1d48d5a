"""Health: watches the numbers of a run for one that goes on and learns nothing, and says why."""
