"""What the user chose. Frozen: nobody writes to it after start; derived numbers live with whoever derives them."""

from __future__ import annotations

from dataclasses import dataclass, field
from numbers import Integral
from typing import Any, Literal, get_args, get_origin, get_type_hints

Quantization = Literal["auto", "none", "fp8"]
LoadFormat = Literal["auto", "dummy"]
Device = Literal["auto", "cpu", "cuda"]
DType = Literal["auto", "float32", "bfloat16", "float16", "float64"]
Switch = Literal["on", "off"]
Overlap = Literal["auto", "on", "off"]
Speculation = Literal["auto", "0", "1", "2", "3", "4", "5", "6", "7", "8"]
StateDType = Literal["float32", "bfloat16", "float64"]
MAX_THREADS = 1024
"""The program that starts tens of thousands dies without a word."""


def option(default: Any, text: str, unit: str = "") -> Any:
    """A field that becomes a command line flag: `text` is its help and its line in the docs."""
    return field(default=default, metadata={"help": text, "unit": unit})


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """Every field is a flag of the command line: `max_num_seqs` is `--max-num-seqs`.

    Raises ValueError from the constructor for values that no model and no machine could honour.
    """

    model: str | None = option(None, "checkpoint folder or hub id; without it the built-in model")
    served_model_name: str | None = option(None, "the model's name in the API; by default the folder's name or hub id")
    revision: str | None = option(None, "branch, tag or commit of a hub id")
    preset: str | None = option(
        None, "numbers of a published model with random weights, for measuring; a wrong name lists those there are"
    )
    load_format: LoadFormat = option("auto", "dummy draws random weights and needs no more than config.json")
    quantization: Quantization = option(
        "auto", "auto is the checkpoint's; fp8 quantises projections and experts while loading, none undoes it"
    )
    device: Device = option("auto", "auto takes the GPU where there is one")
    dtype: DType = option("auto", "weights and activations; auto is the checkpoint's on a GPU and float32 on a CPU")
    state_dtype: StateDType = option("float32", "recurrent matrices of the gated delta nets; bfloat16 drifts")
    max_model_len: int | None = option(None, "longest prompt plus output; by default the model's", "tokens")
    max_num_seqs: int | None = option(None, "requests that run at once; by default 64, on a GPU 128")
    max_num_batched_tokens: int | None = option(
        None, "tokens computed in one step; long prompts are cut to it; by default 2048, on a GPU 8192", "tokens"
    )
    cache_memory_gib: float | None = option(
        None,
        "memory for KV blocks and state slots; by default 0.9 of what the weights leave, on a CPU half, at most 4",
        "GiB",
    )
    num_blocks: int | None = option(None, "KV blocks of 64 tokens; by default from the cache memory")
    num_slots: int | None = option(
        None, "state slots; by default those of max_num_seqs requests, and with the prefix cache some for snapshots"
    )
    prefix_cache: Switch = option("on", "keep the memory of finished prefixes, for prompts that begin alike")
    speculative_tokens: Speculation = option(
        "auto", "most tokens guessed ahead by the MTP layer; auto is 3 on a GPU where the checkpoint has one, else 0"
    )
    speculative_synthetic_acceptance: str | None = option(
        None,
        "for measuring with random weights: guesses count as right with these probabilities, whatever they are; one "
        "for all places, or one for each, with commas",
    )
    enforce_eager: bool = option(False, "no CUDA graphs: start sooner, decode slower, say the same")
    overlap: Overlap = option(
        "auto",
        "plan a step while the one before is computed; auto does where a device computes while the host goes on",
    )
    num_threads: int | None = option(
        None, "CPU threads; by default one for every 64 MiB of weights, as far as there are cores"
    )
    max_waiting: int = option(1024, "requests that may wait; one more is answered 503")
    seed: int = option(0, "seeds requests that bring none")

    def __post_init__(self) -> None:
        object.__setattr__(self, "speculative_tokens", str(self.speculative_tokens))  # 3 means "3"
        if self.speculative_tokens not in get_args(Speculation):
            raise ValueError(f"speculative_tokens is {self.speculative_tokens}; it must be auto, or 0 to 8")
        self._refuse_strangers()
        self.refuse_pretence(is_random=True, num_guesses=1)
        for name in (
            "max_model_len",
            "max_num_seqs",
            "max_num_batched_tokens",
            "num_blocks",
            "num_slots",
            "num_threads",
        ):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} is {value}; it must be at least 1")
        if self.num_threads is not None and self.num_threads > MAX_THREADS:
            raise ValueError(f"num_threads is {self.num_threads}; it must be at most {MAX_THREADS}")
        if self.preset is not None and (self.model is not None or self.revision is not None):
            raise ValueError(f"preset is {self.preset!r}, and a model or a revision is given too; give one of them")
        if self.max_waiting < 0:
            raise ValueError(f"max_waiting is {self.max_waiting}; it must be at least 0")
        if self.cache_memory_gib is not None and not self.cache_memory_gib > 0:
            raise ValueError(f"cache_memory_gib is {self.cache_memory_gib}; it must be above 0")
        tokens, seqs = self.max_num_batched_tokens, self.max_num_seqs
        if tokens is not None and seqs is not None and tokens < seqs:
            raise ValueError(
                f"max_num_batched_tokens is {tokens}, below max_num_seqs {seqs}: "
                "a step could not hold one token of each request; raise the first or lower the second"
            )

    def _refuse_strangers(self) -> None:
        """Raises ValueError for what is no value of its field: the command line reads types, Python takes anything."""
        for name, kind in get_type_hints(type(self)).items():
            value = getattr(self, name)
            if get_origin(kind) is Literal and value not in get_args(kind):
                raise ValueError(f"{name} is {value!r}; it must be one of {', '.join(get_args(kind))}")
            if kind is bool and not isinstance(value, bool):
                raise ValueError(f"{name} is {value!r}; it must be True or False")
            if (kind is int or (kind == int | None and value is not None)) and not isinstance(value, Integral):
                raise ValueError(f"{name} is {value!r}; it must be a whole number")

    @property
    def pretended(self) -> tuple[float, ...]:
        """`speculative_synthetic_acceptance` as numbers; none where it is not given. The last one holds for all places
        behind it.

        Raises ValueError for what are no probabilities.
        """
        text = self.speculative_synthetic_acceptance
        if text is None:
            return ()
        try:
            shares = tuple(float(part) for part in str(text).split(","))
        except ValueError:
            shares = (-1.0,)
        if not all(0 <= share <= 1 for share in shares):
            raise ValueError(
                f"speculative_synthetic_acceptance is {text!r}; it must be a number from 0 to 1, or several with commas"
            )
        return shares

    def refuse_pretence(self, is_random: bool, num_guesses: int) -> None:
        """Raises ValueError where guesses would count as right at random and answers be taken for a model's."""
        wish = self.speculative_synthetic_acceptance
        if self.pretended and not is_random:
            raise ValueError(
                f"speculative_synthetic_acceptance is {wish}, which makes tokens up: it is for random weights only "
                "(preset, or load_format dummy)"
            )
        if self.pretended and not num_guesses:
            raise ValueError(
                f"speculative_synthetic_acceptance is {wish}, and nothing is guessed: "
                f"speculative_tokens is {self.speculative_tokens}, say how many, from 1 to 8"
            )

    def limits(self, device: str) -> tuple[int, int]:
        """Requests that run at once, and tokens of one step, as they were chosen or else as suits `cpu` or `cuda`.

        A limit that was left open gives way to the other one.
        """
        seqs, tokens = (64, 2048) if device == "cpu" else (128, 8192)
        if self.max_num_seqs is not None:
            seqs, tokens = self.max_num_seqs, max(tokens, self.max_num_seqs)
        if self.max_num_batched_tokens is not None:
            seqs, tokens = min(seqs, self.max_num_batched_tokens), self.max_num_batched_tokens
        return seqs, tokens
