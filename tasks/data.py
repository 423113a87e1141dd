"""The first stage: the world's or the user's files become the checked tables all others read.

Writes data/source (the world's files, or a manifest of the user's), data/tables (prompts,
demonstrations, too_long), runs/r0/preferences (imported pairs, zero rows without any) and
runs/r0/reward_model, which has no members: so every round has one to depend on.
"""

from __future__ import annotations

import hashlib
import importlib
import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pandas as pd

from rlhf import artifacts, config, contracts
from rlhf.data import readers
from rlhf.data.text import TextCodec, load_tokenizer
from rlhf.errors import BadInput
from rlhf.progress import Clock
from tasks import common

log = logging.getLogger("roundhouse")

PREFERENCES = common.RUNS / "r0" / "preferences"
REWARD_MODEL = common.RUNS / "r0" / "reward_model"
HELDOUT_DEMONSTRATIONS = 0.05
"""Fraction of the prompts whose demonstrations are held out, where rows carry no split."""
HELDOUT_GROUPS = 0.1
"""Fraction of the prompts whose imported pairs are held out."""


def run(pipeline: config.Pipeline) -> None:
    """Make, read, check, limit, split and write."""
    clock = Clock("data")
    config.check_files(pipeline)
    data = pipeline.data
    _write_source(pipeline)
    sources = _read(data)

    codec = TextCodec(load_tokenizer(pipeline.model), pipeline.model)
    ledger = _limit(sources, codec)

    for source in sources.values():
        source.add_prompt_ids()
    prompts = _split_prompts(
        sources["prompts"], {str(split): f for split, f in data.split_fractions.items()}
    )
    demonstrations = _split_demonstrations(sources["demonstrations"])
    pairs = _pairs(sources.get("preferences"))
    _refuse_contamination(sources, prompts, demonstrations)
    book = _book(prompts, demonstrations, sources)

    with artifacts.write_directory(common.TABLES) as out:
        contracts.write(book, out / "prompts.parquet", contracts.PROMPTS)
        contracts.write(
            demonstrations[list(contracts.DEMONSTRATIONS.columns)],
            out / "demonstrations.parquet",
            contracts.DEMONSTRATIONS,
        )
        contracts.write(ledger, out / "too_long.parquet", contracts.TOO_LONG)
    with artifacts.write_directory(PREFERENCES) as out:
        contracts.write(pairs, out / "pairs.parquet", contracts.PAIRS)
        contracts.write(
            contracts.empty(contracts.SAMPLES), out / "samples.parquet", contracts.SAMPLES
        )
        contracts.write(contracts.empty(contracts.PAIRS), out / common.EARLIER, contracts.PAIRS)
    with artifacts.write_directory(REWARD_MODEL) as out:
        # As rlhf.rewards.committee reads it, which imports torch.
        artifacts.write_json(out / "scale.json", {"members": []})
    log.info(
        "data: %d prompts, %d demonstrations, %d imported pairs, %d rows over the limits",
        len(book),
        len(demonstrations),
        len(pairs),
        len(ledger),
    )
    clock.write()


# --- sources --------------------------------------------------------------------------------------


@dataclass
class Source:
    """One of the user's tables, with its name in the ledger and in messages."""

    name: str
    where: str
    table: pd.DataFrame
    responses: list[str] = field(default_factory=list)
    """The columns that hold responses."""

    def row(self, index: Any) -> int:
        """The row's number in the user's file, from 1."""
        return int(self.table["row"].loc[index])

    def add_prompt_ids(self) -> None:
        """The column prompt_id, once prompts have their final text."""
        self.table["prompt_id"] = [
            contracts.prompt_id(prompt, chat)
            for prompt, chat in zip(self.table["prompt"], self.table["messages"], strict=True)
        ]


def _write_source(pipeline: config.Pipeline) -> None:
    """data/source: the world's files, or paths and hashes of the user's."""
    data = pipeline.data
    with artifacts.write_directory(common.SOURCE) as out:
        if data.world is None:
            artifacts.write_json(out / "manifest.json", _manifest(Path(data.source)))
            return
        where = f"data.world={data.world}"
        try:
            world = importlib.import_module(data.world)
            world.write(out, seed=pipeline.seed_for("world"), **data.world_options)
        except OSError:
            raise
        except Exception as error:
            raise BadInput(
                f"the world could not be written: {type(error).__name__}: {error}",
                where=where,
                rule="a module with write(out, *, seed, **data.world_options)",
                mend="correct data.world or data.world_options",
            ) from error


