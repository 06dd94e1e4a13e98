"""Harmony format (gpt-oss): parser and grammar for turns with several messages in channels."""
