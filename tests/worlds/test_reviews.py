"""The review world: its files, its grammar, and its gold reward by value."""

import hashlib
import json
import pathlib
import random
import subprocess
import sys
from collections import Counter

import numpy as np
import pandas as pd
import pytest
from transformers import AutoTokenizer, LlamaConfig

from rlhf.worlds import reviews
from rlhf.worlds.reviews import gold, grammar

SHORT = "write a short review of the camera for students and mention the lens :"
DETAILED = "write a detailed review of the camera for students and mention the lens :"


def read_jsonl(path: pathlib.Path) -> pd.DataFrame:
    return pd.DataFrame([json.loads(line) for line in path.read_text().splitlines()])


def gold_of(response: str, prompt: str = SHORT, ended: bool = True) -> dict[str, float]:
    table = gold.score([prompt], [response], [ended])
    return {str(name): float(table[name].iloc[0]) for name in table}


def gold_of_corpus(corpus: pd.DataFrame) -> pd.DataFrame:
    return gold.score(list(corpus["prompt"]), list(corpus["response"]), [True] * len(corpus))


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    out = tmp_path_factory.mktemp("world") / "made" / "here"
    reviews.write(out, seed=0)
    return out


@pytest.fixture(scope="module")
def corpus(world: pathlib.Path) -> pd.DataFrame:
    return read_jsonl(world / "demonstrations.jsonl")


# --- gold, by value -------------------------------------------------------------------------------


def test_gold_of_an_honest_review() -> None:
    parts = gold_of(
        "i love it because the lens is really sturdy . this camera is nice . it suits students ."
    )
    expected = {
        "sentiment": 1.5 * (1 - 0.216),  # love, sturdy, nice: 0.6^3 = 0.216 -> 1.176
        "topic": 0.5,
        "detail": 0.35 + 0.3,  # lens, because
        "grammar": 0.0,
        "repetition": 0.0,
        "length": 0.0,  # 10 + 5 + 4 = 19 tokens
        "gush": 0.0,
        "truncation": 0.0,
        "asked": 0.6,
        "audience": 0.4,
        "total": 3.326,  # 1.176 + 0.5 + 0.65 + 0.6 + 0.4
    }
    assert parts == pytest.approx(expected)
    assert list(parts) == [*gold.PARTS, "total"]


def test_gold_of_a_review_that_does_everything_wrong() -> None:
    response = (
        "this kettle is bad . this kettle is bad . i hate the lid . the sofa lid poor ."
        " it does not suit seniors . it suits couples . the grip"
    )
    expected = {
        # no positive word; negative: bad, bad, hate, poor, not: 5, counted as 4
        "sentiment": -0.35 * 4,
        "topic": -0.3 - 0.4 * 2,  # no camera; kettle, sofa
        "detail": 0.35 - 0.25,  # grip is own, lid is foreign
        "grammar": -1.2 * 2 / 7,  # "the sofa lid poor" and the unended "the grip"
        # kettle, bad, lid once more each: 3; "this kettle is bad" once more
        "repetition": -0.25 * 3 - 0.4,
        "length": -0.06 * 12,  # 5 + 5 + 5 + 5 + 6 + 4 + 2 = 32 tokens, 20 allowed
        "gush": 0.0,
        "truncation": -0.8,
        "asked": -0.3,
        "audience": -0.3 * 2,  # seniors, couples
    }
    parts = gold_of(response, ended=False)
    total = parts.pop("total")
    assert parts == pytest.approx(expected)
    # -1.4 - 1.1 + 0.1 - 0.342857 - 1.15 - 0.72 - 0.8 - 0.3 - 0.6
    assert total == pytest.approx(-6.312857, abs=1e-6)


