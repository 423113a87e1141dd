"""`pipeline.yaml` as strict, frozen pydantic models. Every error is reported at once: path, value, rule, mend.

Imports neither torch nor pandas, so that `validate` and `plan` start quickly.
"""

from __future__ import annotations

import difflib
import hashlib
import importlib.util
import io
import json
import re
import sys
from collections.abc import Iterator, Mapping
from datetime import date, datetime
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from pydantic import (
    AfterValidator,
    BaseModel,
    Discriminator,
    Field,
    Tag,
    ValidationError,
    model_validator,
)

from rlhf import presets, yaml12
from rlhf.candidates import (
    IMPORTED,
    TIE_KINDS,
    Candidate,
    Imported,
    RewardModelLoss,
)
from rlhf.candidates import AnyCandidate as AnyCandidate
from rlhf.candidates import OnlinePreferenceCandidate as OnlinePreferenceCandidate
from rlhf.candidates import Optimization as Optimization
from rlhf.candidates import Part as Part
from rlhf.candidates import PreferenceCandidate as PreferenceCandidate
from rlhf.candidates import RlCandidate as RlCandidate
from rlhf.candidates import Term as Term
from rlhf.candidates import Value as Value
from rlhf.errors import BadInput
from rlhf.sections import (
    BelowHalf,
    Count,
    Finite,
    Fraction,
    ImportPath,
    NonNegative,
    Positive,
    PositiveFloat,
    RoundName,
    Section,
    check_divides,
    divisors,
)

ROUND_NAME = re.compile(r"r(0|[1-9][0-9]*)(_[a-z0-9]+)*")
SPLITS = ("sft", "preferences", "rl", "choose", "report")


class ConfigError(BadInput):
    """Every problem of a `pipeline.yaml`, one line each."""

    def __init__(self, path: str, problems: list[str]) -> None:
        self.problems = problems
        count = f"{len(problems)} problem{'s' if len(problems) > 1 else ''}"
        super().__init__("\n  ".join([f"{path}: {count}", *problems]))


# --- model and data ------------------------------------------------------------------------------


class DemoModel(Section):
    """Sizes of the Llama that `base: demo` starts from new weights."""

    hidden_size: Positive
    num_layers: Positive
    num_heads: Positive
    intermediate_size: Positive
    max_positions: Positive

    @model_validator(mode="after")
    def _heads(self) -> DemoModel:
        if self.hidden_size % self.num_heads:
            raise ValueError(
                f"num_heads={self.num_heads} does not divide hidden_size={self.hidden_size}; "
                f"use one of {divisors(self.hidden_size)}"
            )
        return self


