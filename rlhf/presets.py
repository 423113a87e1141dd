"""Named algorithms as data: `algorithm: grpo` fills in what a candidate leaves out.

A preset holds what makes the algorithm that algorithm, with the numbers of its paper; sizes, steps and
learning rates are the pipeline's own. What a candidate writes itself wins, key by key; only the
advantage and the losses of a preset stay what they are, because their name says so: with others,
name the algorithm otherwise and write its parts out.
`python -m flows validate --resolved` prints the result in full.
"""

from __future__ import annotations

import copy
import difflib
from collections.abc import Iterator, Mapping
from typing import Any

_KL_IN_REWARD = {"where": "reward", "estimator": "k1", "coef": 0.05}
_ONE_UPDATE = {"epochs_per_step": 1, "minibatches": 1}
_RL = {"kind": "rl", "truncated": {"kind": "keep"}, "aggregate": {"kind": "mean"}}
_NO_KL = {"kl": None, "reference": "none"}
_PAIRS = {"kind": "preference", "reference": "previous"}

PRESETS: dict[str, dict[str, Any]] = {
    # Schulman et al. 2017; RLHF form of Ouyang et al. 2022.
    "ppo": {
        **_RL,
        "advantage": {"kind": "gae", "gamma": 1.0, "gae_lambda": 0.95},
        "whiten_advantages": True,
        "loss": {"kind": "ppo_clip", "clip_low": 0.2, "clip_high": 0.2},
        "reduction": "token_mean",
        "reference": "previous",
        "kl": _KL_IN_REWARD,
        "value": {"coef": 1.0, "clip": 0.2, "warmup_steps": 0, "init": "reward_model"},
    },
    # Mnih et al. 2016: on-policy, returns minus values.
    "a2c": {
        **_RL,
        **_ONE_UPDATE,
        "advantage": {"kind": "gae", "gamma": 1.0, "gae_lambda": 1.0},
        "loss": {"kind": "reinforce"},
        "reduction": "token_mean",
        "reference": "previous",
        "kl": _KL_IN_REWARD,
        "entropy_coef": 0.01,
        "value": {"coef": 0.5, "clip": None, "warmup_steps": 0, "init": "reward_model"},
    },
    # Williams 1992, with a running mean of earlier returns as the baseline.
    "reinforce": {
        **_RL,
        **_ONE_UPDATE,
        "advantage": {"kind": "ema_baseline", "gamma": 1.0, "decay": 0.9},
        "loss": {"kind": "reinforce"},
        "reduction": "token_mean",
        "reference": "previous",
        "kl": _KL_IN_REWARD,
    },
    # Ahmadian et al. 2024.
    "rloo": {
        **_RL,
        **_ONE_UPDATE,
        "advantage": {"kind": "rloo"},
        "loss": {"kind": "reinforce"},
        "reduction": "token_mean",
        "reference": "previous",
        "kl": _KL_IN_REWARD,
    },
    # Shao et al. 2024.
    "grpo": {
        **_RL,
        "advantage": {"kind": "group_std"},
        "loss": {"kind": "ppo_clip", "clip_low": 0.2, "clip_high": 0.2},
        "reduction": "sequence_mean",
        "reference": "previous",
        "kl": {"where": "loss", "estimator": "k3", "coef": 0.04},
    },
    # Liu et al. 2025: no deviation, no division by the answer's own length.
    "dr_grpo": {
        **_RL,
        **_NO_KL,
        "advantage": {"kind": "group_mean"},
        "loss": {"kind": "ppo_clip", "clip_low": 0.2, "clip_high": 0.2},
        "reduction": "constant_length",
        "length_constant": "max_response_tokens",
    },
    # Yu et al. 2025: clip-higher, token mean, dynamic sampling, cut answers masked.
    "dapo": {
        **_RL,
        **_NO_KL,
        "advantage": {"kind": "group_std"},
        "loss": {"kind": "ppo_clip", "clip_low": 0.2, "clip_high": 0.28},
        "reduction": "token_mean",
        "truncated": {"kind": "mask"},
        "resample_batches": 3,
    },
    # Zheng et al. 2025.
    "gspo": {
        **_RL,
        **_NO_KL,
        "advantage": {"kind": "group_std"},
        "loss": {"kind": "gspo", "clip_low": 3e-4, "clip_high": 4e-4},
        "reduction": "sequence_mean",
    },
    # MiniMax 2025 (M1).
    "cispo": {
        **_RL,
        **_NO_KL,
        "advantage": {"kind": "group_std"},
        "loss": {"kind": "cispo", "clip_low": 1.0, "clip_high": 4.0},
        "reduction": "token_mean",
    },
    # Gao et al. 2025.
    "sapo": {
        **_RL,
        **_NO_KL,
        "advantage": {"kind": "group_std"},
        "loss": {"kind": "sapo", "tau_positive": 1.0, "tau_negative": 1.05},
        "reduction": "sequence_mean",
    },
    # Hu 2025.
    "reinforce_plus_plus": {
        **_RL,
        "advantage": {"kind": "reinforce_plus_plus", "gamma": 1.0},
        "loss": {"kind": "ppo_clip", "clip_low": 0.2, "clip_high": 0.2},
        "reduction": "token_mean",
        "reference": "previous",
        "kl": _KL_IN_REWARD,
    },
    # Dong et al. 2023 (RAFT): keep the best answer to each prompt, learn it, sample again.
    "rejection_sampling": {
        **_RL,
        **_NO_KL,
        "advantage": {"kind": "best_of_group"},
        "loss": {"kind": "nll"},
        "reduction": "token_mean",
    },
    # The same from one set of samples of the incoming policy: best-of-n, distilled.
    "best_of_n": {
        **_RL,
        **_NO_KL,
        "advantage": {"kind": "best_of_group"},
        "loss": {"kind": "nll"},
        "reduction": "token_mean",
        "steps": 1,
    },
    # Rafailov et al. 2023.
    "dpo": {**_PAIRS, "losses": [{"kind": "sigmoid", "beta": 0.1, "label_smoothing": 0.0}]},
    # Azar et al. 2023.
    "ipo": {**_PAIRS, "losses": [{"kind": "ipo", "beta": 0.1}]},
    # Meng et al. 2024.
    "simpo": {
        **_PAIRS,
        "reference": "none",
        "losses": [{"kind": "simpo", "beta": 2.0, "gamma": 1.0}],
    },
    # Hong et al. 2024.
    "orpo": {**_PAIRS, "reference": "none", "losses": [{"kind": "orpo", "beta": 0.1}]},
    # Ethayarajh et al. 2024.
    "kto": {
        **_PAIRS,
        "losses": [
            {"kind": "kto", "beta": 0.1, "desirable_weight": 1.0, "undesirable_weight": 1.0}
        ],
    },
    # Guo et al. 2024.
    "online_dpo": {
        "kind": "online_preference",
        "reference": "previous",
        "aggregate": {"kind": "mean"},
        "losses": [{"kind": "sigmoid", "beta": 0.1, "label_smoothing": 0.0}],
    },
}