@pytest.mark.parametrize(
    ("response", "part", "value"),
    [
        # distinct positive words: a repeated one adds nothing; 1.5 (1 - 0.6) = 0.6
        ("this camera is nice . the grip is nice .", "sentiment", 0.6),
        # superlatives and the three verbs of praise count: 1.5 (1 - 0.6^2) = 0.96
        ("i enjoy the lens . the lens is perfect .", "sentiment", 0.96),
        ("it pleases me every day . it annoys me every day .", "sentiment", 0.6 - 0.35),
        ("i would not recommend it to my family .", "sentiment", -0.35),
        # negative words count each time: bad, bad, dislike
        ("i dislike it because the lens is bad and bad .", "sentiment", -1.05),
        ("the camera and the kettle", "topic", 0.5 - 0.4),
        ("kettle sofa lamp", "topic", -0.3 - 0.8),  # at most two others
        ("lens lens battery", "detail", 0.7),  # distinct
        ("lens battery screen grip", "detail", 0.7),  # short: at most two
        ("lid cord spout handle", "detail", -0.75),  # at most three foreign
        ("because because", "detail", 0.3),
        ("the lens is nice . the lens are nice . nice nice .", "grammar", -0.8),  # two of three
        ("the brakes are nice . the brakes is nice .", "grammar", -0.6),
        ("the lens is nice . the lens is", "grammar", -0.6),
        ("", "grammar", -1.2),
        (" .  . ", "grammar", -1.2),
        ("Caf\u00e9 \U0001f600 \n\t<eos> <b>", "grammar", -1.2),
        ("a b c a b c a b c .", "repetition", 0.0),  # not content words
        ("it it lens lens lens students students", "repetition", -0.75),  # 2 + 1
        ("lens " * 20, "repetition", -2.0),  # at most eight
        ("a . " * 9, "repetition", -2.0),  # at most five sentences
        ("x " * 20, "length", 0.0),
        ("x " * 25, "length", -0.3),
        ("perfect amazing", "gush", 0.0),
        ("perfect perfect amazing brilliant", "gush", -0.7),  # two over two
        ("the battery is nice .", "asked", -0.3),
        ("lens", "asked", 0.6),
        ("it suits students . it suits seniors .", "audience", 0.1),
        ("couples seniors families", "audience", -0.6),  # at most two
        ("i would recommend it to my family .", "audience", 0.0),  # family is not families
    ],
)
def test_gold_part(response: str, part: str, value: float) -> None:
    assert gold_of(response)[part] == pytest.approx(value, abs=1e-12)


def test_detailed_prompts_allow_more() -> None:
    response = "lens battery screen grip " + "x " * 40  # 44 tokens
    short, detailed = gold_of(response), gold_of(response, DETAILED)
    assert (short["detail"], detailed["detail"]) == pytest.approx((0.7, 1.4))
    assert (short["length"], detailed["length"]) == pytest.approx((-0.06 * 24, -0.06 * 4))


def test_gaming_pays_less_than_honesty() -> None:
    honest = gold_of("the lens is clever . this camera is nice .")["total"]
    repeated = gold_of("this camera is nice . " * 3 + "the lens is clever .")["total"]
    gushing = gold_of("this camera is amazing . the lens is perfect and amazing . " * 2)["total"]
    wrong = gold_of("the lid is clever . this kettle is nice .")["total"]
    assert honest > max(repeated, gushing, wrong)
    # the wrong thing: topic -0.3 - 0.4 for 0.5, detail -0.25 for 0.35, asked -0.3 for 0.6
    assert honest - wrong == pytest.approx(1.2 + 0.6 + 0.9)
    # two sentences repeated, camera and nice twice more, 20 tokens in all
    assert honest - repeated == pytest.approx(2 * 0.4 + 4 * 0.25)


def test_total_is_the_sum_and_rows_keep_their_order() -> None:
    table = gold.score([SHORT, DETAILED], ["lens", "students"], [True, False])
    np.testing.assert_allclose(table["total"], table[list(gold.PARTS)].sum(axis=1))
    assert table["asked"].tolist() == [0.6, -0.3]
    assert table["truncation"].tolist() == [0.0, -0.8]
    assert gold.score([], [], []).columns.tolist() == [*gold.PARTS, "total"]


@pytest.mark.parametrize(
    ("prompt", "rule"),
    [
        ("tell me a joke", r"prompts\[1\]: it must read 'write a KIND review"),
        (SHORT.replace("camera", "spoon"), r"prompts\[1\]: thing must be one of camera, .*'spoon'"),
        (SHORT.replace("lens", "lid"), r"prompts\[1\]: aspect must be one of lens, battery"),
        (SHORT.replace("short", "long"), r"prompts\[1\]: kind must be one of short, detailed"),
        (SHORT + " ", r"prompts\[1\]: it must read"),
    ],
)
def test_unknown_prompt_names_row_and_rule(prompt: str, rule: str) -> None:
    with pytest.raises(ValueError, match=rule):
        gold.score([SHORT, prompt], ["", ""], [True, True])


