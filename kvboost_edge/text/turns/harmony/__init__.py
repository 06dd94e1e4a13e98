"""Turns that are made of several messages, each in a channel: read, and held to by grammars."""
