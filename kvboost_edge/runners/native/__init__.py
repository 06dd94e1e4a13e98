"""The native runner: Llama and kin on the project's own kernels, without torch."""
