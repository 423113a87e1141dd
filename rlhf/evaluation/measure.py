"""What one policy does on one set of prompts, answer by answer, and the row that sums it up."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
from transformers import PreTrainedModel

from rlhf import config
from rlhf.data.book import PromptBook
from rlhf.errors import BadInput
from rlhf.evaluation.statistics import by_prompt, win_rate
from rlhf.models.sequences import Sequences
from rlhf.optimise.forward import divergence
from rlhf.progress import Clock
from rlhf.rewards.committee import Committee
from rlhf.rollout import Sampling, sample

if TYPE_CHECKING:
    from rlhf.rewards.gold import Gold

DIVERGENCE_BATCH = 128


class Measurement:
    """How far a call of `measure` is, for checkpoints: its sampling, and what gold has said."""

    def __init__(self) -> None:
        self.sampling = Sampling()
        self.gold: pd.DataFrame | None = None

    def state_dict(self) -> dict[str, Any]:
        return {
            "sampling": self.sampling.state_dict(),
            "gold": None if self.gold is None else self.gold.to_dict("list"),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.sampling.load_state_dict(state["sampling"])
        gold = state["gold"]
        self.gold = None if gold is None else pd.DataFrame(gold, dtype="float64")


@dataclass(frozen=True)
class Judges:
    """Who scores: the committee (proxy) and, where declared, gold."""

    committee: Committee
    gold: Gold | None

    @property
    def name(self) -> str:
        """Whose scores decide the win rate."""
        return f"gold:{self.gold.path}" if self.gold is not None else "proxy"


def measure(
    policy: PreTrainedModel,
    reference: PreTrainedModel,
    prompt_ids: Sequence[str],
    samples_per_prompt: int,
    *,
    book: PromptBook,
    judges: Judges,
    model: config.Model,
    evaluation: config.Evaluation,
    seed: int,
    clock: Clock,
    state: Measurement | None = None,
    on_step: Callable[[bool], None] = lambda precious: None,
) -> pd.DataFrame:
    """One row per answer: `contracts.ANSWERS` without checkpoint and split.

    kl is the exact KL to the reference summed over the answer's tokens, entropy the mean over them, in nats.
    The answers of a prompt stand next to each other. `state` is where it is at each call of `on_step`, which is
    told whether the state is precious: judges are asked about these answers next, or have just been. A saved one
    is continued.
    """
    codec = book.codec
    state = state or Measurement()
    keys = [key for key in prompt_ids for _ in range(samples_per_prompt)]
    prompts = [book.tokens(key) for key in keys]
    with clock("sampling"):
        completions = sample(
            policy,
            prompts,
            max_new_tokens=model.max_response_tokens,
            dtype=model.dtype,
            temperature=evaluation.temperature,
            eos_id=codec.eos_id,
            pad_id=codec.pad_id,
            seed=seed,
            batch_size=evaluation.sampling_batch_size,
            state=state.sampling,
            on_batch=lambda done, _: on_step(judges.gold is not None and done == len(prompts)),
        )
    texts = [codec.decode(completion.ids) for completion in completions]
    ended = [completion.ended for completion in completions]
    with clock("scoring"):
        members = judges.committee.member_scores(prompts, texts, ended)
        sequences = Sequences.from_rows(prompts, [c.ids for c in completions], codec.pad_id)
        device = next(policy.parameters()).device
        apart = divergence(
            policy, reference, sequences.to(device), model, DIVERGENCE_BATCH, evaluation.temperature
        )
        table = pd.DataFrame(
            {
                "prompt_id": keys,
                "response": texts,
                "ended": ended,
                "num_tokens": [len(c.ids) for c in completions],
                "proxy": members.mean(0).double().numpy(),
                "proxy_std": members.std(0, correction=0).double().numpy(),
                **{f"proxy/member_{i}": row.double().numpy() for i, row in enumerate(members)},
                "gold": np.nan,
                "kl": apart.kl.double().numpy(),
                "entropy": apart.entropy.double().numpy(),
                "logprob": apart.logprob.double().numpy(),
            }
        )
        if judges.gold is not None:

            def answered(scores: pd.DataFrame) -> None:
                state.gold = scores
                on_step(True)

            parts = judges.gold.score(
                [book.text(key) for key in keys], texts, ended, given=state.gold, on_call=answered
            )
            table["gold"] = parts["total"].to_numpy()
            for part in parts.columns.drop("total"):
                table[f"gold/{part}"] = parts[part].to_numpy()
    return table


def summarise(
    answers: pd.DataFrame,
    baseline: pd.DataFrame,
    initial: pd.DataFrame | None = None,
    *,
    judge: str,
    num_bootstrap: int,
    seed: int,
) -> dict[str, Any]:
    """The evaluation row of a policy against the incoming policy's answers to the same prompts.

    `initial` are those of r0's policy, where that is not the incoming one. Standard errors are over prompts. Win
    rates compare answers by gold where there is one.
    """
    score = "proxy" if judge == "proxy" else "gold"
    initial = baseline if initial is None else initial
    for other in (baseline, initial):
        if answers["prompt_id"].unique().tolist() != other["prompt_id"].unique().tolist():
            raise ValueError("answers and baseline are to different prompts, or in another order")
    if answers["prompt_id"].nunique() < 2:
        raise BadInput(
            "only one prompt to evaluate on",
            where="data.prompts",
            rule="intervals need at least two choose and two report prompts",
            mend="bring more prompts, or give the split a larger share in data.split_fractions",
        )
    wins, wins_initial = (
        win_rate(
            by_prompt(answers, score),
            by_prompt(other, score),
            num_bootstrap=num_bootstrap,
            seed=seed,
        )
        for other in (baseline, initial)
    )
    has_gold = judge != "proxy"
    row: dict[str, Any] = {
        "num_prompts": answers["prompt_id"].nunique(),
        "num_samples": len(answers),
        "proxy_mean": answers["proxy"].mean(),
        "proxy_se": standard_error(answers, "proxy"),
        "proxy_std_members": answers["proxy_std"].mean(),
        "gold_mean": answers["gold"].mean() if has_gold else None,
        "gold_se": standard_error(answers, "gold") if has_gold else None,
        "kl_nats": answers["kl"].mean(),
        "kl_se": standard_error(answers, "kl"),
        "length_mean": answers["num_tokens"].mean(),
        "length_ratio": answers["num_tokens"].mean() / baseline["num_tokens"].mean(),
        "entropy_nats": answers["entropy"].mean(),
        "ended_fraction": answers["ended"].mean(),
        "win_rate": wins.value,
        "win_rate_lower": wins.lower,
        "win_rate_upper": wins.upper,
        "win_rate_initial": wins_initial.value,
        "win_rate_initial_lower": wins_initial.lower,
        "win_rate_initial_upper": wins_initial.upper,
        "judge": judge,
    }
    for part in [name for name in answers.columns if name.startswith("gold/")]:
        row[part] = answers[part].mean()
    return row


def standard_error(answers: pd.DataFrame, column: str) -> float | None:
    """Of the mean, from the spread of prompt means; None with one prompt."""
    means = answers.groupby("prompt_id", sort=False)[column].mean()
    return float(means.std(ddof=1) / math.sqrt(len(means))) if len(means) > 1 else None
