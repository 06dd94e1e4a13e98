"""Health of replicas: membership, health checks and stall detection."""
