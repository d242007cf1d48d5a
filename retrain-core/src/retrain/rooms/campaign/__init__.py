"""Campaigns: conditions x seeds from one file, every run in a process and a folder of its own."""
