"""How a policy is changed: by reinforcement learning on a score, or directly from pairs."""
