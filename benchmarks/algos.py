"""Our losses beside TRL's: time and peak memory of one forward and backward pass, as ratios.

    python -m benchmarks.algos            a table (10 to 20 minutes; needs `make parity` once, and 16 GB)
    python -m benchmarks.algos --quick    tiny sizes: does it run?
    python -m benchmarks.algos --write    the table goes into benchmarks/README.md

TRL's side is its own code, see tests/parity/peer.py. Time: the two sides take turns in one process,
so that a busy machine slows both; the ratio is the median over the turns. Memory, in two ways:

- Tables of (B, T, V): each side in a fresh process, by the kernel's own count. The high-water mark of
  resident memory is reset once the inputs exist, so it holds what the pass adds, temporaries inside
  an operator included. Python's tracemalloc does not see tensors, and `ru_maxrss` of a new process
  starts at its parent's size.
- Losses of (B, T): too small for that. A dispatch mode counts the bytes of all storages that an
  operator has returned and that are still alive; temporaries inside operators are not seen.

Both sides compute the metrics that come with the loss. TRL's pair losses also make the tables of ids,
labels and entropies that their trainers take from a model, which its numbers contain.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from rlhf.algos import parts
from rlhf.algos.kl import kl_loss
from rlhf.algos.logprobs import (
    chunked_logprobs,
    sequence_logprobs,
    token_entropy,
    token_logprobs,
)
from rlhf.algos.masking import masked_sum
from rlhf.algos.policy_losses import POLICY_LOSSES, entropy_bonus
from rlhf.algos.preference_losses import PREFERENCE_LOSSES
from rlhf.algos.reward_model_losses import bradley_terry_loss
from tests.parity import peer

README = Path(__file__).with_name("README.md")
BEGIN, END = "<!-- benchmarks.algos: begin -->", "<!-- benchmarks.algos: end -->"

Loss = Callable[[Tensor], Tensor]


class Case(NamedTuple):
    """Two ways to one loss of the first leaf; the gradient is taken of all leaves."""

    ours: Loss
    theirs: Loss
    leaf: Tensor
    more: tuple[Tensor, ...] = ()


class Sizes(NamedTuple):
    """B sequences, T response tokens, V vocabulary, H states; S tokens for the chunked head."""

    batch: int = 32
    length: int = 512
    vocabulary: int = 32768
    hidden: int = 512
    chunked_length: int = 2048


QUICK = Sizes(batch=4, length=64, vocabulary=2048, hidden=32, chunked_length=256)


def step(case: Case, loss: Loss) -> None:
    """One forward and backward pass."""
    torch.autograd.grad(loss(case.leaf), (case.leaf, *case.more))


def table_cases(sizes: Sizes) -> dict[str, Callable[[], Case]]:
    """Losses from tables of (B, T, V), made when asked for."""

    def logits(batch: int = sizes.batch, length: int = sizes.length) -> tuple[Tensor, Tensor]:
        torch.manual_seed(0)
        table = torch.randn(batch, length, sizes.vocabulary).requires_grad_()
        return table, torch.randint(sizes.vocabulary, (batch, length))

    def logprobs_of() -> Case:
        from trl.trainer.utils import selective_log_softmax

        table, ids = logits()
        return Case(
            lambda x: token_logprobs(x, ids).sum(),
            lambda x: selective_log_softmax(x, ids).sum(),
            table,
        )

    def tempered() -> Case:
        from trl.trainer.utils import selective_log_softmax

        table, ids = logits()
        return Case(
            lambda x: token_logprobs(x, ids, temperature=0.7).sum(),
            lambda x: selective_log_softmax(x, ids, temperature=0.7).sum(),
            table,
        )

    def summed() -> Case:
        from trl.experimental.cpo.cpo_trainer import CPOTrainer

        table, ids = logits()
        mask = torch.arange(sizes.length).expand_as(ids) >= sizes.length // 2
        labels = ids.masked_fill(~mask, -100)
        return Case(
            lambda x: sequence_logprobs(x, ids, mask).sum(),
            lambda x: CPOTrainer.get_batch_logps(x, labels).sum(),
            table,
        )

    def entropy() -> Case:
        from trl.trainer.utils import entropy_from_logits

        table, _ = logits()
        return Case(lambda x: token_entropy(x).sum(), lambda x: entropy_from_logits(x).sum(), table)

    def head(batch: int) -> tuple[Tensor, Tensor, Tensor]:
        torch.manual_seed(0)
        states = torch.randn(batch, sizes.chunked_length, sizes.hidden).requires_grad_()
        weight = torch.randn(sizes.vocabulary, sizes.hidden).mul_(0.02).requires_grad_()
        return states, weight, torch.randint(sizes.vocabulary, states.shape[:2])

    def chunked(x: Tensor, weight: Tensor, ids: Tensor) -> Tensor:
        return chunked_logprobs(x, weight, ids, torch.ones_like(ids, dtype=torch.bool)).logprobs

    def beside_full(batch: int) -> Case:
        states, weight, ids = head(batch)
        columns = ids[..., None]
        return Case(
            lambda x: chunked(x, weight, ids).sum(),
            lambda x: (x @ weight.T).log_softmax(-1).gather(-1, columns).sum(),
            states,
            (weight,),
        )

    def beside_kernel() -> Case:
        from trl.kernels import ChunkedLogProbFunction

        states, weight, ids = head(1)

        def kernel(x: Tensor) -> Tensor:
            return ChunkedLogProbFunction.apply(
                x.flatten(0, 1), weight, None, ids.flatten(), 1.0, 32768, None, 1.0, ("entropy",)
            )[0]

        return Case(
            lambda x: chunked(x, weight, ids).sum(),
            lambda x: kernel(x).sum(),
            states,
            (weight,),
        )

    size = f"({sizes.batch}, {sizes.length}, {sizes.vocabulary})"
    states = f"{sizes.chunked_length}, {sizes.hidden}) x {sizes.vocabulary}"
    return {
        f"token_logprobs | {size} | selective_log_softmax": logprobs_of,
        f"token_logprobs, temperature 0.7 | {size} | selective_log_softmax": tempered,
        f"sequence_logprobs, half a mask | {size} | CPOTrainer.get_batch_logps": summed,
        f"token_entropy | {size} | entropy_from_logits": entropy,
        f"chunked_logprobs | (1, {states} | ChunkedLogProbFunction": beside_kernel,
        f"chunked_logprobs | (1, {states} | torch log_softmax of all logits": lambda: beside_full(
            1
        ),
        f"chunked_logprobs | (4, {states} | torch log_softmax of all logits": lambda: beside_full(
            4
        ),
    }


def token_cases(sizes: Sizes) -> dict[str, Case]:
    """Losses of a policy, from tables of (B, T)."""
    torch.manual_seed(0)
    shape = (sizes.batch, sizes.length)
    old, ref = -torch.rand(2, *shape)
    leaf = (old + 0.1 * torch.randn(shape)).requires_grad_()
    advantages = torch.randn(sizes.batch)
    mask = torch.arange(sizes.length) < torch.randint(1, sizes.length, (sizes.batch, 1))
    spread = advantages[:, None].expand(shape)

    def ours(name: str, **options: Any) -> Loss:
        return lambda x: POLICY_LOSSES[name](x, old, spread, mask, **options).loss

    def grpo(loss_type: str, **options: Any) -> Loss:
        return lambda x: peer.grpo(
            x, advantages, mask, loss_type=loss_type, old_logprobs=old, **options
        )[0]

    def with_kl(x: Tensor) -> Tensor:
        return ours("ppo_clip")(x) + 0.1 * kl_loss(x, ref, mask, estimator="k3").loss

    def with_entropy(x: Tensor) -> Tensor:
        return ours("ppo_clip")(old) + 0.1 * entropy_bonus(x, mask).loss

    beside: dict[str, tuple[str, Loss, Loss]] = {
        "ppo_clip": ("GRPO dapo", ours("ppo_clip"), grpo("dapo")),
        "ppo_clip, sequence_mean": (
            "GRPO grpo",
            ours("ppo_clip", reduction="sequence_mean"),
            grpo("grpo"),
        ),
        "ppo_dual_clip": ("GRPO dapo, delta", ours("ppo_dual_clip"), grpo("dapo", delta=3.0)),
        "ppo_clip + kl_loss k3": (
            "GRPO dapo, beta",
            with_kl,
            grpo("dapo", beta=0.1, ref_logprobs=ref),
        ),
        "ppo_clip + entropy_bonus": (
            "GRPO dapo, entropy_coef",
            with_entropy,
            lambda x: grpo("dapo", entropies=x, entropy_coef=0.1)(old),
        ),
        "gspo, sequence_mean": (
            "GRPO grpo, sequence",
            ours("gspo", reduction="sequence_mean"),
            grpo("grpo", level="sequence"),
        ),
        "cispo": ("GRPO cispo", ours("cispo"), grpo("cispo", epsilon_high=5.0)),
        "sapo, sequence_mean": (
            "GRPO sapo",
            ours("sapo", reduction="sequence_mean"),
            grpo("sapo"),
        ),
    }
    return {
        f"{name} | {shape} | {other}": Case(mine, theirs, leaf)
        for name, (other, mine, theirs) in beside.items()
    }


def pair_cases(sizes: Sizes) -> dict[str, Case]:
    """Losses over pairs, from the tables (2B, T) of their tokens' log-probabilities."""
    torch.manual_seed(0)
    rows, pairs = 2 * sizes.batch, sizes.batch
    leaf, ref = -torch.rand(2, rows, sizes.length)
    leaf.requires_grad_()
    positions = torch.arange(sizes.length + 1) - peer.PROMPT
    mask = (positions >= 0) & (positions < torch.randint(1, sizes.length, (rows, 1)))
    desirable = torch.arange(rows) % 2 == 0
    ref_logps = masked_sum(ref, mask[:, 1:], dim=1)
    scores = torch.randn(rows).requires_grad_()

    def ours(name: str, **options: Any) -> Loss:
        part = PREFERENCE_LOSSES[name]
        return lambda x: parts.call(part, peer.pair_inputs(x, ref, mask), **options).loss

    def dpo(name: str, **options: Any) -> Loss:
        return lambda x: peer.dpo(x, ref, mask, name, **options)

    def mean_logps(x: Tensor) -> tuple[Tensor, Tensor]:
        found = peer.pair_inputs(x, ref, mask)
        return found["chosen_mean_logps"], found["rejected_mean_logps"]

    def kto(x: Tensor) -> Tensor:
        logps = masked_sum(x, mask[:, 1:], dim=1)
        return PREFERENCE_LOSSES["kto"](logps, ref_logps, desirable, torch.zeros(())).loss

    def their_kto(x: Tensor) -> Tensor:
        nothing = torch.zeros(rows)
        return peer.kto(x, ref_logps, mask, desirable, nothing, nothing, beta=0.1)[0]

    def simpo(x: Tensor) -> Tensor:
        return peer.cpo(*mean_logps(x), "simpo", beta=2.0, simpo_gamma=1.0)

    def orpo(x: Tensor) -> Tensor:
        return peer.orpo_penalty(*mean_logps(x), beta=0.1) - mean_logps(x)[0].mean()

    def bradley_terry(x: Tensor) -> Tensor:
        return bradley_terry_loss(x[:pairs], x[pairs:]).loss

    size = f"({rows}, {sizes.length})"
    same = ("sigmoid", "hinge", "nca_pair", "sppo_hard", "apo_zero", "apo_down", "bco_pair")
    smoothed = {"beta": 0.1, "label_smoothing": 0.1}
    return {
        **{
            f"{name} | {size} | DPO {name}": Case(ours(name), dpo(name, beta=0.1), leaf)
            for name in same
        },
        **{
            f"{name} | {size} | DPO {name}": Case(
                ours(name, **smoothed), dpo(name, **smoothed), leaf
            )
            for name in ("robust", "exo_pair")
        },
        f"ipo | {size} | DPO ipo": Case(ours("ipo"), dpo("ipo", beta=0.1), leaf),
        f"f_dpo, js | {size} | DPO js_divergence": Case(
            ours("f_dpo", divergence="js"),
            dpo("sigmoid", beta=0.1, f_divergence="js_divergence"),
            leaf,
        ),
        f"kto | {size} | KTO": Case(kto, their_kto, leaf),
        f"simpo | {size} | CPO simpo": Case(ours("simpo"), simpo, leaf),
        f"orpo | {size} | ORPO odds_ratio_loss": Case(ours("orpo"), orpo, leaf),
        f"bradley_terry | ({rows},) | RewardTrainer": Case(
            bradley_terry, lambda x: peer.bradley_terry(x)[0], scores
        ),
    }


