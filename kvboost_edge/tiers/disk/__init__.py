"""Disk tier: append-only segment files, an index in memory, and one owner per directory."""
