"""The command line: dispatch, one file per command, and what a person sees while a run goes on."""
