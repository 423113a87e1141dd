"""A user's own model and data: architectures, tokenizers, templates, file formats and limits, stage by stage."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from ruamel.yaml import YAML
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from rlhf import artifacts, config, contracts, labelers
from rlhf.errors import BadInput
from rlhf.rewards.gold import load_gold
from tasks import data, evaluate, policy, preferences, promote, reward_model, sft

ROOT = Path(__file__).parents[2]
THINGS = ["rain", "bread", "a river", "the moon", "snow", "tea", "a bridge", "music", "glass"]
ANSWERS = [
    "It is fine — really.",
    "I like it very much!",
    "It is good, naïve and old.",
    "日本 it is.",
]
CHAT = (
    "{% for m in messages %}<|{{ m['role'] }}|>\n{{ m['content'] }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)
GOLD = """
import pandas as pd

def score(prompts, responses, ended):
    return pd.DataFrame({"total": [len(set(r)) / 10 + e for r, e in zip(responses, ended)]})
"""
SPECIAL = ["<|bos|>", "<|end|>", "<|pad|>", "<|system|>", "<|user|>", "<|assistant|>"]


# --- what a user brings ---------------------------------------------------------------------------


def tokenizer(*, adds_bos: bool = False, **options: Any) -> PreTrainedTokenizerFast:
    """A byte-level BPE trained on the texts below; the end token is <|end|>."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=340,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator([question(t) for t in THINGS] + ANSWERS, trainer)
    if adds_bos:
        backend.post_processor = processors.TemplateProcessing(
            single="<|bos|> $A", special_tokens=[("<|bos|>", 0)]
        )
        options["bos_token"] = "<|bos|>"
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|end|>", **options)


def llama(size: int) -> PreTrainedModel:
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=size,
            hidden_size=24,
            num_hidden_layers=1,
            num_attention_heads=2,
            num_key_value_heads=1,
            intermediate_size=32,
            max_position_embeddings=96,
            tie_word_embeddings=True,
        )
    )


def gpt2(size: int) -> PreTrainedModel:
    """Learned absolute positions, and dropout as its authors set it."""
    return GPT2LMHeadModel(
        GPT2Config(vocab_size=size, n_embd=24, n_layer=1, n_head=2, n_positions=96)
    )


def qwen2(size: int) -> PreTrainedModel:
    """More rows of embeddings than the tokenizer has tokens, as its authors pad them."""
    return Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=size + 20,
            hidden_size=24,
            num_hidden_layers=1,
            num_attention_heads=2,
            num_key_value_heads=1,
            intermediate_size=32,
            max_position_embeddings=96,
        )
    )


def question(thing: str) -> str:
    return f"Say something about {thing}."


def chat(text: str, kind: int = 0) -> list[dict[str, str]]:
    """A chat that ends with the question: with a system message, or after an earlier turn."""
    first = {"role": "system", "content": "Be short."} if kind else {}
    turns = [{"role": "user", "content": "Hello."}, {"role": "assistant", "content": "Hello!"}]
    return [first or turns[0], *([] if kind else turns[1:]), {"role": "user", "content": text}]


def save_model(model: PreTrainedModel, tok: PreTrainedTokenizerFast) -> str:
    model.save_pretrained("mine/model")
    tok.save_pretrained("mine/model")
    return "mine/model"


