"""Contracts of the parts that built-in and outside plugins share: the objects that each kind's factory returns."""