_PARTS = ("advantage", "loss", "aggregate", "truncated")


def resolve(candidate: Mapping[str, Any]) -> dict[str, Any]:
    """A candidate as written, with its preset's keys where it has none of its own.

    Parts of the same kind are merged option by option; a part written as a name alone is spelled out.
    """
    written = {
        key: _spelled_out(value) if key in _PARTS else value for key, value in candidate.items()
    }
    if isinstance(written.get("losses"), list):
        written["losses"] = [_spelled_out(term) for term in written["losses"]]
    preset = copy.deepcopy(PRESETS.get(str(candidate.get("algorithm")), {}))
    return {**preset, **{k: _merged(preset.get(k), value) for k, value in written.items()}}


def differences(candidate: Mapping[str, Any]) -> list[str]:
    """Where a candidate departs from the preset it names: `key=its value (the preset's)`."""
    preset = PRESETS.get(str(candidate.get("algorithm")), {})
    return list(_differences(preset, resolve(candidate), ""))


def _differences(preset: Mapping[str, Any], mine: Mapping[str, Any], place: str) -> Iterator[str]:
    for key, value in preset.items():
        other = mine.get(key)
        if isinstance(value, dict) and isinstance(other, Mapping):
            yield from _differences(value, other, f"{place}{key}.")
        elif other != value:
            yield f"{place}{key}={_short(other)} ({_short(value)})"


def _short(value: Any) -> str:
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{k}: {_short(v)}" for k, v in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(_short, value)) + "]"
    return "null" if value is None else str(value)


def spelled_out_round(body: Mapping[str, Any]) -> dict[str, Any]:
    """A round as written, with a reward-model loss that is a name alone spelled out."""
    reward_model = body.get("reward_model")
    if not isinstance(reward_model, Mapping) or "loss" not in reward_model:
        return dict(body)
    return {**body, "reward_model": {**reward_model, "loss": _spelled_out(reward_model["loss"])}}


def _spelled_out(part: Any) -> Any:
    return {"kind": part} if isinstance(part, str) else part


def _merged(preset: Any, written: Any) -> Any:
    if not (isinstance(preset, dict) and isinstance(written, Mapping)):
        return written
    if "kind" in preset and written.get("kind", preset["kind"]) != preset["kind"]:
        return written
    return {**preset, **{k: _merged(preset.get(k), value) for k, value in written.items()}}


def problems(name: str, candidate: Mapping[str, Any]) -> Iterator[str]:
    """What a candidate says against the preset that it names."""
    algorithm = candidate.get("algorithm")
    if not isinstance(algorithm, str):
        return
    place = f"candidates.{name}"
    preset = PRESETS.get(algorithm)
    if preset is None:
        close = difflib.get_close_matches(algorithm.lower(), PRESETS, n=1, cutoff=0.75)
        if close and "losses" not in candidate and "loss" not in candidate:
            yield f"{place}.algorithm={algorithm}: no preset of that name; did you mean {close[0]}?"
        return
    if candidate.get("kind", preset["kind"]) != preset["kind"]:
        yield (
            f"{place}.kind={candidate['kind']}: algorithm={algorithm} is of kind={preset['kind']}; "
            "leave kind out"
        )
        return
    written = resolve(candidate)
    for key in ("advantage", "loss"):
        kind = _kind(written.get(key))
        if key in preset and kind is not None and kind != preset[key]["kind"]:
            yield (
                f"{place}.{key}={kind}: algorithm={algorithm} has {key}={preset[key]['kind']}; "
                "name the algorithm otherwise and write its parts out"
            )
    if "losses" in preset and isinstance(written.get("losses"), list):
        kinds = [_kind(term) for term in written["losses"]]
        needed = preset["losses"][0]["kind"]
        if None not in kinds and needed not in kinds:
            yield (
                f"{place}.losses: algorithm={algorithm} has losses={needed}; "
                "name the algorithm otherwise"
            )


def _kind(part: Any) -> str | None:
    kind = part.get("kind") if isinstance(part, Mapping) else None
    return kind if isinstance(kind, str) else None