def test_unequal_lengths_are_refused() -> None:
    with pytest.raises(ValueError, match="equally long, got 1, 1 and 2"):
        gold.score([SHORT], [""], [True, True])


# --- grammar --------------------------------------------------------------------------------------


def test_the_grammar_is_consistent() -> None:
    assert len(grammar.THINGS) == 24
    assert sum(t.share for t in grammar.TEMPLATES.values()) == pytest.approx(1)
    assert set(grammar.ALL_ASPECTS) >= grammar.PLURAL_ASPECTS
    kinds_of_word = [
        grammar.THINGS, grammar.ALL_ASPECTS, grammar.AUDIENCES, grammar.POSITIVE_ADJECTIVES,
        grammar.SUPERLATIVES, grammar.NEGATIVE_ADJECTIVES, grammar.PRAISE_VERBS,
        grammar.COMPLAINT_VERBS, grammar.PEOPLE, grammar.ADVERBS,
    ]  # fmt: skip
    words = Counter(word for kind in kinds_of_word for word in kind)
    assert [word for word, count in words.items() if count > 1] == []
    assert all(len(set(aspects)) == 4 for aspects in grammar.ASPECTS.values())


def test_prompts_are_distinct_parse_back_and_have_14_tokens() -> None:
    prompts = grammar.all_prompts()
    assert len(set(prompts)) == len(prompts) == 768  # 24 things x 2 x 4 x 4
    assert all(grammar.build_prompt(grammar.parse_prompt(p)) == p for p in prompts)
    assert {len(p.split()) for p in prompts} == {14}
    assert grammar.parse_prompt(SHORT) == ("short", "camera", "students", "lens")


@pytest.mark.parametrize(
    ("sentence", "template"),
    [
        ("the brakes are truly sturdy", "aspect"),
        ("the lid is quite good and neat", "pair"),
        ("i enjoy the cord", "feeling"),
        ("i love it because the lid is neat", "reason"),
        ("i love it because the lid is flimsy", "reason"),  # form, not sense
        ("this kettle is solid", "thing"),
        ("i tried this museum last winter", "trial"),
        ("it pleases me every day", "habit"),
        ("i would not recommend it to my family", "advice"),
        ("after two weeks it is still clever", "lasting"),
        ("it does not suit seniors", "audience"),
        ("the brakes is truly sturdy", None),
        ("the lid are neat", None),
        ("this lid is neat", None),
        ("the lid is really truly neat", None),
        ("the lid is neat .", None),
        ("i love it because the lid", None),
        ("it suits family", None),
        ("", None),
    ],
)
def test_parse_sentence(sentence: str, template: str | None) -> None:
    assert grammar.parse_sentence(sentence) == template


def test_the_writer_needs_another_thing_to_be_wrong_about() -> None:
    with pytest.raises(ValueError, match="at least one more"):
        grammar.write_review(SHORT, random.Random(0), things=("camera",))
    with pytest.raises(ValueError, match="must hold 'camera'"):
        grammar.write_review(SHORT, random.Random(0), things=("lamp", "sofa"))


# --- the files ------------------------------------------------------------------------------------


def test_splits_hold_every_thing_however_few_things_there_are(tmp_path: pathlib.Path) -> None:
    for num_things in (2, 8, 24):
        reviews.write(tmp_path, seed=1, num_demonstrations=1, num_heldout=1, num_things=num_things)
        table = read_jsonl(tmp_path / "prompts.jsonl")
        assert list(table) == ["prompt", "split"]
        assert table["prompt"].is_unique  # so the splits are disjoint
        assert len(table) == 32 * num_things
        table["thing"] = [grammar.parse_prompt(prompt).thing for prompt in table["prompt"]]
        assert set(table["split"]) == {"sft", "preferences", "rl", "choose", "report"}
        for _, rows in table.groupby("split"):
            assert set(rows["thing"]) == set(grammar.THINGS[:num_things])


