"""Documentation site: MkDocs hooks, theme files and generated reference pages."""
