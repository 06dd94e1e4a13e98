"""Blocks on a local disk: segment files that are only ever appended to, an index in memory, one
owner per directory.
"""
