"""Paired measurements of statecore: `python -m bench --help`."""