def save(path: str, rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Rows in the format the name says, and the start of their entry in pipeline.yaml."""
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    if target.suffix == ".parquet":
        pd.DataFrame(rows).to_parquet(target)
    elif target.suffix == ".csv":
        pd.DataFrame(rows).to_csv(target, index=False)
    else:
        target.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return {"kind": "file", "path": path}


def text_data() -> dict[str, Any]:
    """Prompts as text in CSV, demonstrations in Parquet, pairs in JSONL."""
    splits = ["preferences", "preferences", "rl", "rl", "choose", "choose", "report", "report"]
    return {
        "prompts": save(
            "mine/prompts.csv",
            [{"question": question(t), "part": s} for t, s in zip(THINGS[:8], splits, strict=True)],
        )
        | {"prompt": "question", "split": "part"},
        "demonstrations": save(
            "mine/demonstrations.parquet",
            [{"ask": f"Tell me of {t}.", "say": a} for t in THINGS for a in ANSWERS[:2]],
        )
        | {"prompt": "ask", "response": "say"},
        "preferences": save(
            "mine/pairs.jsonl",
            [{"q": f"And {t}?", "good": ANSWERS[2], "bad": ANSWERS[3]} for t in THINGS[:4]],
        )
        | {"prompt": "q", "chosen": "good", "rejected": "bad"},
    }


def chat_data() -> dict[str, Any]:
    """The same as lists of messages, in JSONL and Parquet."""
    splits = ["preferences", "preferences", "rl", "rl", "choose", "choose", "report", "report"]
    return {
        "prompts": save(
            "mine/prompts.jsonl",
            [
                {"messages": chat(question(t), kind=i % 2), "split": s}
                for i, (t, s) in enumerate(zip(THINGS[:8], splits, strict=True))
            ],
        )
        | {"prompt": "messages", "split": "split"},
        "demonstrations": save(
            "mine/demonstrations.parquet",
            [{"messages": chat(f"Tell me of {t}."), "say": ANSWERS[0]} for t in THINGS],
        )
        | {"prompt": "messages", "response": "say"},
        "preferences": save(
            "mine/pairs.jsonl",
            [
                {"messages": chat(f"And {t}?"), "good": ANSWERS[1], "bad": ANSWERS[3]}
                for t in THINGS[:4]
            ],
        )
        | {"prompt": "messages", "chosen": "good", "rejected": "bad"},
    }


def write_pipeline(tables: dict[str, Any], **model: Any) -> config.Pipeline:
    """pipeline.yaml of a user's project: the default with their model and data, a few steps of everything."""
    raw = config.read_yaml(ROOT / "pipeline.yaml")
    raw["project"] = "formats"
    raw["model"] |= {
        "base": "mine/model",
        "demo": None,
        "tokenizer": None,
        "max_prompt_tokens": 60,
        "max_response_tokens": 30,
    } | model
    raw["data"] |= {"source": "mine", "world": None, "world_options": {}} | tables
    raw["gold"]["path"] = "formats_gold"
    raw["resources"]["threads"] = dict.fromkeys(raw["resources"]["threads"], 1)
    raw["sft"] |= {"epochs": 1, "batch_size": 8, "micro_batch_size": 4, "warmup_steps": 0}
    first = raw["rounds"]["r1"]
    first["preferences"] |= {"num_groups": 4, "num_heldout_groups": 3, "samples_per_prompt": 2}
    first["reward_model"] |= {
        "members": 2,
        "epochs": 1,
        "groups_per_batch": 4,
        "micro_batch_size": 2,
        "num_reference_samples": 4,
    }
    ppo, dpo = raw["candidates"]["r1-ppo"], raw["candidates"]["r1-dpo"]
    ppo |= {"steps": 2, "prompts_per_step": 4, "micro_batch_size": 2, "checkpoint_every": 2}
    ppo["value"]["warmup_steps"] = 1
    dpo |= {"batch_size": 4, "micro_batch_size": 2, "epochs": 1, "checkpoint_every": 9}
    raw["candidates"] = {"r1-ppo": ppo, "r1-dpo": dpo}
    raw["evaluation"] |= {
        "final_samples_per_prompt": 2,
        "num_bootstrap": 100,
        "best_of_n_samples": 4,
    }
    raw["rounds"]["r1"]["gate"]["rules"] = []
    Path("pipeline.yaml").write_text(json.dumps(raw))
    return config.load()


@pytest.fixture(scope="module")
def tracking_store(tmp_path_factory: pytest.TempPathFactory) -> str:
    """One MLflow store for all tests here: making its tables takes seconds."""
    return f"sqlite:///{tmp_path_factory.mktemp('mlflow')}/mlflow.db"


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tracking_store: str) -> Iterator[Path]:
    """An empty project folder as the current directory, with a gold program."""
    (tmp_path / "formats_gold.py").write_text(GOLD)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("MLFLOW_TRACKING_URI", tracking_store)
    monkeypatch.setattr(policy, "NUM_PROBES", 4)
    threads = torch.get_num_threads()
    torch.manual_seed(0)
    yield tmp_path
    torch.set_num_threads(threads)
    torch.use_deterministic_algorithms(False)
    for name in [n for n in sys.modules if n.split(".")[0] in ("formats_gold", "mine")]:
        del sys.modules[name]


