"""Candidates of a round: an algorithm is a choice of named parts, each with options of its own.

A part is written `{kind: gae, gamma: 1.0}`, or by its name alone where its defaults will do. `kind` is
a name of the tables below or the import path of a function of yours, `{kind: my_pkg.my_loss, options:
{...}}`. The tables mirror the keyword-only parameters of the functions in `rlhf/algos` (a test compares
them), so that a file is checked without importing torch. An option that a part does not have is an error.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Annotated, Any, Literal, Union

from pydantic import Discriminator, Field, Tag, create_model, model_validator

from rlhf.sections import (
    BelowHalf,
    Betas,
    Count,
    Finite,
    Fraction,
    ImportPath,
    NonNegative,
    Open,
    Positive,
    PositiveFloat,
    RoundName,
    Section,
    check_divides,
    divisors,
)

REQUIRED: Any = ...
IMPORTED = "import path"

Table = dict[str, dict[str, Any]]
"""Kind -> option -> (type with its bounds, default or REQUIRED)."""

_gamma = {"gamma": (Fraction, 1.0)}


def _beta(default: float) -> dict[str, Any]:
    return {"beta": (PositiveFloat, default)}


_clips = {
    "clip_low": (Annotated[float, Field(gt=0, lt=1)], 0.2),
    "clip_high": (PositiveFloat, 0.2),
}

ADVANTAGES: Table = {
    "gae": {**_gamma, "gae_lambda": (Fraction, 0.95)},
    "gae_bootstrap": {**_gamma, "gae_lambda": (Fraction, 0.95)},
    "reinforce": {**_gamma},
    "constant_baseline": {**_gamma, "baseline": (Finite, REQUIRED)},
    "ema_baseline": {**_gamma, "decay": (Open, 0.9)},
    "group_mean": {},
    "group_std": {},
    "rloo": {},
    "max_rl": {},
    "reinforce_plus_plus": {**_gamma},
    "reinforce_plus_plus_baseline": {},
    "best_of_group": {},
}
VALUE_KINDS = frozenset({"gae", "gae_bootstrap"})
GROUP_KINDS = frozenset(
    {"group_mean", "group_std", "rloo", "max_rl", "reinforce_plus_plus_baseline", "best_of_group"}
)
WHITENED_KINDS = frozenset({"reinforce_plus_plus", "reinforce_plus_plus_baseline"})

POLICY_LOSSES: Table = {
    "ppo_clip": {**_clips},
    "ppo_dual_clip": {
        **_clips,
        "dual_clip": (Annotated[float, Field(gt=1, allow_inf_nan=False)], 3.0),
    },
    "reinforce": {},
    "importance_weighted": {},
    "gspo": {
        "clip_low": (Annotated[float, Field(gt=0, lt=1)], 3e-4),
        "clip_high": (PositiveFloat, 4e-4),
    },
    "cispo": {
        "clip_low": (Annotated[float, Field(gt=0, le=1)], 1.0),
        "clip_high": (PositiveFloat, 4.0),
    },
    "sapo": {"tau_positive": (PositiveFloat, 1.0), "tau_negative": (PositiveFloat, 1.05)},
    "nll": {},
}
ON_POLICY_ONLY = frozenset({"reinforce"})

PREFERENCE_LOSSES: Table = {
    "sigmoid": {**_beta(0.1), "label_smoothing": (BelowHalf, 0.0)},
    "robust": {**_beta(0.1), "label_smoothing": (BelowHalf, REQUIRED)},
    "ipo": {**_beta(0.1)},
    "hinge": {**_beta(0.05)},
    "exo_pair": {**_beta(0.1), "label_smoothing": (Annotated[float, Field(gt=0, lt=0.5)], 1e-3)},
    "nca_pair": {**_beta(0.01)},
    "sppo_hard": {**_beta(1e-3)},
    "apo_zero": {**_beta(0.1)},
    "apo_down": {**_beta(0.1)},
    "bco_pair": {**_beta(0.1)},
    "kto": {
        **_beta(0.1),
        "desirable_weight": (PositiveFloat, 1.0),
        "undesirable_weight": (PositiveFloat, 1.0),
    },
    "orpo": {**_beta(0.1)},
    "simpo": {**_beta(2.0), "gamma": (NonNegative, 1.0)},
    "dpop": {**_beta(0.3), "penalty": (NonNegative, 50.0)},
    "r_dpo": {**_beta(0.1), "alpha": (NonNegative, REQUIRED)},
    "odpo": {**_beta(0.1), "alpha": (NonNegative, 1.0)},
    "sft": {},
    "f_dpo": {
        **_beta(0.1),
        "divergence": (Literal["reverse_kl", "forward_kl", "js", "alpha"], "reverse_kl"),
        "alpha": (Open | None, None),
    },
}
REFERENCE_FREE = frozenset({"orpo", "simpo", "sft"})
NEED_MARGINS = frozenset({"odpo"})

AGGREGATES: Table = {
    "mean": {},
    "min": {},
    "mean_minus_variance": {"variance_coef": (NonNegative, 0.5)},
    "weight_average": {},
}

TRUNCATION: Table = {
    "keep": {},
    "mask": {},
    "missing_eos": {"penalty": (PositiveFloat, REQUIRED)},
    "soft_overlong": {"buffer": (Positive, REQUIRED), "penalty": (PositiveFloat, 1.0)},
}


REWARD_MODEL_LOSSES: Table = {
    "bradley_terry": {"label_smoothing": (BelowHalf, 0.0), "centering": (NonNegative, 0.0)},
    "davidson": {"centering": (NonNegative, 0.0)},
    "rao_kupper": {"centering": (NonNegative, 0.0)},
}
TIE_KINDS = frozenset({"davidson", "rao_kupper"})


class Part(Section):
    """A named part and its options."""

    kind: str

    def arguments(self) -> dict[str, Any]:
        """The options, as keyword arguments of the part's function."""
        return self.model_dump(exclude={"kind", "weight"})


