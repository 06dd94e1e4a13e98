"""Interfaces of other projects, over this package's block pool."""