def run_round(pipeline: config.Pipeline) -> None:
    """Every stage, in order, in this process."""
    data.run(pipeline)
    sft.run(pipeline)
    preferences.run(pipeline, "r1")
    reward_model.run(pipeline, "r1")
    for name in pipeline.candidates:
        policy.run(pipeline, name)
        evaluate.run(pipeline, name)
    promote.run(pipeline, "r1")


# --- whole rounds ---------------------------------------------------------------------------------

ROUNDS: dict[str, tuple[Any, dict[str, Any], Any, dict[str, Any]]] = {
    # A beginning token, padding on the left, text prompts.
    "llama": (
        llama,
        {"adds_bos": True, "pad_token": "<|pad|>", "padding_side": "left"},
        text_data,
        {},
    ),
    # No beginning and no padding token (padding = end), text prompts, bfloat16.
    "gpt2": (gpt2, {"padding_side": "right"}, text_data, {"dtype": "bfloat16"}),
    # A chat template, chat prompts.
    "qwen2": (
        qwen2,
        {"pad_token": "<|pad|>", "padding_side": "left", "chat_template": CHAT},
        chat_data,
        {"chat_template": "tokenizer"},
    ),
}


@pytest.mark.parametrize("name", ROUNDS)
def test_a_round_on_ones_own_model_and_data(project: Path, name: str) -> None:
    build, options, tables, model = ROUNDS[name]
    own = tokenizer(**options)
    save_model(build(len(own)), own)
    run_round(write_pipeline(tables(), **model))

    # The pairs the user brought are learned from beside the round's own.
    pairs = contracts.read("runs/r1/preferences/pairs.parquet", contracts.PAIRS)
    assert (pairs["round"] == "r0").sum() == 4
    assert (pairs["round"] == "r1").sum() > 0
    samples = contracts.read("runs/r1/preferences/samples.parquet", contracts.SAMPLES)
    assert samples["num_tokens"].between(1, 30).all()
    assert not samples["response"].str.contains("<|", regex=False).any()

    for candidate in ("r1-ppo", "r1-dpo"):
        path = f"runs/r1/evaluations/{candidate}/evaluations.parquet"
        table = contracts.read(path, contracts.EVALUATIONS)
        assert (table.loc[table["checkpoint"] == "incoming", "kl_nats"] == 0).all()
        assert (table.loc[table["checkpoint"] != "incoming", "kl_nats"] > 0).all()

    # What is promoted is a plain transformers model that ends where answers end.
    decision = artifacts.read_json(Path("runs/r1/metrics/decision.json"))
    assert decision["promoted"] in ("r1-ppo", "r1-dpo")
    promoted = AutoModelForCausalLM.from_pretrained("runs/r1/promoted", local_files_only=True)
    saved = AutoTokenizer.from_pretrained("runs/r1/promoted", local_files_only=True)
    assert promoted.dtype == torch.float32
    assert saved.chat_template == own.chat_template
    assert saved("Say it.")["input_ids"] == own("Say it.")["input_ids"]
    ends = promoted.generation_config.eos_token_id
    assert own.eos_token_id in (ends if isinstance(ends, list) else [ends])
    promoted.generate(**saved("Say", return_tensors="pt"), max_new_tokens=3)