class Model(Section):
    """The language model all policies come from, and how text becomes tokens."""

    base: Annotated[str, Field(min_length=1)]
    revision: str | None
    demo: DemoModel | None
    tokenizer: str | None
    chat_template: Literal["none", "tokenizer"]
    max_prompt_tokens: Positive
    max_response_tokens: Positive
    too_long: Literal["error", "drop", "truncate"]
    dtype: Literal["float32", "bfloat16"]
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass: less memory, about a third more time."""
    logits_chunk_tokens: Positive | None = None
    """Project onto the vocabulary so many positions at a time in training; null: all at once."""
    device: Literal["auto", "cpu", "cuda"]

    @model_validator(mode="after")
    def _demo_sizes(self) -> Model:
        if self.base != "demo":
            return self
        if self.demo is None:
            raise ValueError("base=demo needs the section model.demo; write its sizes out")
        total = self.max_prompt_tokens + self.max_response_tokens
        if self.demo.max_positions < total:
            raise ValueError(
                f"demo.max_positions={self.demo.max_positions} is less than max_prompt_tokens + "
                f"max_response_tokens={total}; raise it to at least {total}"
            )
        if self.tokenizer is None:
            raise ValueError("base=demo has no tokenizer of its own; set model.tokenizer")
        return self


class FileTable(Section):
    """A JSONL, JSON, CSV or Parquet file. Other keys name its columns."""

    kind: Literal["file"]
    path: Annotated[str, Field(min_length=1)]


class HubTable(Section):
    """A dataset by its `datasets` name, pinned to a revision."""

    kind: Literal["hub"]
    name: Annotated[str, Field(min_length=1)]
    revision: Annotated[str, Field(min_length=1)]
    subset: str | None = None
    part: str = "train"


class _DemonstrationColumns(Section):
    prompt: str = "prompt"
    response: str = "response"
    split: str | None = None


class _PromptColumns(Section):
    prompt: str = "prompt"
    split: str | None = None


class _PreferenceColumns(Section):
    prompt: str = "prompt"
    chosen: str = "chosen"
    rejected: str = "rejected"


class FileDemonstrations(FileTable, _DemonstrationColumns): ...


class HubDemonstrations(HubTable, _DemonstrationColumns): ...


class FilePrompts(FileTable, _PromptColumns): ...


class HubPrompts(HubTable, _PromptColumns): ...


class FilePreferences(FileTable, _PreferenceColumns): ...


class HubPreferences(HubTable, _PreferenceColumns): ...


class Data(Section):
    """Where demonstrations, prompts and ready-made pairs come from."""

    source: Annotated[str, Field(min_length=1)]
    world: ImportPath | None
    world_options: dict[str, Any] = Field(default_factory=dict)
    demonstrations: Annotated[FileDemonstrations | HubDemonstrations, Field(discriminator="kind")]
    prompts: Annotated[FilePrompts | HubPrompts, Field(discriminator="kind")]
    preferences: Annotated[FilePreferences | HubPreferences, Field(discriminator="kind")] | None = (
        None
    )
    split_fractions: dict[Literal["sft", "preferences", "rl", "choose", "report"], Fraction]

    @model_validator(mode="after")
    def _whole(self) -> Data:
        total = sum(self.split_fractions.values())
        if abs(total - 1) > 1e-6 or len(self.split_fractions) != len(SPLITS):
            raise ValueError(
                f"split_fractions must name {', '.join(SPLITS)} and sum to 1; they sum to {total:g}"
            )
        if self.world_options and self.world is None:
            raise ValueError("world_options is set but world is null; remove one of them")
        return self


class Gold(Section):
    """What is meant: a program by import path, with `score(prompts, responses, ended)`.

    `batch_size` answers are scored per call; a stage that is killed keeps what finished calls returned. None:
    all answers of a sampling in one call.
    """

    kind: Literal["program"]
    path: ImportPath
    batch_size: Positive | None = None


# --- resources, tracking -------------------------------------------------------------------------


class Threads(Section):
    sft: Positive
    preferences: Positive
    reward_model: Positive
    policy: Positive
    evaluate: Positive


class Checkpoints(Section):
    """What a stage writes to continue from when it is killed, under `.scratch/resume`.

    A checkpoint is due after `every_steps` steps or `every_minutes` minutes, whichever comes first. The
    last `keep` are kept, fewer if they would take more than `max_gigabytes` (10^9 bytes) of disk.
    """

    every_steps: Positive
    every_minutes: PositiveFloat
    keep: Positive
    max_gigabytes: PositiveFloat


class Resources(Section):
    threads: Threads
    parallel: Positive
    gpus: Count
    checkpoints: Checkpoints
    cost_per_hour: NonNegative | None = None


class Tracking(Section):
    uri: str | None


class Lineage(Section):
    """What the flow keeps of a round: `commit`, one git commit and a tag; `push`, `dvc push` of every stage."""

    commit: bool
    push: bool


# --- training ------------------------------------------------------------------------------------


class Sft(Optimization):
    epochs: Positive
    batch_size: Positive
    micro_batch_size: Positive
    evaluate_every: Positive
    patience: Positive

    @model_validator(mode="after")
    def _micro(self) -> Sft:
        check_divides("micro_batch_size", self.micro_batch_size, "batch_size", self.batch_size)
        return self


class SimulatedLabeler(Section):
    """Bradley-Terry annotator over gold: P(i > j) = (1 - 2 flip) sigmoid((g_i - g_j) / noise) + flip."""

    kind: Literal["simulated"]
    noise: PositiveFloat
    flip: BelowHalf


class ProgramLabeler(Section):
    """An importable function (prompts, first, second) -> list of "first" | "second" | "tie".

    `batch_size` comparisons are asked per call; a stage that is killed keeps the labels of finished calls. None:
    all comparisons of the round in one call.
    """

    kind: Literal["program"]
    path: ImportPath
    batch_size: Positive | None = None


class CarryOver(Section):
    """A part of the earlier rounds' pairs: those of the `last` rounds, or a `sample` of so many pairs."""

    last: Positive | None = None
    sample: Positive | None = None

    @model_validator(mode="after")
    def _one(self) -> CarryOver:
        if (self.last is None) == (self.sample is None):
            raise ValueError("has one key; write {last: N} rounds or {sample: N} pairs")
        return self


