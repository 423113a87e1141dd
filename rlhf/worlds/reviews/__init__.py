"""The review world: a grammar writes product reviews; a gold reward says which ones people prefer.

`write` makes the files a user would bring. It knows nothing of the gold reward.
"""

import hashlib
import json
import pathlib
import random
from collections.abc import Iterable, Mapping

from tokenizers import AddedToken, Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit

from rlhf.worlds.reviews import grammar

SPLITS = {"sft": 0.35, "preferences": 0.55, "rl": 0.75, "choose": 0.85, "report": 1.0}
"""Split -> the bound below which a prompt's hash falls into it.

`choose` is for choosing checkpoints and settings, `report` for the figures that are published.
"""


def split_of(prompt: str) -> str:
    """The split of a prompt, from its text alone: sha256("v1 " + prompt) as a number in [0, 1)."""
    digest = hashlib.sha256(f"v1 {prompt}".encode()).digest()
    position = int.from_bytes(digest[:6], "big") / 2**48  # exact, so always below 1
    return next(split for split, bound in SPLITS.items() if position < bound)


def write(
    out: pathlib.Path,
    *,
    seed: int,
    num_demonstrations: int = 12_000,
    num_heldout: int = 400,
    num_things: int = 24,
) -> None:
    """Write `demonstrations.jsonl`, `prompts.jsonl` and `tokenizer/` into `out`.

    - demonstrations: prompt, response, split. `train` answers the sft prompts in turn, `heldout`
      the choose prompts; responses do not hold <eos>.
    - prompts: prompt, split (see `SPLITS`), 32 per thing. They do not depend on the seed.
    - tokenizer: one token per word, the whole grammar whatever `num_things` is, loadable by
      `transformers.AutoTokenizer`.

    The same arguments give the same bytes.

    Args:
        out: made if missing; files of these names are replaced.
        num_demonstrations, num_heldout: reviews in `train` and in `heldout`.
        num_things: use the first so many things of the grammar, 2 to 24.
    Raises: ValueError that states the broken rule.
    """
    _check(seed=(seed, 0, None), num_demonstrations=(num_demonstrations, 1, None))
    _check(num_heldout=(num_heldout, 1, None), num_things=(num_things, 2, len(grammar.THINGS)))
    things = grammar.THINGS[:num_things]
    prompts = [{"prompt": p, "split": split_of(p)} for p in grammar.all_prompts(things)]
    out.mkdir(parents=True, exist_ok=True)
    _write_jsonl(out / "prompts.jsonl", prompts)

    demonstrations = []
    for split, source, count in (
        ("train", "sft", num_demonstrations),
        ("heldout", "choose", num_heldout),
    ):
        rng = random.Random(f"{seed} {split}")
        asked = [row["prompt"] for row in prompts if row["split"] == source]
        for i in range(count):
            prompt = asked[i % len(asked)]
            response = grammar.write_review(prompt, rng, things=things)
            demonstrations.append({"prompt": prompt, "response": response, "split": split})
    _write_jsonl(out / "demonstrations.jsonl", demonstrations)
    write_tokenizer(out / "tokenizer")


def write_tokenizer(out: pathlib.Path) -> None:
    """Write the word-level tokenizer of the grammar, in the format of `transformers`.

    It splits at white space and adds no tokens by itself; decoding joins with single spaces. The
    special tokens are <pad> 0, <eos> 1 and <unk> 2; there is no beginning token. Pads on the left.
    """
    out.mkdir(parents=True, exist_ok=True)
    vocabulary = {word: i for i, word in enumerate(grammar.VOCABULARY)}
    tokenizer = Tokenizer(WordLevel(vocabulary, unk_token=grammar.UNK))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    specials = (grammar.PAD, grammar.EOS, grammar.UNK)
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in specials])
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "pad_token": grammar.PAD,
        "eos_token": grammar.EOS,
        "unk_token": grammar.UNK,
        "padding_side": "left",
        "clean_up_tokenization_spaces": False,
        "model_input_names": ["input_ids", "attention_mask"],
    }
    _write_text(out / "tokenizer.json", tokenizer.to_str(pretty=True) + "\n")
    _write_text(out / "tokenizer_config.json", json.dumps(config, indent=2) + "\n")


def _check(**rules: tuple[int, int, int | None]) -> None:
    """Each rule is name=(value, least, most)."""
    for name, (value, least, most) in rules.items():
        if value < least or (most is not None and value > most):
            bound = f"at least {least}" if most is None else f"between {least} and {most}"
            raise ValueError(f"{name} must be {bound}, got {value}")


def _write_text(path: pathlib.Path, text: str) -> None:
    path.write_text(text, encoding="utf-8", newline="\n")


def _write_jsonl(path: pathlib.Path, rows: Iterable[Mapping[str, str]]) -> None:
    _write_text(path, "".join(json.dumps(row) + "\n" for row in rows))
