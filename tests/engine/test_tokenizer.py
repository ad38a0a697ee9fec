"""The tokenizer against transformers' on the same folder: ids, text, templates; and what a folder may lack or break."""

from __future__ import annotations

import json
import random
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

import deltaserve
from deltaserve.core.request import SamplingParams
from deltaserve.engine.tokenizer import GenerationDefaults, Tokenizer

BUILTIN = Path(deltaserve.__file__).parent / "builtin"

TEXTS = [
    "",
    " ",
    "Hello, world!\n\n\tTwo  spaces 1234567890",
    "naïve café — “quotes” … Ünïcödé",
    "e\u0301 is two characters and becomes one",
    "日本語とEnglish混じりの文。",
    "👩‍👩‍👧‍👦 family, 🏴󠁧󠁢󠁥󠁮󠁧󠁿 flag, 🇩🇪🇫🇷, ❤️‍🔥",
    "مرحبا بالعالم שלום",
    "a\x00b\x7f\u200b\ufeff\r\n",
    "\U0010ffff\ufffd\uffff",
    "<|im_start|>user\nhi<|im_end|>\n<think></think><tool_call>",
    "def f(x):\n    return x ** 2  # 'quoted' \"twice\"\n",
    "x" * 3000,
]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer(BUILTIN)


