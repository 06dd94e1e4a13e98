"""Commands that ask a running server."""
