"""The mesh, its process groups, and all communication."""