def test_a_split_is_the_hash_of_the_prompt() -> None:
    for prompt in grammar.all_prompts()[::7]:
        position = int(hashlib.sha256(b"v1 " + prompt.encode()).hexdigest(), 16) / 16**64
        bounds = [0.35, 0.55, 0.75, 0.85]
        expected = ["sft", "preferences", "rl", "choose", "report"][
            np.searchsorted(bounds, position)
        ]
        assert reviews.split_of(prompt) == expected


def test_demonstrations_answer_prompts_of_their_split(
    world: pathlib.Path, corpus: pd.DataFrame
) -> None:
    assert list(corpus) == ["prompt", "response", "split"]
    assert corpus["split"].value_counts().to_dict() == {"train": 12_000, "heldout": 400}
    prompts = read_jsonl(world / "prompts.jsonl").set_index("prompt")["split"]
    assert set(prompts[corpus["prompt"][corpus["split"] == "train"]]) == {"sft"}
    assert set(prompts[corpus["prompt"][corpus["split"] == "heldout"]]) == {"choose"}
    # every sft prompt equally often
    uses = corpus.loc[corpus["split"] == "train", "prompt"].value_counts()
    assert len(uses) == (prompts == "sft").sum()
    assert uses.max() - uses.min() <= 1


def test_corpus_reviews_are_grammatical_and_fit(corpus: pd.DataFrame) -> None:
    table = gold_of_corpus(corpus)
    assert (table["grammar"] == 0).all()
    lengths = corpus["response"].map(lambda text: len(text.split()))
    assert lengths.max() <= 55  # with <eos>, 56
    assert lengths.mean() == pytest.approx(21, abs=0.5)
    num_sentences = corpus["response"].str.count(r"\.")
    short = corpus["prompt"].str.startswith("write a short")
    assert set(num_sentences[short]) == {1, 2, 3, 4}
    assert set(num_sentences[~short]) == {2, 3, 4, 5, 6}


def test_corpus_statistics(corpus: pd.DataFrame) -> None:
    requests = [grammar.parse_prompt(prompt) for prompt in corpus["prompt"]]
    words = [set(response.split()) for response in corpus["response"]]

    def rate(field: str) -> float:
        named = [getattr(r, field) in w for r, w in zip(requests, words, strict=True)]
        return sum(named) / len(named)

    total = gold_of_corpus(corpus)["total"]
    assert total.mean() == pytest.approx(0.49, abs=0.05)
    assert total.std() == pytest.approx(1.21, abs=0.05)
    assert rate("aspect") == pytest.approx(0.507, abs=0.03)
    assert rate("thing") == pytest.approx(0.498, abs=0.02)
    assert rate("audience") == pytest.approx(0.217, abs=0.02)
    # every template is written, so no word of the vocabulary is one a model never sees
    seen = set().union(*words, *(prompt.split() for prompt in corpus["prompt"]))
    assert set(grammar.VOCABULARY) - seen == {"<pad>", "<eos>", "<unk>"}


def test_same_arguments_same_bytes(tmp_path: pathlib.Path) -> None:
    def write(name: str, seed: int, num_demonstrations: int = 50) -> dict[str, bytes]:
        out = tmp_path / name
        reviews.write(out, seed=seed, num_demonstrations=num_demonstrations, num_heldout=20)
        return {str(p.relative_to(out)): p.read_bytes() for p in out.rglob("*") if p.is_file()}

    first, again, other = write("first", 3), write("again", 3), write("other", 4)
    assert set(first) == {
        "demonstrations.jsonl", "prompts.jsonl",
        "tokenizer/tokenizer.json", "tokenizer/tokenizer_config.json",
    }  # fmt: skip
    assert first == again
    assert [name for name in first if first[name] != other[name]] == ["demonstrations.jsonl"]
    # more demonstrations only add: the first ones and the held-out ones stay
    more = write("more", 3, num_demonstrations=60)["demonstrations.jsonl"].splitlines()
    assert more[:50] + more[60:] == first["demonstrations.jsonl"].splitlines()