class Imported(Part):
    """A function of yours by import path; `options` are its keyword-only parameters."""

    kind: ImportPath
    options: dict[str, Any] = Field(default_factory=dict)

    def arguments(self) -> dict[str, Any]:
        return dict(self.options)


class Term(Part):
    """A term of a sum of preference losses."""

    weight: PositiveFloat = 1.0


class ImportedTerm(Term, Imported):
    """A term of yours."""


def _section(kind: str, base: type[Part], options: dict[str, Any]) -> Any:
    fields: dict[str, Any] = {"kind": (Literal[kind], REQUIRED), **options}
    return create_model(kind, __base__=base, **fields)


def _kinds(table: Table, base: type[Part], imported: type[Part] | None) -> Any:
    """The union of a table's kinds, one class each, told apart by `kind`; paths have a dot."""
    members = [
        Annotated[_section(kind, base, options), Tag(kind)] for kind, options in table.items()
    ]
    if imported is not None:
        members.append(Annotated[imported, Tag(IMPORTED)])

    def tag(value: Any) -> str | None:
        kind = value.get("kind") if isinstance(value, Mapping) else getattr(value, "kind", None)
        if imported is not None and isinstance(kind, str) and kind not in table and "." in kind:
            return IMPORTED
        return None if kind is None else str(kind)

    return Annotated[Union[tuple(members)], Discriminator(tag)]  # noqa: UP007 (made at run time)


if TYPE_CHECKING:
    Advantage = Part
    PolicyLoss = Part
    Aggregate = Part
    Truncation = Part
    RewardModelLoss = Part
    PreferenceTerm = Term
else:
    Advantage = _kinds(ADVANTAGES, Part, Imported)
    PolicyLoss = _kinds(POLICY_LOSSES, Part, Imported)
    PreferenceTerm = _kinds(PREFERENCE_LOSSES, Term, ImportedTerm)
    Aggregate = _kinds(AGGREGATES, Part, None)
    Truncation = _kinds(TRUNCATION, Part, None)
    RewardModelLoss = _kinds(REWARD_MODEL_LOSSES, Part, Imported)


class Optimization(Section):
    """AdamW with linear warm-up and a decay; what every training stage declares."""

    learning_rate: PositiveFloat
    warmup_steps: Count
    schedule: Literal["linear", "cosine"] = "linear"
    """Shape of the decay from learning_rate to final_lr_fraction of it."""
    final_lr_fraction: Fraction
    weight_decay: NonNegative
    adam_betas: Betas
    max_grad_norm: PositiveFloat
    ema_decay: Open | None = None
    """Keep an average of the weights with this decay per update, and save that; null saves the last weights."""


