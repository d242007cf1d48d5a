"""The `code` reward: the program of a completion against the tests of its example, in a sandbox."""
