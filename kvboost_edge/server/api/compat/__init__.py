"""Compatibility APIs: each translates requests and responses, with routes of its own."""
