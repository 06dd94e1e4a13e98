"""Checks that a release must pass: its version, its distributions and its other files."""