def _manifest(source: Path) -> dict[str, Any]:
    if not source.exists():
        raise BadInput(
            "no such file or directory",
            where=f"data.source={source}",
            rule="the file or directory that holds your data, so that changes are noticed",
            mend="correct the path in pipeline.yaml",
        )
    found = source.rglob("*") if source.is_dir() else [source]
    files = sorted(p for p in found if p.is_file() and "__pycache__" not in p.parts)
    return {"files": [{"path": p.as_posix(), "sha256": _sha256(p)} for p in files]}


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _read(data: config.Data) -> dict[str, Source]:
    demonstrations = readers.read_demonstrations(
        data.demonstrations,
        repeats=data.world is not None,  # a world draws at random and may draw the same twice
    )
    sources = {
        "prompts": Source("prompts", _where(data.prompts), readers.read_prompts(data.prompts)),
        "demonstrations": Source(
            "demonstrations", _where(data.demonstrations), demonstrations, ["response"]
        ),
    }
    if data.preferences is not None:
        table = readers.read_preferences(data.preferences)
        where = _where(data.preferences)
        sources["preferences"] = Source("preferences", where, table, ["chosen", "rejected"])
    for source in sources.values():
        for column in source.responses:
            source.table[f"{column}_ended"] = True
    return sources


def _where(spec: config.FileTable | config.HubTable) -> str:
    return spec.path if isinstance(spec, config.FileTable) else f"{spec.name}@{spec.revision}"


# --- limits ---------------------------------------------------------------------------------------


def _limit(sources: Mapping[str, Source], codec: TextCodec) -> pd.DataFrame:
    """Bring the sources under the model's limits as `too_long` says; returns the ledger."""
    _refuse_unfit_text(sources.values(), codec)
    model = codec.model
    problems: list[str] = []
    ledger: list[dict[str, Any]] = []
    for source in sources.values():
        entries = _over_limits(source, codec)
        if model.too_long == "error":
            problems += [
                f"{source.where} row {entry['row']}: {entry['prompt_tokens']} prompt tokens, "
                f"{entry['response_tokens']} response tokens"
                for entry in entries.values()
            ]
            continue
        if model.too_long == "drop":
            source.table = source.table.drop(index=list(entries))
        else:
            problems += _truncate(source, codec, list(entries))
            for index in _made_equal(source, entries):
                entries[index]["action"] = "drop_equal"
                source.table = source.table.drop(index=index)
        if source.table.empty and source.name != "preferences":
            problems.append(f"{source.where}: no row is left")
        ledger += entries.values()
    if problems:
        raise BadInput(
            contracts.listing(problems),
            where="rows too long for the model",
            rule=f"at most {model.max_prompt_tokens} prompt tokens and {model.max_response_tokens} "
            "response tokens, end token included (model.max_prompt_tokens, max_response_tokens)",
            mend="raise the limits, shorten the rows, or set model.too_long to drop or truncate",
        )
    return pd.DataFrame(ledger) if ledger else contracts.empty(contracts.TOO_LONG)


def _refuse_unfit_text(sources: Iterable[Source], codec: TextCodec) -> None:
    """Chats without a template, and responses that spell the tokens the pipeline adds itself."""
    tokenizer = codec.tokenizer
    added = {tokenizer.eos_token, tokenizer.bos_token, tokenizer.pad_token} - {None}
    problems = []
    for source in sources:
        chats = source.table["messages"].notna()
        if codec.model.chat_template == "none":
            problems += [
                f"{source.where} row {source.row(i)}: chat messages need a chat template"
                for i in source.table.index[chats]
            ]
        for column in source.responses:
            for i, text in source.table[column].items():
                problems += [
                    f"{source.where} row {source.row(i)}, column {column}: holds {token}, "
                    "which the pipeline adds by itself"
                    for token in sorted(added)
                    if token in text
                ]
    if problems:
        raise BadInput(
            contracts.listing(problems),
            where="data",
            rule="responses are text without beginning, end or padding tokens",
            mend="correct these rows, or model.chat_template",
        )


