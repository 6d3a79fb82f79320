"""Appending: normalize and rotate new queries and keys, write keys and values into their pages, update summaries."""
