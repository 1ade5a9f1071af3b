"""`scalec lsp`: a language server for plans, on standard input and output."""
