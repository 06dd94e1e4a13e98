"""The `kvboost-edge bench` command, whose figures are comparable with those of llama-bench."""