class KlTarget(Section):
    """Adaptive coefficient (Ziegler et al. 2019): holds the KL per answer near `nats`."""

    nats: PositiveFloat
    horizon: Positive
    """Answers over which the coefficient may move by a factor of about 1.2."""


class Kl(Section):
    """The KL term: in the reward or in the loss, by which estimator, how strong."""

    where: Literal["reward", "loss"]
    estimator: Literal["k1", "k2", "k3", "k3_straight_through", "full"]
    coef: PositiveFloat
    target: KlTarget | None = None
    zero_spread_groups: Literal["keep", "skip"] | None = None
    """Whether the loss term counts on groups without spread; only with where=loss and a group advantage."""

    @model_validator(mode="after")
    def _gradient(self) -> Kl:
        problems = []
        if self.where == "loss" and self.estimator == "k1":
            problems.append(
                "estimator=k1 in the loss has an expected gradient of zero; "
                "use k2, k3 or k3_straight_through, or where: reward"
            )
        if self.where == "reward" and self.estimator == "full":
            problems.append("estimator=full is a term of the loss; use where: loss, or k1")
        if self.where == "reward" and self.estimator == "k3_straight_through":
            problems.append(
                "estimator=k3_straight_through differs from k3 by its gradient, which a reward "
                "does not use; use k1"
            )
        if self.where == "reward" and self.zero_spread_groups is not None:
            problems.append("zero_spread_groups is about the loss; leave it out with where: reward")
        if problems:
            raise ValueError(*problems)
        return self


class Value(Section):
    """The critic: a model of its own, trained beside the policy."""

    learning_rate: PositiveFloat | None = None
    """null: the candidate's."""
    coef: PositiveFloat = 1.0
    clip: PositiveFloat | None = 0.2
    warmup_steps: Count = 0
    """Rollout batches that train the critic alone, before the first step."""
    init: Literal["reward_model", "policy"] = "reward_model"


class Correction(Section):
    """Truncated importance weights from the sampler's to the trainer's log-probs."""

    cap: Annotated[float, Field(ge=1, allow_inf_nan=False)]


ReferenceName = Literal["previous", "initial", "ema", "none"]


class _Candidate(Optimization):
    round: RoundName
    from_: Annotated[RoundName, Field(alias="from")]
    learns_from: Annotated[str, Field(pattern=r"^r[0-9]+(_[a-z0-9]+)*/(reward_model|preferences)$")]
    algorithm: Annotated[str, Field(pattern=r"^[a-z0-9_]+$")]
    reference: ReferenceName
    """previous: the incoming policy. initial: r0. ema: a moving average of the policy. none."""
    reference_decay: Open | None = None
    """Of reference=ema, per step (per update when learning from pairs)."""
    kl_budget_nats: PositiveFloat | None = None
    """Mean KL per answer to the incoming policy at which the run stops; what is kept is within it."""
    checkpoint_every: Positive

    def _problems(self) -> Iterator[str]:
        if (self.reference == "ema") != (self.reference_decay is not None):
            yield "reference_decay belongs to reference=ema and to no other; set both or neither"


class _Rollouts(_Candidate):
    """Samples of its own, scored by the committee."""

    aggregate: Aggregate
    steps: Positive
    prompts_per_step: Positive
    samples_per_prompt: Positive
    temperature: PositiveFloat
    epochs_per_step: Positive
    minibatches: Positive
    micro_batch_size: Positive
    sampling_batch_size: Positive | None = None
    """Answers in flight at once while sampling; null: all of a step. Part of what fixes the answers."""
    resample_batches: Count = 0
    """Dynamic sampling: groups without spread are replaced, by at most so many further rollout batches."""

    def _problems(self) -> Iterator[str]:
        yield from super()._problems()
        if self.ema_decay is not None and self.kl_budget_nats is not None:
            yield (
                "kl_budget_nats bounds the policy that samples, and ema_decay saves another; "
                "leave one of them out"
            )

    def _sizes(self, unit: str, batch_name: str, batch: int) -> Iterator[str]:
        """Minibatches divide a batch, micro-batches a minibatch."""
        if batch % self.minibatches:
            yield (
                f"minibatches={self.minibatches} does not divide {batch_name}={batch}; "
                f"use one of {divisors(batch)}"
            )
            return
        try:
            check_divides(
                "micro_batch_size",
                self.micro_batch_size,
                f"{unit} per minibatch",
                batch // self.minibatches,
            )
        except ValueError as error:
            yield str(error)


