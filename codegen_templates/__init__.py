"""Templates of the emitted files, read through `importlib.resources`.  Text only: no logic lives here."""
