"""How the text of an answer is read: reasoning, calls of tools, content."""
