"""What several test files share, by subject; `from helpers.SUBJECT.NAME import ...`."""
