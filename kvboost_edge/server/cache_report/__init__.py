"""The prefix doctor: why a prompt was read again."""
