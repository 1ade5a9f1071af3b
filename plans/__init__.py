"""Plans that ship with scalec, and in `models/` the models they share."""
