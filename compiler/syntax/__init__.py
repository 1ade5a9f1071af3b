"""Text to syntax tree: sources, diagnostics, the parser, overrides, the formatter."""
