"""Keys and values used again at other positions: what can be found, and how documents are cut for
it.
"""
