"""Redis and Valkey tier: authenticated blocks on a server shared by several machines."""
