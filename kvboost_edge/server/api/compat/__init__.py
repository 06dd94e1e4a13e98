"""Compatibility APIs: translate requests and responses of other APIs."""