def test_preferences_by_a_labeler_program_and_without_gold(project: Path) -> None:
    own = tokenizer()
    save_model(llama(len(own)), own)
    Path("formats_gold.py").write_text(
        "def longer(prompts, first, second):\n"
        "    sizes = [(len(a), len(b)) for a, b in zip(first.responses, second.responses)]\n"
        "    return ['first' if a > b else 'second' if b > a else 'tie' for a, b in sizes]\n"
    )
    write_pipeline(text_data())
    raw = config.read_yaml("pipeline.yaml")
    raw["gold"] = None
    raw["rounds"]["r1"]["preferences"]["labeler"] = {
        "kind": "program",
        "path": "formats_gold.longer",
    }
    raw["rounds"]["r1"]["gate"]["metric"] = "win_rate"
    raw["candidates"].pop("r1-ppo")
    run_round(config.parse(raw))

    pairs = contracts.read("runs/r1/preferences/pairs.parquet", contracts.PAIRS)
    own_pairs = pairs[pairs["round"] == "r1"]
    assert (own_pairs["chosen"].str.len() > own_pairs["rejected"].str.len()).all()
    assert set(own_pairs["labeler"]) == {"formats_gold.longer"}
    decision = artifacts.read_json(Path("runs/r1/metrics/decision.json"))
    assert decision["candidates"][0]["judge"] == "proxy"
    assert decision["candidates"][0]["gold_mean"] is None


# --- limits ---------------------------------------------------------------------------------------


def long_data() -> dict[str, Any]:
    tables = text_data()
    rows = [{"ask": f"Tell me of {t}.", "say": ANSWERS[0]} for t in THINGS]
    rows[1]["say"] = "word " * 40
    rows[2]["ask"] = "really " * 70 + "now?"
    tables["demonstrations"] |= save("mine/demonstrations.parquet", rows)
    return tables


def test_long_texts_are_refused_by_row(project: Path) -> None:
    own = tokenizer()
    save_model(llama(len(own)), own)
    with pytest.raises(BadInput, match="too long for the model") as caught:
        data.run(write_pipeline(long_data(), too_long="error"))
    assert "mine/demonstrations.parquet row 2" in str(caught.value)
    assert "mine/demonstrations.parquet row 3" in str(caught.value)
    assert not Path("data/tables").exists()


def test_long_texts_are_dropped_and_listed(project: Path) -> None:
    own = tokenizer()
    save_model(llama(len(own)), own)
    data.run(write_pipeline(long_data(), too_long="drop"))
    table = contracts.read("data/tables/demonstrations.parquet", contracts.DEMONSTRATIONS)
    ledger = contracts.read("data/tables/too_long.parquet", contracts.TOO_LONG)
    assert len(table) == len(THINGS) - 2
    assert list(zip(ledger["row"], ledger["action"], strict=True)) == [(2, "drop"), (3, "drop")]


def test_truncated_answers_do_not_teach_an_early_end(project: Path) -> None:
    own = tokenizer()
    save_model(llama(len(own)), own)
    pipeline = write_pipeline(long_data(), too_long="truncate")
    data.run(pipeline)
    table = contracts.read("data/tables/demonstrations.parquet", contracts.DEMONSTRATIONS)
    assert len(table) == len(THINGS)
    cut = table[~table["ended"]]
    assert len(cut) == 1
    assert cut["response"].iloc[0].startswith("word word")
    assert any(p.endswith("really now?") for p in table["prompt"])
    sft.run(pipeline)
    assert artifacts.read_json(Path("runs/r0/metrics/sft.json"))["updates"] == 1


# --- what cannot work says so ---------------------------------------------------------------------


