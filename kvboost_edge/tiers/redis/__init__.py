"""The Redis and Valkey tier: a server shared by machines, values sealed."""
