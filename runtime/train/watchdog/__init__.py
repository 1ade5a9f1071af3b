"""The watchdog of a run: ends all ranks soon after one has failed, and says which rank the
others wait for.
"""
