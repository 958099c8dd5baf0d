"""The tests, a package of its own: a dependency ships one of the same name, and the first one found is meant."""
