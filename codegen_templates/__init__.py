"""Texts of emitted files: templates, and the library that programs of torch alone import."""
