"""Data worker: draws documents, tokenizes them and packs them into rows, written as shards for the trainer.

``python -m training.packing WORKER FOLDER TOKENIZER_JSON SEED`` runs until its parent ends.  Worker numbers below
`LONG_WORKERS` make long rows.  A shard is a uint16 array [2, rows, length]: token ids, and a hundred times the weight
of a token as a target.
"""

import os
import random
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from training.data.chat import Segment
from training.data.corpus import document

SHORT, LONG = 1024, 4096
TOKENS_PER_SHARD = 131_072
LONG_WORKERS = 4
PENDING = 8
OPEN_ROWS = 12
FULL_ENOUGH = 12
Row = tuple[list[int], list[int]]


class Encoder:
    """Tokenizes documents by segment; short segments that come again are kept."""

    def __init__(self, path: str) -> None:
        self.tokenizer = Tokenizer.from_file(path)
        self.cache: dict[str, list[int]] = {}

    def encode(self, documents: list[list[Segment]]) -> Iterator[Row]:
        missing = list({text for d in documents for text, _ in d if text not in self.cache})
        encoded = self.tokenizer.encode_batch(missing, add_special_tokens=False)
        fresh = {text: e.ids for text, e in zip(missing, encoded, strict=True)}
        for segments in documents:
            ids: list[int] = []
            weights: list[int] = []
            for text, weight in segments:
                part = self.cache.get(text) or fresh[text]
                ids += part
                weights += [int(weight * 100)] * len(part)
            yield ids, weights
        if len(self.cache) < 2000:
            self.cache.update({text: e for text, e in fresh.items() if len(text) < 60})


class Packer:
    """Puts documents into rows of `length` tokens, first fit among a few open rows."""

    def __init__(self, length: int, pad: int) -> None:
        self.length, self.pad = length, pad
        self.open: list[Row] = []

    def add(self, ids: list[int], weights: list[int]) -> Row | None:
        """A finished row, if this document finishes one; a document longer than a row is dropped."""
        if len(ids) > self.length:
            return None
        for row in self.open:
            if len(row[0]) + len(ids) <= self.length:
                row[0].extend(ids)
                row[1].extend(weights)
                return self._close(row) if self.length - len(row[0]) < FULL_ENOUGH else None
        done = None
        if len(self.open) >= OPEN_ROWS:
            done = self._close(max(self.open, key=lambda row: len(row[0])))
        self.open.append((list(ids), list(weights)))
        return done

    def _close(self, row: Row) -> Row:
        self.open.remove(row)
        missing = self.length - len(row[0])
        return row[0] + [self.pad] * missing, row[1] + [0] * missing


def rows(encoder: Encoder, seed: int, length: int, pad: int, batch: int = 200) -> Iterator[Row]:
    """Rows without end; the same seed gives the same rows."""
    rng, packer = random.Random(seed), Packer(length, pad)
    while True:
        for ids, weights in encoder.encode([document(rng, long=length > SHORT) for _ in range(batch)]):
            row = packer.add(ids, weights)
            if row:
                yield row


def shard(source: Iterator[Row], count: int) -> np.ndarray:
    drawn = [next(source) for _ in range(count)]
    return np.array([[ids for ids, _ in drawn], [weights for _, weights in drawn]], np.uint16)


def main() -> None:
    worker, folder, path, seed = int(sys.argv[1]), Path(sys.argv[2]), sys.argv[3], int(sys.argv[4])
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    encoder = Encoder(path)
    pad: int = encoder.tokenizer.encode("<|endoftext|>").ids[0]
    length, kind = (LONG, "long") if worker < LONG_WORKERS else (SHORT, "short")
    source = rows(encoder, 1_000_003 * seed + worker, length, pad)
    parent, number = os.getppid(), 0
    while os.getppid() == parent:
        if len(list(folder.glob(f"{kind}_*_{worker}.npy"))) >= PENDING:
            time.sleep(0.05)
            continue
        temporary = folder / f"tmp_{worker}.npy"
        np.save(temporary, shard(source, TOKENS_PER_SHARD // length))
        temporary.rename(folder / f"{kind}_{number:06d}_{worker}.npy")
        number += 1


if __name__ == "__main__":
    main()