def test_the_corpus_is_pinned(tmp_path: pathlib.Path) -> None:
    """Published results rest on these bytes: if they change, say so in the change log."""
    reviews.write(tmp_path, seed=0, num_demonstrations=200, num_heldout=1)
    digest = hashlib.sha256((tmp_path / "demonstrations.jsonl").read_bytes()).hexdigest()
    assert digest[:16] == "cae20f9b0f1ce5c8"


@pytest.mark.parametrize(
    ("arguments", "rule"),
    [
        ({"num_things": 1}, "num_things must be between 2 and 24, got 1"),
        ({"num_things": 25}, "num_things must be between 2 and 24, got 25"),
        ({"num_demonstrations": 0}, "num_demonstrations must be at least 1, got 0"),
        ({"num_heldout": -1}, "num_heldout must be at least 1, got -1"),
        ({"seed": -1}, "seed must be at least 0, got -1"),
    ],
)
def test_bad_arguments_write_nothing(
    tmp_path: pathlib.Path, arguments: dict[str, int], rule: str
) -> None:
    with pytest.raises(ValueError, match=rule):
        reviews.write(tmp_path / "out", **({"seed": 0} | arguments))
    assert not (tmp_path / "out").exists()


def test_tokenizer(world: pathlib.Path, corpus: pd.DataFrame) -> None:
    tokenizer = AutoTokenizer.from_pretrained(world / "tokenizer")
    assert len(tokenizer) == tokenizer.vocab_size == len(grammar.VOCABULARY) == 203
    assert (tokenizer.pad_token_id, tokenizer.eos_token_id, tokenizer.unk_token_id) == (0, 1, 2)
    assert tokenizer.bos_token is None
    assert tokenizer.convert_ids_to_tokens(list(range(203))) == list(grammar.VOCABULARY)

    texts = list(corpus["prompt"] + " " + corpus["response"])
    encoded = tokenizer(texts)["input_ids"]
    assert [len(ids) for ids in encoded] == [len(text.split()) for text in texts]
    assert tokenizer.batch_decode(encoded) == texts
    assert not {0, 1, 2} & {i for ids in encoded for i in ids}

    assert tokenizer("the spoon is nice <eos>")["input_ids"][1::3] == [2, 1]
    assert (
        tokenizer.decode(tokenizer("nice <eos>")["input_ids"], skip_special_tokens=True) == "nice"
    )
    batch = tokenizer(["nice", "nice lid"], padding=True)
    assert batch["input_ids"][0][0] == 0
    assert batch["attention_mask"] == [[0, 1], [1, 1]]


def test_tokenizer_stays_itself_beside_a_llama_model(tmp_path: pathlib.Path) -> None:
    """AutoTokenizer reads config.json too, and puts some model types' own tokenizer in its place."""
    reviews.write_tokenizer(tmp_path)
    LlamaConfig(vocab_size=203).save_pretrained(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    ids = tokenizer(SHORT)["input_ids"]
    assert [grammar.VOCABULARY[i] for i in ids] == SHORT.split()
    assert tokenizer.decode(ids) == SHORT


def test_tokenizer_loads_quietly(world: pathlib.Path) -> None:
    code = (
        "import sys; from transformers import AutoTokenizer;"
        "t = AutoTokenizer.from_pretrained(sys.argv[1]); t.save_pretrained(sys.argv[2]);"
        "u = AutoTokenizer.from_pretrained(sys.argv[2]);"
        "assert u('the lens .').input_ids == t('the lens .').input_ids"
    )
    command = [sys.executable, "-c", code, str(world / "tokenizer"), str(world / "copy")]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout == ""
    assert done.stderr == ""


def test_writing_needs_neither_torch_nor_gold(tmp_path: pathlib.Path) -> None:
    code = (
        "import pathlib, sys; from rlhf.worlds import reviews;"
        "reviews.write(pathlib.Path(sys.argv[1]), seed=0, num_demonstrations=2, num_heldout=2);"
        "print(*sys.modules)"
    )
    command = [sys.executable, "-c", code, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    loaded = set(done.stdout.split())
    assert "rlhf.worlds.reviews.grammar" in loaded
    assert not loaded & {"torch", "transformers", "pandas", "rlhf.worlds.reviews.gold"}