def _kind_of_carry_over(value: Any) -> str | None:
    if value in ("all", "none"):
        return "[word]"
    return "[part]" if isinstance(value, (Mapping, CarryOver)) else None


class Preferences(Section):
    num_groups: Positive
    num_heldout_groups: Positive
    samples_per_prompt: Annotated[int, Field(ge=2)]
    temperature: PositiveFloat
    sampling_batch_size: Positive
    pairs: Literal["all", "adjacent", "best_worst"]
    labeler: Annotated[SimulatedLabeler | ProgramLabeler, Field(discriminator="kind")]
    ties: Literal["drop", "keep"]
    carry_over: Annotated[
        Annotated[Literal["all", "none"], Tag("[word]")] | Annotated[CarryOver, Tag("[part]")],
        Discriminator(
            _kind_of_carry_over,
            custom_error_type="carry_over",
            custom_error_message="must be all, none, {last: N} rounds or {sample: N} pairs",
        ),
    ]

    @model_validator(mode="after")
    def _best_worst(self) -> Preferences:
        if self.pairs == "best_worst" and self.labeler.kind != "simulated":
            raise ValueError(
                "pairs=best_worst needs a labeler that scores; use labeler.kind=simulated, "
                "or pairs: all"
            )
        return self


class RewardModel(Optimization):
    """`init` is what a member starts as: the incoming `policy` with a new head, or the `previous` round's member."""

    init: Literal["policy", "previous"]
    members: Positive
    epochs: Positive
    groups_per_batch: Positive
    micro_batch_size: Positive
    loss: RewardModelLoss
    num_reference_samples: Annotated[int, Field(ge=2)]

    @model_validator(mode="after")
    def _micro(self) -> RewardModel:
        check_divides(
            "micro_batch_size", self.micro_batch_size, "groups_per_batch", self.groups_per_batch
        )
        return self


# --- evaluation, the gate, rounds ----------------------------------------------------------------

MetricName = Literal[
    "gold_mean",
    "proxy_mean",
    "win_rate",
    "win_rate_lower",
    "win_rate_upper",
    "win_rate_initial",
    "win_rate_initial_lower",
    "win_rate_initial_upper",
    "kl_nats",
    "length_mean",
    "length_ratio",
    "entropy_nats",
    "ended_fraction",
    "alarms",
]
METRICS: tuple[str, ...] = get_args(MetricName)


class Evaluation(Section):
    choose_samples_per_prompt: Positive
    report_samples_per_prompt: Positive
    final_samples_per_prompt: Positive
    temperature: PositiveFloat
    sampling_batch_size: Positive
    select: Literal["last", "best_proxy", "best_gold"]
    best_of_n_samples: Annotated[int, Field(ge=2)]
    num_bootstrap: Annotated[int, Field(ge=100)]
    num_shown: Positive


class Rule(Section):
    metric: MetricName
    at_least: Finite | None = None
    at_most: Finite | None = None

    @model_validator(mode="after")
    def _bound(self) -> Rule:
        if (self.at_least is None) == (self.at_most is None):
            raise ValueError("a rule has one bound; set either at_least or at_most")
        return self


class TieBreak(Section):
    metric: MetricName
    prefer: Literal["lower", "higher"]


class Gate(Section):
    """Of the candidates that break no rule, the one with the highest `metric` is promoted.

    Candidates whose metric is within `margin` of the highest are tied; `tie_break` decides among them, first
    entry first. `on_fail` is for a round in which no candidate passes: `keep` the incoming policy, `stop` (keep
    it, and start no further round until a person decides), or `ask` a person.
    """

    metric: MetricName
    margin: NonNegative
    tie_break: list[TieBreak]
    rules: list[Rule]
    on_fail: Literal["keep", "stop", "ask"]


def _iso(value: str) -> str:
    try:
        datetime.fromisoformat(value)
    except ValueError:
        raise ValueError(
            f"{value!r} is no date and time; write it like 2026-01-31T09:30:00+00:00"
        ) from None
    return value


When = Annotated[str, AfterValidator(_iso)]
"""A date and time in ISO 8601."""


