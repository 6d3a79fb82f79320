"""Chooses a policy for a user's own model and text: candidates, what they cost, and a race of measurements between them."""
