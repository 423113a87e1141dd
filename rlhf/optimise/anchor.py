"""What holds a policy back: a reference that may follow it, and a KL budget."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from rlhf.errors import StageFailed


def following(start: PreTrainedModel) -> PreTrainedModel:
    """A reference of its own that begins as `start`; see `follow`."""
    return copy.deepcopy(start).eval()


@torch.no_grad()
def follow(reference: PreTrainedModel, policy: PreTrainedModel, decay: float) -> None:
    """Moves the reference: decay * reference + (1 - decay) * policy, weight by weight."""
    for mine, theirs in zip(reference.parameters(), policy.parameters(), strict=True):
        mine.lerp_(theirs, 1 - decay)


def models_state(policy: PreTrainedModel, moving: PreTrainedModel | None) -> dict[str, Any]:
    """Weights and mode of the policy, and the weights of a reference that moves, not copied."""
    return {
        "policy": dict(policy.state_dict()),
        "training": policy.training,
        "moving": None if moving is None else dict(moving.state_dict()),
    }


def load_models_state(
    policy: PreTrainedModel, moving: PreTrainedModel | None, state: Mapping[str, Any]
) -> None:
    """Put back what `models_state` gave. Raises ValueError if only one of the two has a moving reference."""
    if (moving is None) != (state["moving"] is None):
        raise ValueError("only one of the run and its saved state has a reference that moves")
    policy.load_state_dict(state["policy"])
    policy.train(state["training"])
    if moving is not None:
        moving.load_state_dict(state["moving"])


class Budget:
    """A bound on KL(policy || start) in nats per answer; without one, nothing is ever over it.

    Weights that were measured within the bound are kept, and put back once the policy is over it.
    """

    def __init__(self, limit_nats: float | None, policy: PreTrainedModel) -> None:
        self.limit_nats, self.policy = limit_nats, policy
        self.good: tuple[int, int, dict[str, Tensor]] | None = None
        self.stopped_at: tuple[int, int] | None = None
        """Step and updates of the weights that were put back, once the run was stopped."""

    def within(self, kl_nats: float, *, step: int, updates: int) -> bool:
        """Whether the policy as it is after step `step` may go on. Raises StageFailed at the first step."""
        if self.limit_nats is None:
            return True
        if kl_nats <= self.limit_nats:
            weights = {
                k: v.detach().to("cpu", copy=True) for k, v in self.policy.state_dict().items()
            }
            self.good = (step, updates, weights)
            return True
        if self.good is None or self.good[0] == 0:
            raise StageFailed(
                f"one step takes the policy {kl_nats:.3g} nats from its start\n"
                f"  rule: kl_budget_nats={self.limit_nats:g}\n"
                "  mend: lower learning_rate, or raise the budget"
            )
        *place, weights = self.good
        self.stopped_at = (place[0], place[1])
        self.policy.load_state_dict(weights)
        return False

    def state_dict(self) -> dict[str, Any]:
        """The weights to go back to, not copied."""
        return {"good": None if self.good is None else list(self.good)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a saved state."""
        good = state["good"]
        self.good = None if good is None else (good[0], good[1], good[2])
