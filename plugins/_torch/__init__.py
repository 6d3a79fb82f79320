"""What the torch forms of several ops share."""