@pytest.fixture(scope="module")
def theirs() -> Any:
    return AutoTokenizer.from_pretrained(str(BUILTIN))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A copy of the built-in folder, without weights."""
    for file in BUILTIN.iterdir():
        if file.suffix != ".safetensors":
            shutil.copy(file, tmp_path)
    return tmp_path


def edit(file: Path, change: Callable[[dict[str, Any]], None]) -> None:
    content = json.loads(file.read_text(encoding="utf-8"))
    change(content)
    file.write_text(json.dumps(content), encoding="utf-8")


# ---- text and ids --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", TEXTS)
def test_ids_and_text_are_those_of_transformers(tokenizer: Tokenizer, theirs: Any, text: str) -> None:
    for add_special_tokens in (True, False):
        ids = tokenizer.encode(text, add_special_tokens)
        assert ids == theirs.encode(text, add_special_tokens=add_special_tokens)
    for skip in (True, False):
        assert tokenizer.decode(ids, skip) == theirs.decode(ids, skip_special_tokens=skip)


def test_any_ids_decode_as_in_transformers(tokenizer: Tokenizer, theirs: Any) -> None:
    for _ in range(300):
        ids = [random.randrange(2048) for _ in range(random.randrange(30))]
        assert tokenizer.decode(ids) == theirs.decode(ids, skip_special_tokens=True)
        assert tokenizer.decode(ids, False) == theirs.decode(ids, skip_special_tokens=False)


def test_bytes_of_tokens(tokenizer: Tokenizer) -> None:
    for text in TEXTS[3:8]:
        assert b"".join(map(tokenizer.token_bytes, tokenizer.encode(text))).decode() == tokenizer.decode(
            tokenizer.encode(text)
        )
    assert len({tokenizer.token_bytes(token_id) for token_id in range(2048)} & {bytes([b]) for b in range(256)}) == 256
    assert tokenizer.token_bytes(2034) == b"<|im_end|>"
    assert tokenizer.token_bytes(2048) == tokenizer.token_bytes(151935) == b""
    with pytest.raises(ValueError, match="-1 is out of range"):
        tokenizer.token_bytes(-1)


def test_special_tokens(tokenizer: Tokenizer) -> None:
    assert tokenizer.eos_token_id == tokenizer.token_id("<|im_end|>") == 2034
    assert tokenizer.is_special(2034)
    assert not tokenizer.is_special(5)
    assert tokenizer.bos_token_id is None
    assert tokenizer.special_tokens == {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}
    assert tokenizer.vocab_size == 2048


@pytest.mark.parametrize(("text", "position", "code"), [("ab\ud800c", 2, "D800"), ("\udfff", 0, "DFFF")])
def test_lone_surrogates_are_refused(tokenizer: Tokenizer, text: str, position: int, code: str) -> None:
    with pytest.raises(ValueError, match=rf"character {position} of the text is U\+{code}"):
        tokenizer.encode(text)


def test_a_limit_in_the_file_cuts_no_prompt(folder: Path) -> None:
    limit = {"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0}
    padding = {"strategy": {"Fixed": 64}, "direction": "Right", "pad_to_multiple_of": None, "pad_id": 0,
               "pad_type_id": 0, "pad_token": "<|endoftext|>"}  # fmt: skip
    edit(folder / "tokenizer.json", lambda content: content.update(truncation=limit, padding=padding))
    text = "one two three four five six seven"
    assert Tokenizer(folder).encode(text) == Tokenizer(BUILTIN).encode(text)


def test_a_begin_token_is_added_once(folder: Path) -> None:
    edit(folder / "tokenizer_config.json", lambda c: c.update(add_bos_token=True, bos_token="<|endoftext|>"))
    tokenizer = Tokenizer(folder)
    assert tokenizer.bos_token_id == 2032
    assert tokenizer.encode("hi") == [2032, *tokenizer.encode("hi", add_special_tokens=False)]


def test_tokens_that_only_the_config_knows(folder: Path) -> None:
    added = {"2048": {"content": "<|extra|>", "special": True, "lstrip": False, "normalized": False}}
    edit(folder / "tokenizer_config.json", lambda c: c.update(added_tokens_decoder=added, eos_token="<|extra|>"))
    tokenizer = Tokenizer(folder)
    assert tokenizer.encode("a<|extra|>")[-1] == 2048
    assert tokenizer.is_special(2048)
    assert tokenizer.eos_token_id == 2048
    assert 2048 in GenerationDefaults.load(folder).eos_token_ids
    added["2050"] = added.pop("2048")
    edit(folder / "tokenizer_config.json", lambda c: c.update(added_tokens_decoder=added))
    with pytest.raises(ValueError, match="do not belong together"):
        Tokenizer(folder)


def test_a_folder_without_tokenizer_json(folder: Path) -> None:
    """vocab.json and merges.txt are left to transformers, which gives the same ids."""
    model = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))["model"]
    (folder / "tokenizer.json").unlink()
    (folder / "vocab.json").write_text(json.dumps(model["vocab"]), encoding="utf-8")
    merges = [" ".join(merge) if isinstance(merge, list) else merge for merge in model["merges"]]
    (folder / "merges.txt").write_text("\n".join(["#version: 0.2", *merges]), encoding="utf-8")
    edit(folder / "tokenizer_config.json", lambda c: c.update(tokenizer_class="Qwen2Tokenizer"))
    tokenizer = Tokenizer(folder)
    for text in TEXTS[:4]:
        assert tokenizer.encode(text) == Tokenizer(BUILTIN).encode(text)
        assert tokenizer.decode(tokenizer.encode(text)) == Tokenizer(BUILTIN).decode(tokenizer.encode(text))


def test_a_folder_without_tokenizer(tmp_path: Path, folder: Path) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    assert Tokenizer.load(empty) is None
    assert Tokenizer.load(folder) is not None
    assert GenerationDefaults.load(empty) == GenerationDefaults({}, ())


def test_damaged_files_are_named(folder: Path) -> None:
    whole = (folder / "tokenizer.json").read_text(encoding="utf-8")
    (folder / "tokenizer.json").write_text(whole[: len(whole) // 2], encoding="utf-8")
    with pytest.raises(ValueError, match=r"tokenizer\.json cannot be read"):
        Tokenizer.load(folder)
    (folder / "tokenizer_config.json").write_text("{", encoding="utf-8")
    with pytest.raises(ValueError, match=r"tokenizer_config\.json is not JSON"):
        Tokenizer.load(folder)
    (folder / "generation_config.json").write_text("[]", encoding="utf-8")
    with pytest.raises(ValueError, match=r"generation_config\.json holds a list"):
        GenerationDefaults.load(folder)


def test_other_kinds_of_tokenizer_are_refused_by_name(folder: Path) -> None:
    edit(folder / "tokenizer.json", lambda c: c.update(decoder={"type": "Fuse"}))
    with pytest.raises(ValueError, match="type Fuse; only byte-level BPE"):
        Tokenizer(folder)
    edit(folder / "tokenizer.json", lambda c: c.update(decoder=None))
    with pytest.raises(ValueError, match="type none"):
        Tokenizer(folder)


# ---- chat templates ------------------------------------------------------------------------------------------------

CALL = {"name": "add", "arguments": {"b": 2, "a": "<&'\"é>"}}
CONVERSATIONS: list[list[dict[str, Any]]] = [
    [{"role": "user", "content": "hi"}],
    [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Héllo <b> & 'c' 😀"}],
    [{"role": "user", "content": [{"type": "text", "text": "part one, "}, {"type": "text", "text": "part two"}]}],
    [
        {"role": "user", "content": "add"},
        {"role": "assistant", "content": None, "tool_calls": [{"type": "function", "function": CALL}]},
        {"role": "tool", "content": "4"},
        {"role": "assistant", "content": "<think>\nx\n</think>\n\nfour"},
        {"role": "user", "content": "thanks"},
    ],
]
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object", "ü": ["<", ">"]}}}]


@pytest.mark.parametrize("messages", CONVERSATIONS)
@pytest.mark.parametrize("tools", [None, TOOLS])
@pytest.mark.parametrize("variables", [{}, {"enable_thinking": True}, {"add_generation_prompt": False}])
def test_the_template_renders_as_in_transformers(
    tokenizer: Tokenizer, theirs: Any, messages: list[dict[str, Any]], tools: Any, variables: dict[str, Any]
) -> None:
    want = theirs.apply_chat_template(
        messages, tools=tools, tokenize=False, **{"add_generation_prompt": True, **variables}
    )
    assert tokenizer.render_chat(messages, tools, **variables) == want


@pytest.mark.parametrize(
    "template",
    [
        "{% for m in messages %}\n  {% if loop.first %}\n    {{ m.content | trim }}\n  {% endif %}\n{% endfor %}",
        "{% for m in messages %}{% if loop.index > 1 %}{% break %}{% endif %}{{ m }}{% endfor %}",
        "{{ messages | tojson }}{{ messages | tojson(indent=2, sort_keys=true) }}",
        "{{ tools | tojson(ensure_ascii=true, separators=(',', ':')) }}",
        "{{ eos_token }}{{ pad_token }}{{ bos_token }}|{{ unknown }}|{{ documents }}|{{ custom }}",
        "{% for m in messages %}{% generation %}{{ m.content }}\n{% endgeneration %}{% endfor %}!",
        "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}",
        "{%- macro f(x, y=2) -%}{{ x }}-{{ y }}{%- endmacro -%}{{ f(1) }} {{ messages[0]['content'].upper() }}",
        "{{ strftime_now('%Y') }}",
        "{{ dict(a=1) | tojson }}{{ '%s' % messages[0].role }}{{ messages[-1].content.split('a')[0] }}",
    ],
)
def test_templates_have_what_transformers_gives_them(tokenizer: Tokenizer, theirs: Any, template: str) -> None:
    messages = [{"role": "user", "content": " a <b>é\n "}, {"role": "user", "content": "2a"}]
    want = theirs.apply_chat_template(
        messages, tools=TOOLS, chat_template=template, tokenize=False, add_generation_prompt=True, custom="mine"
    )
    assert tokenizer.render_chat(messages, TOOLS, chat_template=template, custom="mine") == want


def test_the_clock_of_templates(tokenizer: Tokenizer) -> None:
    before = datetime.now().date().isoformat()
    text = tokenizer.render_chat([], chat_template="{{ strftime_now('%Y-%m-%d') }}")
    assert before <= text <= datetime.now().date().isoformat()


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ raise_exception('roles must alternate') }}", "refuses the messages: roles must alternate"),
        ("{{ messages[5].content }}", "refuses the messages"),
        ("{{ 'a' + messages[0].missing }}", "refuses the messages"),
        ("{{ 1 + messages[0].content }}", "refuses the messages"),
        ("{{ messages.append(1) }}", "refuses the messages"),
        ("{{ ''.__class__.__mro__ }}", "refuses the messages"),
        ("{{ 1 / 0 }}", "refuses the messages"),
        ("a\n{% for %}", "line 2 of the chat template"),
    ],
)
def test_templates_that_refuse(tokenizer: Tokenizer, template: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        tokenizer.render_chat([{"role": "user", "content": "hi"}], chat_template=template)


def test_where_templates_come_from(folder: Path) -> None:
    """A file of its own, tokenizer_config.json as text or as a list by name, or nowhere."""
    messages = [{"role": "user", "content": "hi"}]
    config = folder / "tokenizer_config.json"
    edit(config, lambda c: c.update(chat_template="from config"))
    assert Tokenizer(folder).render_chat(messages) == Tokenizer(BUILTIN).render_chat(messages)
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "tool_use.jinja").write_text("with tools", encoding="utf-8")
    assert Tokenizer(folder).render_chat(messages, TOOLS) == "with tools"
    assert Tokenizer(folder).render_chat(messages) == Tokenizer(BUILTIN).render_chat(messages)
    shutil.rmtree(folder / "additional_chat_templates")
    (folder / "chat_template.jinja").unlink()
    assert Tokenizer(folder).chat_template == Tokenizer(folder).render_chat(messages) == "from config"
    named = [{"name": "default", "template": "plain"}, {"name": "rag", "template": "other"}]
    edit(config, lambda c: c.update(chat_template=named))
    assert Tokenizer(folder).render_chat(messages) == "plain"
    assert Tokenizer(folder).render_chat(messages, chat_template="rag") == "other"
    edit(config, lambda c: c.pop("chat_template"))
    with pytest.raises(ValueError, match="has no chat template; give one, or send a prompt"):
        Tokenizer(folder).render_chat(messages)


# ---- generation defaults -------------------------------------------------------------------------------------------


def test_defaults_of_the_builtin_model() -> None:
    defaults = GenerationDefaults.load(BUILTIN)
    assert defaults.sampling == {"temperature": 0.6, "top_k": 20, "top_p": 0.95}
    assert defaults.eos_token_ids == (2032, 2034)
    assert defaults.params() == SamplingParams(temperature=0.6, top_k=20, top_p=0.95)


def test_end_ids_are_the_union_of_all_files(folder: Path) -> None:
    (folder / "generation_config.json").write_text('{"eos_token_id": [1, 2]}', encoding="utf-8")
    edit(folder / "config.json", lambda c: c.update(eos_token_id=3, text_config={"eos_token_id": 4}))
    assert GenerationDefaults.load(folder).eos_token_ids == (1, 2, 3, 4, 2034)
    (folder / "generation_config.json").unlink()
    edit(folder / "config.json", lambda c: c.update(eos_token_id=None, text_config=None))
    assert GenerationDefaults.load(folder).eos_token_ids == (2034,)


def test_what_defaults_may_say(folder: Path) -> None:
    file = folder / "generation_config.json"
    file.write_text(json.dumps({"do_sample": False, "temperature": 0.7, "top_p": None, "max_new_tokens": 9}))
    assert GenerationDefaults.load(folder).sampling == {"temperature": 0.0, "max_tokens": 9}
    for bad in ({"temperature": -1}, {"top_p": "high"}, {"top_k": 1.5}, {"repetition_penalty": 0}):
        file.write_text(json.dumps(bad))
        with pytest.raises(ValueError, match=r"generation_config\.json: .*; correct the file"):
            GenerationDefaults.load(folder)


# ---- start-up ------------------------------------------------------------------------------------------------------


def test_neither_torch_nor_transformers_is_imported() -> None:
    code = f"""
import sys
import threading
import time
from pathlib import Path
from deltaserve.engine.tokenizer import GenerationDefaults, Tokenizer
from deltaserve.engine.detokenizer import TextStream
tokenizer = Tokenizer.load(Path({str(BUILTIN)!r}))
tokenizer.encode(tokenizer.render_chat([dict(role="user", content="hi")]))
GenerationDefaults.load(Path({str(BUILTIN)!r}))
print(sorted({{"torch", "transformers"}} & set(sys.modules)))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_a_long_text_lets_other_threads_run() -> None:
    """A server answers others meanwhile: the encoder must not hold the interpreter's lock."""
    tokenizer = Tokenizer(BUILTIN)
    ticks = 0
    done = threading.Event()

    def tick() -> None:
        nonlocal ticks
        while not done.wait(0.001):
            ticks += 1

    thread = threading.Thread(target=tick)
    thread.start()
    began = time.monotonic()
    tokenizer.encode("a b " * (1 << 16), add_special_tokens=False)
    ticks_meanwhile, seconds = ticks, time.monotonic() - began
    done.set()
    thread.join()
    assert ticks_meanwhile > 5, f"{ticks_meanwhile} ticks in {seconds:.2f} s"
