"""Worlds: small, self-contained settings in which a whole round can be run and understood.

A world is a package with two faces that never meet:

- `write(out, *, seed, **options)` writes the files a user would bring: `demonstrations.jsonl`,
  `prompts.jsonl` and `tokenizer/`. It is deterministic: the same arguments give the same bytes.
- a module `gold` with `score(prompts, responses, ended) -> pandas.DataFrame`: one row per response,
  one column per part of what is meant, and `total`, their sum. It stands for the people whose
  preferences are learned, so it labels and evaluates; nothing that trains may import it, and the
  world's own `__init__` does not.

To add a world, write such a package anywhere that can be imported.
"""