class Decision(Section):
    """What a person decided in place of the gate, by whom, why and when."""

    choice: Literal["promote", "keep", "stop"]
    candidate: str | None
    because: Annotated[str, Field(min_length=1)]
    by: Annotated[str, Field(min_length=1)]
    at: When

    @model_validator(mode="after")
    def _candidate(self) -> Decision:
        if self.choice == "promote" and self.candidate is None:
            raise ValueError("choice=promote: names no candidate; write which under candidate")
        if self.choice != "promote" and self.candidate is not None:
            raise ValueError(
                f"choice={self.choice}: promotes no candidate; write candidate: null, or choice: promote"
            )
        return self


class Round(Section):
    """`init` is the policy that every candidate starts as: the `previous` (promoted by `from`) or `initial` (r0)."""

    from_: Annotated[RoundName, Field(alias="from")]
    sample_from: RoundName
    init: Literal["initial", "previous"]
    preferences: Preferences
    reward_model: RewardModel
    gate: Gate
    decision: Decision | None

    @model_validator(mode="after")
    def _ties(self) -> Round:
        kind = self.reward_model.loss.kind
        if kind in TIE_KINDS and self.preferences.ties == "drop":
            raise ValueError(
                f"reward_model.loss={kind} learns how often answers tie, and preferences.ties=drop "
                "removes ties; set it to keep, or use bradley_terry"
            )
        return self


class Rollback(Section):
    """The champion is the policy that round `to` promoted, until a round after `after` promotes another."""

    to: RoundName
    after: RoundName
    because: Annotated[str, Field(min_length=1)]
    by: Annotated[str, Field(min_length=1)]
    at: When


class Pipeline(Section):
    """The whole of `pipeline.yaml`."""

    version: Literal[1]
    project: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]*$")]
    seed: Count
    model: Model
    data: Data
    gold: Gold | None
    resources: Resources
    tracking: Tracking
    sft: Sft
    rounds: Annotated[dict[str, Round], Field(min_length=1)]
    candidates: Annotated[dict[str, Candidate], Field(min_length=1)]
    evaluation: Evaluation
    lineage: Lineage
    rollback: Rollback | None = None

    def candidates_of(self, round_name: str) -> dict[str, AnyCandidate]:
        """The candidates of one round, in the file's order."""
        return {key: c for key, c in self.candidates.items() if c.round == round_name}

    def seed_for(self, *parts: str) -> int:
        """A seed in [0, 2**31) for one purpose: sha256 of the pipeline's seed and the parts."""
        text = "/".join([str(self.seed), *parts])
        return int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "big") >> 1


# --- reading -------------------------------------------------------------------------------------


def load(path: str | Path = "pipeline.yaml") -> Pipeline:
    """Read and check a pipeline file. Raises ConfigError with every problem in it."""
    return parse(read_yaml(path), str(path))


def check_files(pipeline: Pipeline, folder: str | Path = ".") -> None:
    """What the configuration names must be there, before anything is computed.

    Files and directories by their path from the project's folder; modules must be found, and are not
    run. Raises ConfigError with everything that is missing.
    """
    problems = list(_missing_files(pipeline, Path(folder)))
    named = [("data.world", pipeline.data.world)]
    named.append(("gold.path", pipeline.gold.path if pipeline.gold is not None else None))
    for name, declared in pipeline.rounds.items():
        labeler = declared.preferences.labeler
        if isinstance(labeler, ProgramLabeler):  # the last part is a function of the module
            key = f"rounds.{name}.preferences.labeler.path"
            named.append((key, labeler.path.rpartition(".")[0] or labeler.path))
    problems += [
        f"{key}={module}: no such module; write its import path as seen from the project's folder"
        for key, module in named
        if module is not None and not _module_exists(module, Path(folder))
    ]
    if problems:
        raise ConfigError(str(Path(folder) / "pipeline.yaml"), problems)


def _missing_files(pipeline: Pipeline, folder: Path) -> Iterator[str]:
    data = pipeline.data
    if not (folder / data.source).exists():
        yield f"data.source={data.source}: no such file or directory; name your data"
    if data.world is not None:
        return  # the world writes the tables
    for key in ("demonstrations", "prompts", "preferences"):
        table = getattr(data, key)
        if isinstance(table, FileTable) and not (folder / table.path).is_file():
            yield f"data.{key}.path={table.path}: no such file; correct the path"


def _module_exists(name: str, folder: Path) -> bool:
    """Whether an import would find the module, from the project's folder or the environment.

    Nothing is imported, so the gold firewall of a training stage has nothing to refuse.
    """
    first, *rest = name.split(".")
    spec = PathFinder.find_spec(first, [str(folder.resolve()), *sys.path])
    if spec is None:
        try:
            spec = importlib.util.find_spec(first)  # an editable install has a finder of its own
        except (ImportError, ValueError):
            return False
    parent = first
    for part in rest:
        if spec is None or spec.submodule_search_locations is None:
            return False
        parent = f"{parent}.{part}"
        spec = PathFinder.find_spec(parent, list(spec.submodule_search_locations))
    return spec is not None


