"""How log-probs are computed. Only this folder knows how rows are laid out for a model's forward pass."""
