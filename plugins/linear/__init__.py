"""Products of few tokens with large weights, and the norm before them: what a decode step of few sequences spends its time on."""