def read_yaml(path: str | Path) -> dict[str, Any]:
    """A YAML 1.2 mapping as plain Python, the way DVC reads it."""
    from ruamel.yaml.error import YAMLError

    path = Path(path)
    if not path.is_file():
        raise BadInput(
            "no such file",
            where=str(path),
            rule="commands run in the folder that holds pipeline.yaml",
            mend="change into the project's folder",
        )
    try:
        raw = yaml12.load(path.read_text(encoding="utf-8"))
    except (YAMLError, ValueError) as error:  # ValueError: no UTF-8, or no such date or number
        problem = " ".join(str(error).partition("To suppress this check")[0].split())
        raise BadInput(f"not readable as YAML: {problem}", where=str(path)) from None
    if not isinstance(raw, dict):
        raise BadInput(
            "the file is empty, not a mapping of keys"
            if raw is None
            else "the file is not a mapping of keys",
            where=str(path),
            rule="it holds keys with their values below them: version, project, seed, ...",
            mend=f"take the last committed file: git checkout {Path(path).name}",
        )
    return raw


def parse(raw: Mapping[str, Any], path: str = "pipeline.yaml") -> Pipeline:
    """Check a mapping. Raises ConfigError with every problem in it."""
    problems = [
        problem
        for name, body in _mapping(raw, "candidates").items()
        if isinstance(body, Mapping)
        for problem in presets.problems(str(name), body)
    ]
    raw = resolved(raw)
    problems += _cross_checks(raw)
    guessed = {p.split(".algorithm=")[0] for p in problems if "no preset of that name" in p}
    pipeline = None
    try:
        pipeline = Pipeline.model_validate(_string_keys(raw))
    except ValidationError as error:
        told = [p for p in _readable(error) if p.partition(".kind: required")[0] not in guessed]
        problems = [*told, *problems]
    if problems or pipeline is None:
        raise ConfigError(path, problems)
    return pipeline


def resolved(raw: Mapping[str, Any]) -> dict[str, Any]:
    """The mapping with every candidate's preset filled in and parts that are names alone spelled out."""
    result = dict(raw)
    for section, fill in (("candidates", presets.resolve), ("rounds", presets.spelled_out_round)):
        bodies = raw.get(section)
        if isinstance(bodies, Mapping):
            result[section] = {
                name: fill(body) if isinstance(body, Mapping) else body
                for name, body in bodies.items()
            }
    return result


def as_yaml(pipeline: Pipeline) -> str:
    """The whole pipeline in full, presets and defaults written out, as YAML that reads back the same."""
    return to_yaml(pipeline.model_dump(by_alias=True))


def to_yaml(data: Mapping[str, Any]) -> str:
    """Plain data as YAML, floats so that every reader takes them for numbers."""
    from ruamel.yaml import YAML
    from ruamel.yaml.representer import RoundTripRepresenter

    class Plain(RoundTripRepresenter):
        """A class of its own: representers added to ruamel's would change how DVC writes dvc.lock."""

    Plain.add_representer(
        type(None), lambda dumper, _: dumper.represent_scalar("tag:yaml.org,2002:null", "null")
    )
    Plain.add_representer(
        float, lambda dumper, x: dumper.represent_scalar("tag:yaml.org,2002:float", written(x))
    )
    yaml = YAML()
    yaml.Representer = Plain
    yaml.width = 4096
    text = io.StringIO()
    yaml.dump(dict(data), text)
    return text.getvalue()


def written(number: float) -> str:
    """A float that every YAML reader takes for a number: 1.0e-05, not 1e-05."""
    mantissa, e, exponent = repr(number).partition("e")
    if e and exponent[0] not in "+-":
        exponent = f"+{exponent}"
    return f"{mantissa}{'' if '.' in mantissa else '.0'}{e}{exponent}"


def digest(section: BaseModel | Mapping[str, Any]) -> str:
    """sha256 of a section's canonical JSON, in hexadecimal."""
    data = section.model_dump(by_alias=True) if isinstance(section, BaseModel) else section
    return hashlib.sha256(json.dumps(data, sort_keys=True).encode()).hexdigest()


