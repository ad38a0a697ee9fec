"""What the user chose about a load client. Every field is a flag of `deltaserve bench serve` or `bench multi-turn`."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from deltaserve.config import option


@dataclass(frozen=True, kw_only=True)
class ClientConfig:
    """What both clients take. Raises ValueError from the constructor for values that could never be honoured."""

    url: str = option("http://127.0.0.1:8000", "the server's address")
    model: str | None = option(None, "the model's name in the API; by default the first of /v1/models")
    api_key: str | None = option(None, "sent as Authorization: Bearer KEY", "key")
    vocab_size: int = option(1000, "prompts of tokens are drawn from the ids below it", "tokens")
    temperature: float = option(0.0, "of every request")
    seed: int = option(
        0, "of prompts and arrivals; another one where a server still keeps the prompts of an earlier run"
    )
    timeout: float = option(600.0, "a request that takes longer has failed", "seconds")
    json: str | None = option(None, "file that one JSON object for each line of the table is appended to", "file")

    def __post_init__(self) -> None:
        if not self.timeout > 0:
            raise ValueError(f"timeout is {self.timeout}; it must be above 0")
        if not 0 <= self.temperature < math.inf:
            raise ValueError(f"temperature is {self.temperature}; it must be a number from 0 on")
        for name, value in vars(self).items():
            if isinstance(value, int) and name != "seed" and value < 1:
                raise ValueError(f"{name} is {value}; it must be at least 1")


@dataclass(frozen=True, kw_only=True)
class LoadConfig(ClientConfig):
    """Of `deltaserve bench serve`."""

    vs: str | None = option(None, "address of another server that gets the same loads in turn", "url")
    api: Literal["completions", "chat"] = option("completions", "the endpoint")
    prompts: Literal["tokens", "words"] = option(
        "tokens", "random token ids, or random words; a chat is always of words"
    )
    prompt_tokens: int = option(512, "length of a prompt; of words about so many", "tokens")
    output_tokens: int = option(
        128, "length of an answer, where the server takes ignore_eos; else the longest", "tokens"
    )
    requests: int = option(64, "requests of each load; a load of more clients has one for each client")
    concurrency: str | None = option(
        None,
        "loads of so many clients, with commas; without rates 1,8,32. Each sends on when its answer has ended",
        "list",
    )
    rates: str | None = option(
        None, "loads of so many requests a second, with commas; arrivals are random; inf sends all at once", "list"
    )
    rounds: int | None = option(None, "how often each load is run; by default once, with --vs twice, in turn")
    goodput: str | None = option(
        None, "limits in ms, as ttft:500,tpot:50; tells how many requests kept all of them (ttft, tpot, e2e)", "limits"
    )


@dataclass(frozen=True, kw_only=True)
class MultiTurnConfig(ClientConfig):
    """Of `deltaserve bench multi-turn`."""

    api: Literal["chat", "completions"] = option(
        "chat", "chat sends the answer's text back; completions its token ids, which come back exactly as they were"
    )
    clients: int = option(8, "conversations at once")
    conversations: int | None = option(None, "conversations in all; by default one for each client")
    turns: int = option(4, "questions and answers of a conversation")
    prompt_tokens: int = option(512, "length of the first message, about", "tokens")
    turn_tokens: int = option(64, "length of each later message, about", "tokens")
    output_tokens: int = option(64, "longest answer", "tokens")
