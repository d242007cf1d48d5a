"""The `custom` reward: a function of the user's own module."""
