"""Parsing and grammars of assistant turns: reasoning, content and tool calls."""
