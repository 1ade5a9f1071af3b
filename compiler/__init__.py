"""The compiler: from a declarative plan to a readable distributed training program.

It neither imports torch nor knows the runtime: the emitted program is where the two meet.
"""

__version__ = "0.2.0"
