"""Settings that a plan leaves open, and plans with other settings: variants, lowered and measured.

Four concepts.  A `Variant` (`variant`) is a program with settings of its own; it is lowered when
somebody asks what the passes make of it, and measured when somebody asks for its memory or time.
A `Decision` (`variant`) sets what a plan leaves open, `auto` or nothing: it compares variants and
takes one of them (`decisions`).  The order of passes and decisions is in one table, `PASSES`
(`lowering`).  A `Change` (`changes`) is a section of a plan's text with other settings; `remedies`
and `advice` look for the changes that are worth it.

Passes know none of this: they take a program whose settings are decided, and are functions
Program → Program.
"""
