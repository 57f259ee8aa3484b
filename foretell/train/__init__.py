"""Training of draft heads and draft models on a target's own answers (on-policy distillation)."""
