"""Trains the byte-level BPE on the generated corpus: ``python -m training.tokenizer FOLDER``.

Writes tokenizer.json, tokenizer_config.json and chat_template.jinja.  The special tokens are the Qwen ones; digits are
split one by one.
"""

import argparse
import json
import random
import shutil
from collections.abc import Iterator
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from training.data.corpus import document

HERE = Path(__file__).parent
VOCAB_SIZE = 2048
CONTEXT = 4096
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
MARKUP = [
    "<think>",
    "</think>",
    "<tool_call>",
    "</tool_call>",
    "<tool_response>",
    "</tool_response>",
    "<tools>",
    "</tools>",
]
ADDED = 16
SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def texts(seed: int, documents: int) -> Iterator[str]:
    """The corpus without its special tokens."""
    rng = random.Random(seed)
    for _ in range(documents):
        text = "".join(part for part, _ in document(rng))
        for mark in SPECIAL + MARKUP:
            text = text.replace(mark, "\0")
        yield from text.split("\0")


def train(seed: int = 12345, documents: int = 30_000) -> Tokenizer:
    """The tokenizer; the same seed gives the same one."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(SPLIT), "isolated"), byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE - ADDED,
        min_frequency=3,
        special_tokens=[],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts(seed, documents), trainer)
    base = tokenizer.get_vocab_size()
    tokenizer.add_special_tokens([AddedToken(mark, special=True, normalized=False) for mark in SPECIAL])
    tokenizer.add_tokens([AddedToken(mark, special=False, normalized=False) for mark in MARKUP])
    reserved = range(VOCAB_SIZE - base - len(SPECIAL + MARKUP))
    tokenizer.add_special_tokens([AddedToken(f"<|reserved_{i}|>", special=True, normalized=False) for i in reserved])
    assert tokenizer.get_vocab_size() == VOCAB_SIZE, "the vocabulary has its size whatever the corpus"
    return tokenizer


def save(tokenizer: Tokenizer, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    shutil.copyfile(HERE / "chat_template.jinja", folder / "chat_template.jinja")
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": CONTEXT,
        "add_bos_token": False,
        "add_prefix_space": False,
        "bos_token": None,
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "unk_token": None,
        "clean_up_tokenization_spaces": False,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--documents", type=int, default=30_000)
    args = parser.parse_args()
    tokenizer = train(documents=args.documents)
    save(tokenizer, args.folder)
    rng = random.Random(777)
    sample = ["".join(part for part, _ in document(rng)) for _ in range(1000)]
    tokens = sum(len(e.ids) for e in tokenizer.encode_batch(sample))
    print(f"{sum(map(len, sample)) / tokens:.2f} characters a token, {tokens / len(sample):.0f} tokens a document")


if __name__ == "__main__":
    main()
