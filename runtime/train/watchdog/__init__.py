"""The watchdog of a run: it ends all ranks soon after one has failed, and says which rank the
others wait for.
"""
