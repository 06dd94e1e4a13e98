"""Health of replicas: membership, health checks, stall detection."""
