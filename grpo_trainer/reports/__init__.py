"""What a person sees of a run: progress, completions, the reward curve, and the figures of its end."""
