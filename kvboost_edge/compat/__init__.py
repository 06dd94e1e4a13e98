"""Interfaces of other systems, over this one's parts."""
