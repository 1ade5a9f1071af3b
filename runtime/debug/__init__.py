"""The recorder, the sanitizer and the profiler: imported only where the environment asks for
them.
"""
