"""Text: tokenizers, chat templates, incremental detokenization and stop strings."""
