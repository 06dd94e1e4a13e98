"""Disk tier: append-only segment files and an in-memory index, with one owner per directory."""