def _string_keys(raw: Mapping[str, Any]) -> dict[str, Any]:
    return {
        str(key): _string_keys(value) if isinstance(value, Mapping) else value
        for key, value in raw.items()
    }


def _mapping(raw: Mapping[str, Any], key: str) -> dict[Any, Any]:
    value = raw.get(key)
    return value if isinstance(value, dict) else {}


def _cross_checks(raw: Mapping[str, Any]) -> Iterator[str]:
    """Rules between sections; tolerant of sections that are themselves broken."""
    rounds, candidates = _mapping(raw, "rounds"), _mapping(raw, "candidates")
    known = ["r0"]
    for name, body in rounds.items():
        if not isinstance(name, str):
            yield (
                f"rounds.{name}: a round name is text like r{name}, not a number "
                f"(DVC drops number keys silently); write r{name}"
            )
            continue
        if name == "r0" or not ROUND_NAME.fullmatch(name):
            yield (
                f"rounds.{name}: a round is named r1, r2, ... or r2_variant, without leading zeros "
                "(r0 is the fine-tuned start); rename it"
            )
        if isinstance(body, dict):
            for key in ("from", "sample_from"):
                if isinstance(body.get(key), str) and body[key] not in known:
                    yield (
                        f"rounds.{name}.{key}={body[key]}: not an earlier round; "
                        f"use one of {', '.join(known)}"
                    )
        known.append(name)
        yield from _warm_start(name, rounds)
        yield from _decision(name, body, candidates)
    rollback = _mapping(raw, "rollback")
    yield from _rollback(rollback, known)
    for name, body in candidates.items():
        if not isinstance(body, dict) or not isinstance(body.get("round"), str):
            continue
        home = body["round"]
        if home not in rounds:
            yield (
                f"candidates.{name}.round={home}: no such round; "
                + (f"use one of {', '.join(map(str, rounds))}" if rounds else "declare it")
            )
            continue
        if not re.fullmatch(re.escape(home) + r"-[a-z0-9_]+", str(name)):
            yield f"candidates.{name}: the name must be {home}-<name> in a-z, 0-9, _; rename it"
        start = rounds[home].get("from") if isinstance(rounds[home], dict) else None
        if isinstance(start, str) and body.get("from") not in (None, start):
            yield (
                f"candidates.{name}.from={body['from']}: differs from rounds.{home}.from={start}; "
                f"write {start}"
            )
        source = str(body.get("learns_from", "")).split("/")[0]
        if ROUND_NAME.fullmatch(source) and source not in known[1 : known.index(home) + 1]:
            yield (
                f"candidates.{name}.learns_from={body['learns_from']}: "
                f"{source} is not {home} or an earlier round; use {home}/..."
            )
        aggregate = _mapping(body, "aggregate").get("kind")
        members = _mapping(_mapping(rounds, source), "reward_model").get("members")
        if members == 1 and aggregate not in (None, "mean"):
            yield (
                f"candidates.{name}.aggregate={aggregate}: rounds.{source}.reward_model.members=1, and "
                "of one member there is nothing to aggregate; use mean, or more members"
            )
        buffer = _mapping(body, "truncated").get("buffer")
        limit = _mapping(raw, "model").get("max_response_tokens")
        if isinstance(buffer, int) and isinstance(limit, int) and buffer > limit:
            yield (
                f"candidates.{name}.truncated.buffer={buffer}: more than "
                f"model.max_response_tokens={limit}; lower it"
            )
        kl = _mapping(body, "kl")
        if kl.get("estimator") == "full" and _mapping(raw, "model").get("logits_chunk_tokens"):
            yield (
                f"candidates.{name}.kl.estimator=full: needs all logits at once, and "
                "model.logits_chunk_tokens forbids them; use k3_straight_through, or set it to null"
            )
    for name in known[1:]:
        if not any(isinstance(b, dict) and b.get("round") == name for b in candidates.values()):
            yield f"rounds.{name}: has no candidate, so nothing to promote; add candidates.{name}-..."
    simulated = [
        name
        for name, body in rounds.items()
        if isinstance(body, dict)
        and _mapping(_mapping(body, "preferences"), "labeler").get("kind") == "simulated"
    ]
    if simulated and raw.get("gold") is None:
        yield (
            f"rounds.{simulated[0]}.preferences.labeler.kind=simulated: needs gold; "
            "declare gold, or use another labeler"
        )
    if raw.get("gold") is None:
        if _mapping(raw, "evaluation").get("select") == "best_gold":
            yield "evaluation.select=best_gold: no gold is declared; use last or best_proxy"
        for name in rounds:
            gate = _mapping(_mapping(rounds, name), "gate")
            parts = [gate.get(key) for key in ("rules", "tie_break")]
            listed = [part for parts_ in parts if isinstance(parts_, list) for part in parts_]
            names = [gate.get("metric"), *(p.get("metric") for p in listed if isinstance(p, dict))]
            if "gold_mean" in names:
                yield (
                    f"rounds.{name}.gate: uses gold_mean but no gold is declared; "
                    "use win_rate or proxy_mean"
                )


