"""Calls between braces, keys bare and strings between two markers: how they are read, and held by a
grammar.
"""
