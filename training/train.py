"""Trains the built-in model on one GPU for a fixed time: ``python -m training.train TOKENIZER OUT --seconds 400``.

The learning rate falls to zero over the given seconds.  Weights are written to OUT/model.safetensors every minute, so
that a run that is cut short leaves a usable model; OUT/average.safetensors holds at the end the moving average of the
weights of all steps.  On a CPU it runs too, slowly, for tests.
"""

import argparse
import json
import os
import queue
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from training import delta_rule, export
from training.layers import Functions
from training.network import Config, Network
from training.packing import LONG, SHORT

HERE = Path(__file__).parent
LONG_EVERY = 4
SAVE_EVERY_S = 60.0
DRAFT_WEIGHTS = (0.3, 0.1, 0.05)
MAX_FLA_ERROR = 0.05
AVERAGED_STEPS = 400


def log(*words: object) -> None:
    print(f"[{time.perf_counter():8.1f}]", *words, flush=True)


class Feed:
    """Hands out batches of `rows` rows from the shards of one kind, read ahead by a thread."""

    def __init__(self, folder: Path, kind: str, rows: int, device: str) -> None:
        self.folder, self.kind, self.rows, self.device = folder, kind, rows, device
        self.waited = 0.0
        self.ready: queue.Queue[Tensor] = queue.Queue(6)
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        kept: list[np.ndarray] = []
        while True:
            for path in sorted(self.folder.glob(f"{self.kind}_*.npy")):
                kept.append(np.load(path))
                path.unlink()
                while sum(x.shape[1] for x in kept) >= self.rows:
                    joined = np.concatenate(kept, 1)
                    kept = [joined[:, self.rows :]]
                    batch = torch.from_numpy(joined[:, : self.rows].astype(np.int16))
                    self.ready.put(batch.pin_memory() if self.device == "cuda" else batch)
            time.sleep(0.02)

    def next(self) -> tuple[Tensor, Tensor]:
        """Token ids and weights, [rows, length]."""
        start = time.perf_counter()
        batch = self.ready.get().to(self.device, non_blocking=True)
        self.waited += time.perf_counter() - start
        return batch[0].long(), batch[1].float() * 0.01