# Measuring


def time_ratio(case: Case, turns: int) -> float:
    """Median over turns of our time over theirs; who goes first alternates."""
    sides = (case.ours, case.theirs)
    for loss in sides:
        step(case, loss)
    ratios = []
    for turn in range(turns):
        taken = [0.0, 0.0]
        for side in (0, 1) if turn % 2 else (1, 0):
            start = time.perf_counter()
            step(case, sides[side])
            taken[side] = time.perf_counter() - start
        ratios.append(taken[0] / taken[1])
    return statistics.median(ratios)


class Storages(TorchDispatchMode):
    """Peak number of bytes in storages that operators returned and that are alive."""

    def __init__(self, *known: Tensor) -> None:
        super().__init__()
        self.alive: dict[int, int] = {}
        self.known = {x.untyped_storage()._cdata for x in known}
        self.now = self.peak = 0

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = function(*args, **(kwargs or {}))
        for x in tree_leaves(result):
            if isinstance(x, Tensor):
                self._enter(x.untyped_storage())
        return result

    def _enter(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key in self.known or key in self.alive:
            return
        self.alive[key] = storage.nbytes()
        self.now += storage.nbytes()
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._leave, key)

    def _leave(self, key: int) -> None:
        self.now -= self.alive.pop(key)


def storage_peak(case: Case, loss: Loss) -> int:
    """Bytes of intermediate tensors of one pass at their peak."""
    with Storages(case.leaf) as storages:
        step(case, loss)
    return storages.peak


