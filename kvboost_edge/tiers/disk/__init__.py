"""The disk tier: append-only segment files, an index in memory, one owner per directory."""
