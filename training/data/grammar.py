"""A small phrase grammar: ``{a|b}`` picks a branch, ``{name}`` fills a slot; both nest.

The grammar knows nothing of sums or chats: slots are resolved by a callable that the caller hands in.
"""

import random
import re
from collections.abc import Callable, Mapping
from functools import cache

START = re.compile(r"""(?:^|[.?!\n])[ $"'(.?!\n]*[^\W_]""")
Slot = Callable[[str], str]
Node = str | tuple[str, object]


@cache
def parse(text: str) -> tuple[Node, ...]:
    """Parses a phrase into literals, ``("slot", name)`` and ``("pick", branches)`` nodes.

    Raises:
        ValueError: if the braces of `text` do not balance.
    """
    nodes, end = _sequence(text, 0, top=True)
    if end != len(text):
        raise ValueError(f"unbalanced brace at {end} in {text!r}")
    return nodes


def _sequence(text: str, at: int, top: bool) -> tuple[tuple[Node, ...], int]:
    nodes: list[Node] = []
    start = at
    while at < len(text):
        char = text[at]
        if char == "{":
            if at > start:
                nodes.append(text[start:at])
            node, at = _braces(text, at + 1)
            nodes.append(node)
            start = at
        elif char == "}" or (char == "|" and not top):
            break
        else:
            at += 1
    if at > start:
        nodes.append(text[start:at])
    return tuple(nodes), at


def _braces(text: str, at: int) -> tuple[Node, int]:
    branches: list[tuple[Node, ...]] = []
    while True:
        nodes, at = _sequence(text, at, top=False)
        branches.append(nodes)
        if at >= len(text):
            raise ValueError(f"unclosed brace in {text!r}")
        if text[at] == "}":
            break
        at += 1
    if len(branches) == 1 and len(branches[0]) == 1 and isinstance(branches[0][0], str):
        return ("slot", branches[0][0]), at + 1
    return ("pick", tuple(branches)), at + 1


def expand(text: str, rng: random.Random, slot: Slot) -> str:
    """Draws one wording of `text`; `slot` gives the text of a named slot."""
    return _expand(parse(text), rng, slot)


def _expand(nodes: tuple[Node, ...], rng: random.Random, slot: Slot) -> str:
    out = []
    for node in nodes:
        if isinstance(node, str):
            out.append(node)
        elif node[0] == "slot":
            out.append(slot(str(node[1])))
        else:
            branches = node[1]
            assert isinstance(branches, tuple), "a pick node holds its branches"
            out.append(_expand(branches[int(rng.random() * len(branches))], rng, slot))
    return "".join(out)


def fill(text: str, rng: random.Random, values: Mapping[str, object]) -> str:
    """`expand` with the slots taken from a mapping."""
    return expand(text, rng, lambda name: str(values[name]))


def articles(text: str) -> str:
    """Writes *an* for *a* before a vowel, also that of a number: an uncle, an 8-page book."""
    return re.sub(r"\b([aA]) (?=[aeiouAEIOU]|hour|8|1[18]\b)(?!one|uni|use)", r"\1n ", text)


def sentences(text: str) -> str:
    """Puts a capital at the start of every sentence and removes doubled spaces."""
    text = text.replace("  ", " ").replace("  ", " ")
    return START.sub(lambda match: match[0].upper(), text).strip()