def _status(name: str) -> int:
    """Bytes of a line of /proc/self/status."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:"))


def resident_peak(case: Case, loss: Loss) -> int:
    """Bytes that one pass adds to the resident memory at its peak; Linux."""
    Path("/proc/self/clear_refs").write_text("5")  # the high-water mark falls to the present
    before = _status("VmRSS")
    step(case, loss)
    return _status("VmHWM") - before


def child(case: int, side: str, arguments: argparse.Namespace) -> tuple[int, float]:
    """Peak bytes of one side of a table case, and for theirs the time ratio, in a new process."""
    command = [sys.executable, "-m", "benchmarks.algos", "--case", str(case), "--side", side]
    command += ["--turns", str(arguments.turns), *(["--quick"] if arguments.quick else [])]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    peak, ratio = json.loads(done.stdout.splitlines()[-1])
    return peak, ratio


def in_child(case: int, side: str, turns: int, quick: bool) -> tuple[int, float]:
    """What `child` asks for."""
    small = list(table_cases(QUICK).values())[case]()
    for loss in (small.ours, small.theirs):
        step(small, loss)  # what a first call loads is not the loss's
    chosen = small if quick else list(table_cases(Sizes()).values())[case]()
    peak = resident_peak(chosen, getattr(chosen, side))
    return peak, time_ratio(chosen, max(1, turns // 40)) if side == "theirs" else 0.0


def rows(arguments: argparse.Namespace) -> Iterator[str]:
    """Lines of the table."""
    sizes = QUICK if arguments.quick else Sizes()
    for index, name in enumerate(table_cases(sizes)):
        mine, _ = child(index, "ours", arguments)
        other, ratio = child(index, "theirs", arguments)
        yield f"| {name} | {ratio:.2f} | {mine / max(other, 1):.2f} |"
    for name, case in {**token_cases(sizes), **pair_cases(sizes)}.items():
        memory = storage_peak(case, case.ours) / storage_peak(case, case.theirs)
        yield f"| {name} | {time_ratio(case, arguments.turns):.2f} | {memory:.2f} |"


def write(table: str) -> None:
    """Puts the table between its marks in the README."""
    text = README.read_text()
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    README.write_text(f"{before}{BEGIN}\n{table}\n{END}{after}")


def main() -> None:
    """Parses the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="tiny sizes")
    parser.add_argument("--turns", type=int, default=200, help="turns of each side; tables: a 40th")
    parser.add_argument("--write", action="store_true", help="into benchmarks/README.md")
    parser.add_argument("--case", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--side", choices=("ours", "theirs"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    torch.set_num_threads(1)  # two threads of a shared machine measure the neighbours
    if arguments.case is not None:
        print(
            json.dumps(in_child(arguments.case, arguments.side, arguments.turns, arguments.quick))
        )
        return
    lines = ["| part | input | beside | time, ours / theirs | peak memory, ours / theirs |"]
    lines.append("|---|---|---|---:|---:|")
    print("\n".join(lines), flush=True)
    for line in rows(arguments):
        print(line, flush=True)
        lines.append(line)
    if arguments.write:
        write("\n".join(lines))


if __name__ == "__main__":
    main()
