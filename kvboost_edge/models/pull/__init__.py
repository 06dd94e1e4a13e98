"""Download of models from the hub and other registries into the store of pulled models."""
