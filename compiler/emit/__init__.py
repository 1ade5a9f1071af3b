"""Emission: the verified program as Python source and its account.  It decides nothing, it only writes down."""
