"""`python -m flows round ...`: add, show, compare, list, remove and restore rounds of pipeline.yaml."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from rlhf.errors import BadInput

app = typer.Typer(
    no_args_is_help=True, help="Rounds as data: add, show, compare, list, remove, restore."
)
_FILE = "pipeline.yaml"
Json = Annotated[bool, typer.Option("--json", help="For programs.")]


@app.command()
def add(
    name: Annotated[str | None, typer.Argument(help="Like r3; default: the next.")] = None,
    template: Annotated[
        str | None, typer.Option("--from-template", help="The round to copy; default: the last.")
    ] = None,
    changes: Annotated[
        list[str] | None,
        typer.Option(
            "--set", help="A setting: candidates.ppo.kl.coef=0.02, preferences.num_groups=100."
        ),
    ] = None,
    added: Annotated[
        list[str] | None,
        typer.Option("--add", help="A further candidate, a copy of another: grpo2=grpo."),
    ] = None,
    drop: Annotated[
        list[str] | None, typer.Option("--drop", help="A candidate of the template to leave out.")
    ] = None,
) -> None:
    """Append a round to pipeline.yaml, made from an earlier one."""
    from flows import rounds
    from flows.runner import workspace_lock
    from rlhf import config

    overrides = rounds.parse_overrides(changes or [])
    copies = _copies(added or [])
    with workspace_lock():
        before = config.load(_FILE)
        name = name or rounds.next_name(before.rounds)
        changed = rounds.append_round(
            _FILE, name, template=template, overrides=overrides, add=copies, drop=drop or []
        )
        pipeline = config.load(_FILE)
    if not changed:
        print(f"{name} is already in {_FILE}")
        return
    template = template or list(before.rounds)[-1]
    print(
        f"{name} added to {_FILE}: starts from {pipeline.rounds[name].from_}, made from {template}"
    )
    for path, old, new in rounds.compare(pipeline, template, name):
        if path != "decision" and not path.startswith("decision."):
            print(f"  {path}: {rounds.shown(old)} -> {rounds.shown(new)}")


def _copies(words: list[str]) -> dict[str, str]:
    copies = {}
    for word in words:
        name, equals, source = word.partition("=")
        if not (name and equals and source) or name in copies:
            raise BadInput(
                f"--add {word}: not a new name and a candidate to copy, or given twice",
                mend="write --add grpo2=grpo",
            )
        copies[name] = source
    return copies


@app.command()
def show(name: str, as_json: Json = False) -> None:
    """Print a round and its candidates in full, presets and defaults filled in."""
    from flows import rounds
    from rlhf import config

    block = rounds.block_of(config.load(_FILE), name)
    print(json.dumps(block, indent=2) if as_json else config.to_yaml(block).rstrip("\n"))


@app.command()
def diff(one: str, other: str, as_json: Json = False) -> None:
    """Print the settings in which two rounds differ; candidates are matched by name."""
    from flows import rounds
    from rlhf import config

    found = rounds.compare(config.load(_FILE), one, other)
    if as_json:
        rows = [{"path": path, one: mine, other: its} for path, mine, its in found]
        print(json.dumps(rows, indent=2))
        return
    for path, mine, its in found:
        print(f"{path}: {rounds.shown(mine)} -> {rounds.shown(its)}")
    if not found:
        print(f"{one} and {other} have the same settings")


@app.command("list")
def list_rounds(as_json: Json = False) -> None:
    """Print the declared rounds: where each starts, its candidates, what it came to."""
    from flows import rounds
    from rlhf import config

    rows = rounds.listed(config.load(_FILE))
    if as_json:
        print(json.dumps(rows, indent=2))
        return
    for row in rows:
        champion = ", champion" if row["champion"] else ""
        print(
            f"{row['round']}  from {row['from']}  {row['status']}{champion}  "
            + ", ".join(row["candidates"])
        )


@app.command()
def remove(
    name: str,
    force: Annotated[
        bool, typer.Option("--force", help="Though it has run: its outputs go too.")
    ] = False,
    allow_dirty: Annotated[
        bool, typer.Option("--allow-dirty", help="Commit other changes of pipeline.yaml with it.")
    ] = False,
) -> None:
    """Take a round that nothing needs out of pipeline.yaml."""
    from flows import removal

    print("\n".join(removal.carry_out_removal(".", name, force=force, allow_dirty=allow_dirty)))


@app.command()
def restore(name: str) -> None:
    """Put a round that was removed here back at the end of pipeline.yaml, as it was."""
    from flows import removal

    removal.restore_round(".", name)
    print(f"{name} restored in {_FILE}")