class RlCandidate(_Rollouts):
    """Optimises the committee's score with samples of its own."""

    kind: Literal["rl"]
    advantage: Advantage
    whiten_advantages: bool = False
    clip_advantages: PositiveFloat | None = None
    loss: PolicyLoss
    reduction: Literal["token_mean", "sequence_mean", "constant_length"]
    length_constant: Literal["batch_mean", "max_response_tokens"] | None = None
    """Tokens of reduction=constant_length: the rollout batch's mean length, or the limit (Dr. GRPO)."""
    kl: Kl | None
    truncated: Truncation
    """Answers cut by max_response_tokens: kept, masked out of the loss, or penalised."""
    correction: Correction | None = None
    stop_epochs_nats: PositiveFloat | None = None
    """KL(old policy || policy) per token that ends the passes over a rollout batch."""
    entropy_coef: NonNegative = 0.0
    value: Value | None = None

    @model_validator(mode="after")
    def _parts_fit(self) -> RlCandidate:
        batch = self.prompts_per_step * self.samples_per_prompt
        problems = [
            *self._problems(),
            *self._sizes("sequences", "prompts_per_step * samples_per_prompt", batch),
            *self._advantage_problems(),
            *self._loss_problems(),
        ]
        if not self.learns_from.endswith("/reward_model"):
            problems.append("learns_from of kind=rl names a reward model, like r1/reward_model")
        if problems:
            raise ValueError(*problems)
        return self

    def _advantage_problems(self) -> Iterator[str]:
        name, imported = self.advantage.kind, isinstance(self.advantage, Imported)
        if self.samples_per_prompt < 2:
            if name in GROUP_KINDS:
                yield f"advantage={name} compares answers to one prompt; set samples_per_prompt >= 2"
            if self.resample_batches:
                yield "resample_batches is about groups; set samples_per_prompt >= 2, or 0 batches"
            if imported and self.kl is not None and self.kl.zero_spread_groups is not None:
                yield "kl.zero_spread_groups is about groups; set samples_per_prompt >= 2"
        elif self.resample_batches and not imported and name not in GROUP_KINDS:
            yield f"resample_batches is about groups, which advantage={name} has none of; set it to 0"
        if name == "best_of_group" and (self.whiten_advantages or self.clip_advantages is not None):
            yield (
                "advantage=best_of_group gives every answer it keeps the advantage 1, which whitening "
                "turns into 0 and clipping scales; leave both out"
            )
        if not imported and (name in VALUE_KINDS) != (self.value is not None):
            yield (
                f"value belongs to advantage={' or '.join(sorted(VALUE_KINDS))} and to no other; "
                "set both or neither"
            )
        if name == "max_rl":
            yield (
                "advantage=max_rl takes rewards in [0, 1], like passed or not, which a committee's "
                "scores are not; use group_mean or rloo"
            )
        if name in WHITENED_KINDS and self.whiten_advantages:
            yield f"whiten_advantages=True: advantage={name} whitens already; set it to false"
        grouped = imported or name in GROUP_KINDS
        if self.kl is not None and self.kl.zero_spread_groups is not None and not grouped:
            yield f"kl.zero_spread_groups: advantage={name} has no groups; leave it out"

    def _loss_problems(self) -> Iterator[str]:
        if self.loss.kind in ON_POLICY_ONLY and self.epochs_per_step * self.minibatches > 1:
            yield (
                f"loss={self.loss.kind} is on-policy only; set epochs_per_step: 1 and minibatches: 1"
            )
        chosen = self.advantage.kind == "best_of_group" or isinstance(self.advantage, Imported)
        if self.loss.kind == "nll" and not chosen:
            yield (
                f"loss=nll fits chosen answers, and advantage={self.advantage.kind} chooses none; "
                "use best_of_group, or loss: reinforce"
            )
        options = self.loss.arguments()
        if (
            self.loss.kind == "ppo_dual_clip"
            and not options["dual_clip"] > 1 + options["clip_high"]
        ):
            yield f"loss.dual_clip={options['dual_clip']:g} must be above 1 + clip_high; raise it"
        if (self.reduction == "constant_length") != (self.length_constant is not None):
            yield (
                "length_constant belongs to reduction=constant_length and to no other; "
                "set both or neither"
            )
        if self.kl is not None and self.kl.target is not None:
            batch = self.prompts_per_step * self.samples_per_prompt
            if self.kl.target.horizon < batch:
                yield (
                    f"kl.target.horizon={self.kl.target.horizon} is less than the {batch} answers of "
                    "one step, which would turn the coefficient over; raise it"
                )
        if (self.reference == "none") != (self.kl is None):
            yield "kl needs a reference, and a reference a kl; set kl: null with reference: none"
        if self.stop_epochs_nats is not None and self.epochs_per_step * self.minibatches == 1:
            yield "stop_epochs_nats: there is one update per step, nothing to stop; leave it out"