def _over_limits(source: Source, codec: TextCodec) -> dict[Any, dict[str, Any]]:
    """Ledger entries, by the table's index, of the rows over a limit."""
    table, model = source.table, codec.model
    asked = table[["prompt", "messages"]].drop_duplicates()
    chats = _chats(asked)
    lengths = {
        (prompt, chat): len(ids)
        for prompt, chat, ids in zip(
            asked["prompt"],
            chats,
            codec.encode_prompts(list(asked["prompt"]), chats),
            strict=True,
        )
    }
    response_tokens = [0] * len(table)
    for column in source.responses:
        rows = codec.encode_responses(list(table[column]), [True] * len(table))
        response_tokens = [max(n, len(ids)) for n, ids in zip(response_tokens, rows, strict=True)]
    entries = {}
    for index, prompt, chat, num_response in zip(
        table.index, table["prompt"], _chats(table), response_tokens, strict=True
    ):
        num_prompt = lengths[prompt, chat]
        if num_prompt > model.max_prompt_tokens or num_response > model.max_response_tokens:
            entries[index] = {
                "table": source.name,
                "row": source.row(index),
                "prompt_tokens": num_prompt,
                "response_tokens": num_response,
                "action": model.too_long,
            }
    return entries


def _truncate(source: Source, codec: TextCodec, indices: list[Any]) -> list[str]:
    """Cut prompts at their start and responses at their end; returns the rows that cannot be."""
    model = codec.model
    problems: list[str] = []
    texts = {column: dict(source.table[column].items()) for column in ["prompt", *source.responses]}
    chats = dict(zip(source.table.index, _chats(source.table), strict=True))
    ended = {column: dict(source.table[f"{column}_ended"].items()) for column in source.responses}
    for i in indices:
        place = f"{source.where} row {source.row(i)}"
        prompt = texts["prompt"][i]
        if len(codec.encode_prompt(prompt, chats[i])) > model.max_prompt_tokens:
            if chats[i] is not None:
                problems.append(
                    f"{place}: a chat prompt cannot be truncated; drop it or raise limits"
                )
                continue
            texts["prompt"][i] = codec.truncate_prompt(prompt, model.max_prompt_tokens)
        for column in source.responses:
            text = texts[column][i]
            if len(codec.encode_response(text, ended=True)) > model.max_response_tokens:
                texts[column][i] = codec.truncate_response(text, model.max_response_tokens)
                ended[column][i] = False
        problems += [
            f"{place}, column {column}: nothing is left within the limit"
            for column in texts
            if not texts[column][i].strip()
        ]
    for column, values in texts.items():
        source.table[column] = pd.Series(values, dtype="object")
    for column, flags in ended.items():
        source.table[f"{column}_ended"] = pd.Series(flags, dtype="bool")
    return problems


def _made_equal(source: Source, truncated: Iterable[Any]) -> list[Any]:
    """The truncated pairs whose two answers became the same text."""
    if source.name != "preferences":
        return []
    equal = source.table["chosen"] == source.table["rejected"]
    return [i for i in truncated if equal[i]]


# --- splits ---------------------------------------------------------------------------------------


def position(text: str) -> float:
    """A number in [0, 1) that the text alone fixes."""
    digest = hashlib.sha256(f"v1 {text}".encode()).digest()
    return int.from_bytes(digest[:6], "big") / 2**48


def split_of(text: str, fractions: Mapping[str, float]) -> str:
    """The split a prompt falls into by its text, where its row names none."""
    place, bound = position(text), 0.0
    chosen = ""
    for split in config.SPLITS:
        if fractions[split] > 0:
            bound, chosen = bound + fractions[split], split
            if place < bound:
                break
    return chosen


def heldout_prompts(prompt_ids: Iterable[str], fraction: float) -> set[str]:
    """The prompts held out by their ids' hash: at least one and not all, if there are two."""
    ranked = sorted(set(prompt_ids), key=lambda name: (position(f"heldout {name}"), name))
    if len(ranked) < 2:
        return set()
    below = sum(position(f"heldout {name}") < fraction for name in ranked)
    return set(ranked[: min(max(below, 1), len(ranked) - 1)])


def _split_prompts(source: Source, fractions: Mapping[str, float]) -> pd.DataFrame:
    """The prompts with their splits, each once. Raises BadInput for a prompt in two splits."""
    table = source.table
    if "split" not in table:
        texts = map(contracts.canonical_prompt, table["prompt"], _chats(table))
        table["split"] = [split_of(text, fractions) for text in texts]
    problems = []
    for _, rows in table.groupby("prompt_id", sort=False):
        if rows["split"].nunique() > 1:
            places = ", ".join(
                f"row {r} {s}" for r, s in zip(rows["row"], rows["split"], strict=True)
            )
            problems.append(f"{contracts.short(rows['prompt'].iloc[0])}: {places}")
    if problems:
        raise BadInput(
            contracts.listing(problems),
            where=source.where,
            rule="a prompt belongs to one split",
            mend="keep one of each prompt's rows",
        )
    absent = [s for s in ("preferences", "choose", "report") if s not in set(table["split"])]
    if absent:
        raise BadInput(
            f"no prompt is in split {', '.join(absent)}",
            where=source.where,
            rule="labelling needs prompts in preferences, evaluation in choose and report",
            mend="add prompts, or change their split or data.split_fractions",
        )
    return table.drop_duplicates("prompt_id")