def _rollback(rollback: Mapping[str, Any], known: list[str]) -> Iterator[str]:
    """It names declared rounds, and goes back."""
    named = {key: rollback[key] for key in ("to", "after") if isinstance(rollback.get(key), str)}
    for key, name in named.items():
        if name not in known:
            yield f"rollback.{key}={name}: no such round; use one of {', '.join(known)}"
    places = [known.index(name) for name in named.values() if name in known]
    if len(places) == 2 and places[0] > places[1]:
        yield (
            f"rollback.to={named['to']}: comes after rollback.after={named['after']}; "
            "a rollback goes back to an earlier round"
        )


def _warm_start(name: str, rounds: Mapping[Any, Any]) -> Iterator[str]:
    """A committee that starts as the previous one needs one of the same size."""
    own = _mapping(_mapping(rounds, name), "reward_model")
    if own.get("init") != "previous":
        return
    start = _mapping(rounds, name).get("from")
    if start == "r0":
        yield (
            f"rounds.{name}.reward_model.init=previous: r0 has no reward model to start from; "
            "use policy"
        )
    members = _mapping(_mapping(rounds, str(start)), "reward_model").get("members")
    if members is not None and members != own.get("members"):
        yield (
            f"rounds.{name}.reward_model.init=previous: rounds.{start} has {members} members, this "
            f"one {own.get('members')}; use as many, or init: policy"
        )


def _decision(name: str, body: Any, candidates: Mapping[Any, Any]) -> Iterator[str]:
    """A person can promote only a candidate of the round."""
    chosen = _mapping(body, "decision").get("candidate") if isinstance(body, dict) else None
    if chosen is None:
        return
    own = [k for k, c in candidates.items() if isinstance(c, dict) and c.get("round") == name]
    if chosen not in own:
        yield (
            f"rounds.{name}.decision.candidate={chosen}: not a candidate of {name}; "
            f"use one of {', '.join(map(str, own))}"
        )


def _readable(error: ValidationError) -> Iterator[str]:
    """One line per problem: dotted path, value, rule, mend."""
    for item in error.errors():
        place, around, below = _place(item["loc"])
        path = ".".join(place) or "pipeline"
        kind, value, context = item["type"], item["input"], item.get("ctx", {})
        shown = "" if isinstance(value, (dict, list, BaseModel)) else f"={value}"
        if kind == "extra_forbidden":
            own = any(issubclass(section, Imported) for section in around)
            mend = "write it under options:" if own else _suggest(place[-1], around)
            yield f"{path}: unknown key; {mend}"
        elif kind == "missing":
            yield f"{path}: required and missing; add it{_line_to_add(path)}"
        elif kind == "literal_error" and item["loc"][-1] == "[key]":
            yield f"{path}: unknown key; use {context['expected']}"
        elif kind == "literal_error":
            near = _near(value, re.findall("'([^']*)'", context["expected"]))
            yield f"{path}={value!r}: must be one of {context['expected']}{near}"
        elif kind == "union_tag_invalid":
            expected = context["expected_tags"].replace(
                f"'{IMPORTED}'", "an import path like my_package.my_function"
            )
            yield f"{path}.kind={context['tag']}: must be one of {expected}"
        elif kind == "union_tag_not_found":
            kinds = ", ".join(repr(tag) for tag in _tags(below) if tag != IMPORTED)
            if not isinstance(value, Mapping):
                yield f"{path}{shown}: must be a mapping like {{kind: ...}}; write one of {kinds}"
                continue
            yield f"{path}.kind: required and missing; write one of {kinds}"
        elif kind == "value_error":
            for problem in context["error"].args:
                yield f"{path}{'.' if _STARTS_WITH_KEY.match(problem) else ': '}{problem}"
        elif kind in ("float_type", "int_type", "int_from_float") and isinstance(value, str):
            if value.lower().strip("+-.") in ("inf", "infinity", "nan"):
                yield f"{path}={value}: input should be a finite number"
            else:
                yield f"{path}='{value}': must be a number, not text; remove the quotes (write 1.0e-5)"
        elif kind == "string_type" and place[-1] in _NAMES_A_ROUND and isinstance(value, int):
            yield f"{path}={value}: a round name is text like r{value}, not a number; write r{value}"
        elif kind == "string_type" and isinstance(value, date):
            yield f'{path}={value}: must be text, not a date; write it in quotes: "{value}"'
        elif kind in ("dict_type", "model_type", "model_attributes_type"):
            yield f"{path}{shown}: must be a mapping of keys to values; write its keys below it"
        elif kind == "too_short" and isinstance(value, dict):
            yield f"{path}: empty; declare at least {context['min_length']}"
        else:
            yield f"{path}{shown}: {_lower(item['msg'])}"