def stage(name: str) -> subprocess.CompletedProcess[str]:
    """A stage as a program, without network."""
    return subprocess.run(
        [sys.executable, "-m", f"tasks.{name}"],
        env={**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        check=False,
    )


def test_an_unknown_hub_id_is_one_message_and_exit_code_2(project: Path) -> None:
    write_pipeline(text_data(), base="nobody/no-such-model")
    done = stage("data")
    assert done.returncode == 2
    assert done.stderr.startswith("data: model.base=nobody/no-such-model: no tokenizer")
    assert "mend: correct the name, check the network" in done.stderr
    assert "Traceback" not in done.stderr


def refusal(tables: dict[str, Any], **model: Any) -> str:
    """The message of data and sft together."""
    pipeline = write_pipeline(tables, **model)

    def both() -> None:
        data.run(pipeline)
        sft.run(pipeline)

    with pytest.raises(BadInput) as caught:
        both()
    return str(caught.value)


def test_an_unknown_model_with_a_known_tokenizer(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    tokenizer().save_pretrained("mine/tokenizer")
    message = refusal(text_data(), base="nobody/no-such-model", tokenizer="mine/tokenizer")
    assert message.startswith("model.base=nobody/no-such-model: no model could be read")
    assert "check revision and network" in message


def test_a_directory_without_weights(project: Path) -> None:
    own = tokenizer()
    save_model(llama(len(own)), own)
    Path("mine/model/model.safetensors").unlink()
    message = refusal(text_data())
    assert message.startswith("mine/model: the directory holds no weights (*.safetensors)")


def test_damaged_weights(project: Path) -> None:
    own = tokenizer()
    save_model(llama(len(own)), own)
    Path("mine/model/model.safetensors").write_bytes(b"not weights")
    assert refusal(text_data()).startswith("model.base=mine/model: no model could be read")


def test_a_file_that_is_no_gguf(project: Path) -> None:
    Path("mine").mkdir()
    Path("mine/model.gguf").write_bytes(b"GGUF but not really")
    assert "model.base=mine/model.gguf: no tokenizer" in refusal(
        text_data(), base="mine/model.gguf"
    )


def test_limits_beyond_the_models_context(project: Path) -> None:
    own = tokenizer()
    save_model(gpt2(len(own)), own)
    message = refusal(text_data(), max_prompt_tokens=70, max_response_tokens=30)
    assert "max_prompt_tokens + max_response_tokens = 100 tokens" in message
    assert "reads at most 96 tokens" in message


def test_another_models_tokenizer(project: Path) -> None:
    own = tokenizer()
    save_model(llama(len(own) - 10), own)
    assert "the tokenizer has" in refusal(text_data())


def test_chats_without_a_template(project: Path) -> None:
    own = tokenizer()
    save_model(llama(len(own)), own)
    assert "chat messages need a chat template" in refusal(chat_data())
    assert "no chat template" in refusal(text_data(), chat_template="tokenizer")


# --- loading --------------------------------------------------------------------------------------


def test_settings_that_transformers_refuses_to_save_are_mended(project: Path) -> None:
    """Real models ship sampling settings without do_sample; saving a policy must still work."""
    own = tokenizer()
    save_model(llama(len(own)), own)
    Path("mine/model/generation_config.json").write_text(json.dumps({"temperature": 0.6}))
    pipeline = write_pipeline(text_data())
    data.run(pipeline)
    sft.run(pipeline)
    saved = AutoModelForCausalLM.from_pretrained("runs/r0/promoted", local_files_only=True)
    assert saved.generation_config.do_sample
    assert saved.generation_config.eos_token_id == [own.eos_token_id]


# --- the page about it ----------------------------------------------------------------------------


def test_the_examples_of_the_page_work(project: Path) -> None:
    text = (ROOT / "docs/data.md").read_text(encoding="utf-8")
    blocks = re.findall(r"```(\w+)\n(.*?)```", text, re.S)
    first = next(body for kind, body in blocks if kind == "yaml")
    raw = config.read_yaml(ROOT / "pipeline.yaml") | YAML(typ="safe", pure=True).load(first)
    assert config.parse(raw).gold == config.Gold(kind="program", path="mine.gold")

    programs = [body for kind, body in blocks if kind == "python"]
    Path("mine").mkdir()
    Path("mine/gold.py").write_text(programs[0])
    Path("mine/labels.py").write_text(programs[1])
    gold = load_gold(config.Gold(kind="program", path="mine.gold"))
    scores = gold.score(["q", "q"], ["one two", "a b c d e f g h"], [False, True])
    assert scores["total"].tolist() == [-0.75, 0.5]
    labeler = labelers.build(
        config.ProgramLabeler(kind="program", path="mine.labels.compare"), None, 0
    )
    sides = [
        labelers.Answers(["1"], ["short"], [True]),
        labelers.Answers(["2"], ["longer"], [True]),
    ]
    assert labeler.label(["q"], *sides) == ["first"]