class _Pairs(Section):
    """What every way to learn from pairs declares."""

    losses: Annotated[list[PreferenceTerm], Field(min_length=1)]
    length_normalized: bool = False
    """Log-probs per token instead of per answer, in the losses that read sums."""

    def _loss_problems(self, reference: str) -> Iterator[str]:
        kinds = [term.kind for term in self.losses if not isinstance(term, ImportedTerm)]
        names = [term.kind.rpartition(".")[2] for term in self.losses]
        for name in sorted({name for name in names if names.count(name) > 1}):
            yield f"losses: {name} stands there twice; add up the weights"
        reading = [kind for kind in kinds if kind not in REFERENCE_FREE]
        if reference == "none" and reading:
            yield f"reference=none: losses.{reading[0]} reads a reference; use previous"
        if reference != "none" and len(kinds) == len(self.losses) and not reading:
            yield f"reference={reference} is not used by {', '.join(kinds)}; set it to none"
        if self.length_normalized and kinds and not reading:
            yield f"length_normalized is not used by {', '.join(kinds)}; set it to false"
        for term in self.losses:
            if term.kind == "f_dpo":
                options = term.arguments()
                if options["divergence"] != "alpha" and options["alpha"] is not None:
                    yield (
                        f"losses: alpha is not used by divergence={options['divergence']}; "
                        "leave it out"
                    )
                if options["divergence"] == "alpha" and options["alpha"] is None:
                    yield "losses: divergence=alpha needs alpha; set it between 0 and 1"


class PreferenceCandidate(_Candidate, _Pairs):
    """Learns from the round's pairs directly."""

    kind: Literal["preference"]
    pairs_per_group: Positive
    epochs: Positive
    batch_size: Positive
    micro_batch_size: Positive

    @model_validator(mode="after")
    def _parts_fit(self) -> PreferenceCandidate:
        problems = [*self._problems(), *self._loss_problems(self.reference)]
        try:
            check_divides("micro_batch_size", self.micro_batch_size, "batch_size", self.batch_size)
        except ValueError as error:
            problems.append(str(error))
        for term in self.losses:
            if term.kind in NEED_MARGINS:
                problems.append(
                    f"losses: {term.kind} reads how far apart the answers are, which labelled pairs "
                    "do not say; use kind: online_preference, where scores do"
                )
        if not self.learns_from.endswith("/preferences"):
            problems.append("learns_from of kind=preference names pairs, like r1/preferences")
        if problems:
            raise ValueError(*problems)
        return self


class OnlinePreferenceCandidate(_Rollouts, _Pairs):
    """Learns from pairs of its own samples, labelled by the committee: best against worst of each prompt."""

    kind: Literal["online_preference"]

    @model_validator(mode="after")
    def _parts_fit(self) -> OnlinePreferenceCandidate:
        problems = [
            *self._problems(),
            *self._loss_problems(self.reference),
            *self._sizes("pairs", "prompts_per_step", self.prompts_per_step),
        ]
        if self.samples_per_prompt < 2:
            problems.append(
                "samples_per_prompt=1: a pair is two answers to a prompt; set it to at least 2"
            )
        if not self.learns_from.endswith("/reward_model"):
            problems.append(
                "learns_from of kind=online_preference names a reward model, like r1/reward_model"
            )
        if problems:
            raise ValueError(*problems)
        return self


AnyCandidate = RlCandidate | PreferenceCandidate | OnlinePreferenceCandidate
Candidate = Annotated[AnyCandidate, Field(discriminator="kind")]
