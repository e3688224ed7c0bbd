"""`paraplan launch --fake`: a script as ranks of a world that is not there."""
