"""Bytes and counts as people read them."""


def amount(size: int) -> str:
    """A number of bytes, for instance `1.5 MiB`."""
    if size < 1024:
        return f"{size} B"
    units = ["KiB", "MiB", "GiB", "TiB"]
    while size >= 1024**2 and len(units) > 1:
        size //= 1024
        units.pop(0)
    return f"{size / 1024:,.1f} {units[0]}"


def count_words(number: int, noun: str) -> str:
    """For instance `1 rank`, `2 ranks`, `3 microbatches`."""
    if number == 1:
        return f"{number:,} {noun}"
    ending = "es" if noun.endswith("ch") else "s"
    return f"{number:,} {noun}{ending}"