class Source:
    """Shard writers and a feed for short and for long rows; every `LONG_EVERY`-th batch is a long one."""

    def __init__(self, tokenizer: Path, workers: int, tokens: int, seed: int, device: str) -> None:
        memory = Path("/dev/shm")
        self.folder = Path(tempfile.mkdtemp(prefix="shards_", dir=memory if memory.is_dir() else None))
        command = [sys.executable, "-m", "training.packing"]
        environment = os.environ | {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
        self.writers = [
            subprocess.Popen(
                [*command, str(i), str(self.folder), str(tokenizer / "tokenizer.json"), str(seed)],
                cwd=HERE.parent,
                env=environment,
            )
            for i in range(workers)
        ]
        self.short = Feed(self.folder, "short", tokens // SHORT, device)
        self.long = Feed(self.folder, "long", tokens // LONG, device)

    def batch(self, step: int) -> tuple[Tensor, Tensor]:
        return (self.long if step % LONG_EVERY == LONG_EVERY - 1 else self.short).next()

    @property
    def waited(self) -> float:
        return self.short.waited + self.long.waited

    def close(self) -> None:
        for writer in self.writers:
            writer.kill()


class Average:
    """The moving average of a network's parameters: each step pulls it by 1 / `steps`, the first ones by more."""

    def __init__(self, net: Network, steps: int = AVERAGED_STEPS) -> None:
        self.parameters: list[Tensor] = list(net.parameters())
        self.steps, self.count = steps, 0
        self.mean = [p.detach().clone() for p in self.parameters]

    @torch.no_grad()
    def add(self) -> None:
        self.count += 1
        torch._foreach_lerp_(self.mean, self.parameters, 1 / min(self.count, self.steps))

    @torch.no_grad()
    def swap(self) -> None:
        """Puts the average into the network and the network's weights here; a second call undoes it."""
        for mine, theirs in zip(self.mean, self.parameters, strict=True):
            kept = theirs.clone()
            theirs.copy_(mine)
            mine.copy_(kept)


@dataclass
class Trainer:
    """The model, its optimizer and one step of training."""

    net: Network
    dtype: torch.dtype
    rate: float
    drafts: int
    optimizer: torch.optim.AdamW = field(init=False)
    average: Average = field(init=False)

    def __post_init__(self) -> None:
        self.average = Average(self.net)
        decayed = [p for p in self.net.parameters() if p.dim() >= 2]
        plain = [p for p in self.net.parameters() if p.dim() < 2]
        groups = [{"params": decayed, "weight_decay": 0.05}, {"params": plain, "weight_decay": 0.0}]
        fused = next(self.net.parameters()).is_cuda
        self.optimizer = torch.optim.AdamW(groups, lr=self.rate, betas=(0.9, 0.95), eps=1e-8, fused=fused)

    def step(self, tokens: Tensor, weights: Tensor, factor: float, progress: float) -> dict[str, Any]:
        """One optimizer step at `factor` times the rate; `progress` in [0, 1] lowers the drafts' weight."""
        for group in self.optimizer.param_groups:
            group["lr"] = self.rate * factor
        losses, balance = self.net.losses(tokens, weights, self.dtype, self.drafts)
        loss = losses["main"][0] / losses["main"][1] + self.net.config.router_aux_loss_coef * balance
        for j, weight in zip(range(1, self.drafts + 1), DRAFT_WEIGHTS, strict=False):
            loss = loss + weight * (1 - 0.5 * progress) * losses[f"mtp{j}"][0] / losses[f"mtp{j}"][1]
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()  # type: ignore[no-untyped-call]
        norm = torch.nn.utils.clip_grad_norm_(self.net.parameters(), 1.0)
        self.optimizer.step()
        self.average.add()
        return {"losses": losses, "norm": norm}


def summary(made: dict[str, Any]) -> dict[str, Any]:
    losses = {k: [x.detach() for x in v] for k, v in made["losses"].items()}
    return {
        "loss": {k: round(float(v[0] / v[1]), 4) for k, v in losses.items()},
        "hits": {k: round(float(v[2] / v[3].clamp(min=1)), 4) for k, v in losses.items()},
        "norm": round(float(made["norm"]), 2),
    }


def fla_agrees(c: Config) -> bool:
    """Compares the Triton rule with the torch one, forward and backward, at the model's head sizes."""
    torch.manual_seed(3)
    heads, v_heads, k_dim, v_dim = (
        c.linear_num_key_heads,
        c.linear_num_value_heads,
        c.linear_key_head_dim,
        c.linear_value_head_dim,
    )

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, device="cuda", dtype=torch.bfloat16).requires_grad_()

    inputs = [draw(2, 256, heads, k_dim), draw(2, 256, heads, k_dim), draw(2, 256, v_heads, v_dim)]
    inputs.append((-torch.rand(2, 256, v_heads, device="cuda")).requires_grad_())
    inputs.append(torch.rand(2, 256, v_heads, device="cuda").requires_grad_())
    results = []
    for rule in (delta_rule.fla_rule(compiled=False), delta_rule.chunked):
        out = rule(*inputs).float()
        weight = torch.linspace(-1, 1, out.numel(), device="cuda").view_as(out)
        results.append([out, *torch.autograd.grad((out * weight).sum(), inputs)])
    errors = [
        float((a.detach().float() - b.detach().float()).norm() / b.detach().float().norm())
        for a, b in zip(*results, strict=True)
    ]
    log("Triton rule against torch, relative error of o, dq, dk, dv, dg, dbeta:", [round(e, 4) for e in errors])
    return max(errors) < MAX_FLA_ERROR


def prepare(net: Network, use_fla: bool) -> None:
    """Chooses compiled functions on a GPU."""
    if use_fla and not fla_agrees(net.config):
        log("the Triton rule disagrees; training with the torch one")
        use_fla = False
    net.functions = Functions.compiled(use_fla)


def fit(trainer: Trainer, source: Source, seconds: float, steps: int, out: Path, warm: int = 100) -> dict[str, Any]:
    """Trains until `seconds` or `steps` are over; returns counts and the history."""
    start = saved = time.perf_counter()
    history: list[dict[str, Any]] = []
    step = seen = 0
    while True:
        now = time.perf_counter()
        progress = max((now - start) / seconds, step / steps)
        if progress >= 1:
            break
        tokens, weights = source.batch(step)
        made = trainer.step(tokens, weights, min(1.0, (step + 1) / warm) * (1 - progress), progress)
        seen += tokens.numel()
        step += 1
        if step in (1, 4, 10, 30) or step % 100 == 0:
            record = {
                "step": step,
                "s": round(time.perf_counter() - start, 1),
                "Mtok": round(seen / 1e6, 1),
                "waited": round(source.waited, 1),
            }
            history.append(record | summary(made))
            log(json.dumps(history[-1]))
        if now - saved > SAVE_EVERY_S:
            export.save_weights(trainer.net, out / "model.safetensors")
            saved = now
    took = round(time.perf_counter() - start, 1)
    log(f"trained {step} steps, {seen / 1e6:.1f} M tokens in {took} s, waited {source.waited:.1f} s for data")
    return {"steps": step, "tokens": seen, "seconds": took, "history": history}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("tokenizer", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--seconds", type=float, default=400)
    parser.add_argument("--steps", type=int, default=10**9)
    parser.add_argument("--tokens", type=int, default=131_072, help="tokens a step")
    parser.add_argument("--rate", type=float, default=3e-3)
    parser.add_argument("--workers", type=int, default=15)
    parser.add_argument("--start", type=Path, help="weights to go on from")
    parser.add_argument("--seed", type=int, default=1, help="another seed draws other documents")
    parser.add_argument("--plain-rule", action="store_true", help="do not use flash-linear-attention")
    args = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(1)
    torch.set_float32_matmul_precision("high")
    args.out.mkdir(parents=True, exist_ok=True)
    source = Source(args.tokenizer, args.workers, args.tokens, args.seed, device)
    try:
        net = Network(Config.read(HERE / "config.json")).to(device)
        count = sum(p.numel() for p in net.parameters())
        card = torch.cuda.get_device_name() if device == "cuda" else device
        log(f"{count:,} parameters on {card}, torch {torch.__version__}")
        if args.start:
            export.load_weights(net, args.start)
        if device == "cuda":
            prepare(net, not args.plain_rule)
        trainer = Trainer(
            net, torch.bfloat16 if device == "cuda" else torch.float32, args.rate, drafts=len(DRAFT_WEIGHTS)
        )
        for i in range(LONG_EVERY - 2, LONG_EVERY):
            tokens, weights = source.batch(i)
            log("warm-up", json.dumps(summary(trainer.step(tokens, weights, 1e-4, 0.0))), tuple(tokens.shape))
        result = fit(trainer, source, args.seconds, args.steps, args.out)
    finally:
        source.close()
    export.save_weights(net, args.out / "model.safetensors")
    trainer.average.swap()
    export.save_weights(net, args.out / "average.safetensors")
    result["command"] = " ".join(sys.argv[1:])
    (args.out / "train.json").write_text(json.dumps(result), encoding="utf-8")
    log("saved")


if __name__ == "__main__":
    main()
