"""Redis and Valkey tier: authenticated blocks on a server that several machines share."""
