"""Tasks of several requests: embedding and reranking, documents, verification, quality gate."""
