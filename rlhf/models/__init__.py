"""Language models as policies, scalar heads as critics and reward models, and the batches they read."""
