"""The library: algorithms, models, rollouts, rewards, contracts, tracking. Knows nothing of Prefect or DVC."""
