"""Native runner: runs supported model families on the project's own kernels, without torch."""