def _split_demonstrations(source: Source) -> pd.DataFrame:
    """The demonstrations, each train or heldout, no prompt in both."""
    table = source.table
    table["ended"] = table["response_ended"]
    if "split" not in table:
        heldout = heldout_prompts(table["prompt_id"], HELDOUT_DEMONSTRATIONS)
        table["split"] = ["heldout" if name in heldout else "train" for name in table["prompt_id"]]
    absent = {"train", "heldout"} - set(table["split"])
    if absent:
        raise BadInput(
            f"no demonstration is in split {', '.join(sorted(absent))}",
            where=source.where,
            rule="fine-tuning needs train rows to learn from and heldout rows to stop by",
            mend="give both splits rows, or at least two different prompts",
        )
    train = set(table["prompt_id"][table["split"] == "train"])
    both = table[(table["split"] == "heldout") & table["prompt_id"].isin(train)]
    if len(both):
        raise BadInput(
            contracts.listing([_place(source, i) for i in both.index]),
            where=source.where,
            rule="a heldout demonstration's prompt is in no train demonstration",
            mend="move all demonstrations of a prompt to one split",
        )
    return table


def _pairs(source: Source | None) -> pd.DataFrame:
    """The imported pairs as round r0; those of one prompt are one group."""
    if source is None or source.table.empty:
        return contracts.empty(contracts.PAIRS)
    table = source.table
    heldout = heldout_prompts(table["prompt_id"], HELDOUT_GROUPS)
    return pd.DataFrame(
        {
            "pair_id": [f"r0-{row}" for row in table["row"]],
            "group_id": [f"r0-{name}" for name in table["prompt_id"]],
            "prompt_id": table["prompt_id"],
            "prompt": table["prompt"],
            "chosen": table["chosen"],
            "rejected": table["rejected"],
            "chosen_ended": table["chosen_ended"],
            "rejected_ended": table["rejected_ended"],
            "tie": False,
            "heldout": [name in heldout for name in table["prompt_id"]],
            "round": "r0",
            "labeler": "imported",
            "gold_margin": None,
        }
    )


def _refuse_contamination(
    sources: Mapping[str, Source], prompts: pd.DataFrame, demonstrations: pd.DataFrame
) -> None:
    """Evaluation prompts that anything learns from. Held-out demonstrations may be of choose."""
    split = dict(zip(prompts["prompt_id"], prompts["split"], strict=True))
    problems = []
    for i in demonstrations.index:
        home = split.get(demonstrations.at[i, "prompt_id"])
        kind = demonstrations.at[i, "split"]
        if home == "report" or (home == "choose" and kind == "train"):
            place = _place(sources["demonstrations"], i)
            problems.append(f"{place}: {kind} demonstration, prompt of {home}")
    if "preferences" in sources:
        pairs = sources["preferences"]
        for i, name in pairs.table["prompt_id"].items():
            if split.get(name) in ("choose", "report"):
                problems.append(f"{_place(pairs, i)}: pair, prompt of {split[str(name)]}")
    if problems:
        raise BadInput(
            contracts.listing(problems),
            where="training rows with evaluation prompts",
            rule="no prompt of choose or report is learned from",
            mend="remove these rows or these prompts, or give the prompts' rows another split",
        )


def _book(
    prompts: pd.DataFrame, demonstrations: pd.DataFrame, sources: Mapping[str, Source]
) -> pd.DataFrame:
    """Every prompt once: listed ones first, then those of demonstrations and of pairs alone."""
    parts = [prompts, demonstrations.assign(split="sft")]
    if "preferences" in sources:
        parts.append(sources["preferences"].table.assign(split="preferences"))
    columns = list(contracts.PROMPTS.columns)
    book = pd.concat([part[columns] for part in parts if len(part)])
    return book.drop_duplicates("prompt_id").reset_index(drop=True)


def _chats(table: pd.DataFrame) -> list[str | None]:
    return [None if pd.isna(chat) else str(chat) for chat in table["messages"]]


def _place(source: Source, index: Any) -> str:
    prompt = contracts.short(source.table.at[index, "prompt"])
    return f"{source.where} row {source.row(index)} {prompt}"


def main() -> None:
    """Run the stage on pipeline.yaml of the current directory."""
    common.main("data", run)


if __name__ == "__main__":
    main()
