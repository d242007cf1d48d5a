"""Supervised steps before the first one."""