_NAMES_A_ROUND = ("from", "sample_from", "round", "to", "after")

# Keys that files from before them lack, with what keeps such a file doing what it did.
_LINES_TO_ADD = {
    "resources.checkpoints": "{every_steps: 25, every_minutes: 5.0, keep: 2, max_gigabytes: 20.0}",
    "rounds.*.init": "previous",
    "rounds.*.reward_model.init": "policy",
    "rounds.*.decision": "null",
    "rounds.*.gate": "{metric: gold_mean, margin: 0.0, tie_break: [], rules: [], on_fail: keep}",
    "rounds.*.gate.metric": "gold_mean",
    "rounds.*.gate.rules": "[]",
    "rounds.*.gate.margin": "0.0",
    "rounds.*.gate.tie_break": "[]",
    "rounds.*.gate.on_fail": "keep",
    "lineage": "{commit: true, push: false}",
    "evaluation.best_of_n_samples": "64",
}


def _line_to_add(path: str) -> str:
    value = _LINES_TO_ADD.get(re.sub(r"^rounds\.[^.]+", "rounds.*", path))
    return "" if value is None else f": `{path.rpartition('.')[2]}: {value}`"


def _near(value: Any, names: list[str]) -> str:
    close = difflib.get_close_matches(str(value), names, n=1, cutoff=0.6)
    close = close or [name for name in names if name.startswith(f"{value}_")]
    return f"; did you mean {close[0]}?" if close else ""


_STARTS_WITH_KEY = re.compile(r"[a-z_.]+=")


def _place(
    loc: tuple[int | str, ...],
) -> tuple[list[str], list[type[Section]], list[type[Section]]]:
    """An error's place as people write it, the sections its last key may belong to, those below it.

    Pydantic also names the member of a union, "[key]" and "[word]", which are no keys of the file.
    """
    place: list[str] = []
    around: list[type[Section]] = [Pipeline]
    below: list[type[Section]] = [Pipeline]
    for part in loc:
        fields = {f.alias or n: f for section in below for n, f in section.model_fields.items()}
        if part in _tags(below) and part not in fields:
            below = [section for section in below if _tag(section) == part]
        elif not str(part).startswith("["):
            place.append(str(part))
            around = below
            below = _classes(fields[str(part)].annotation) if part in fields else below
    return place, around, below


def _classes(annotation: Any) -> list[type[Section]]:
    """The sections that an annotation mentions."""
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return [annotation]
    return [section for part in get_args(annotation) for section in _classes(part)]


def _tag(section: type[Section]) -> str | None:
    """What `kind` says in this section, if it has one."""
    field = section.model_fields.get("kind")
    if field is None:
        return None
    names = get_args(field.annotation)
    return str(names[0]) if names else IMPORTED


def _tags(sections: list[type[Section]]) -> list[str]:
    return [tag for tag in map(_tag, sections) if tag is not None]


def _lower(message: str) -> str:
    return message[:1].lower() + message[1:]


def _suggest(key: str, sections: list[type[Section]]) -> str:
    """Where a key of a round belongs, or a near spelling among the keys that the section has."""
    if Pipeline in sections and key in {f.alias or n for n, f in Round.model_fields.items()}:
        return f"it belongs to a round; write it below each, as rounds.NAME.{key}"
    names = {f.alias or n for section in sections for n, f in section.model_fields.items()}
    close = difflib.get_close_matches(key, sorted(names), n=1, cutoff=0.7)
    return f"did you mean {close[0]}?" if close else "remove it"
