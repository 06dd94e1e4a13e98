"""Native runner: model families on the project's own kernels, without torch."""
