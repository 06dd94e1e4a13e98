"""Harmony (gpt-oss): turns of several messages in channels, their parser and grammar."""
