"""Appending: normalize and rotate new queries and keys, write keys and values into their pages, keep summaries current."""
