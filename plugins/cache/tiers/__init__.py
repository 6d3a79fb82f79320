"""Where pages live."""
