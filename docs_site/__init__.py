"""The documentation site: MkDocs hooks, theme files and generated reference pages."""
