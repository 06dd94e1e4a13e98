"""Compatibility APIs: translation of requests and responses."""
