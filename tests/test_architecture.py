"""Who may import whom, which words live where, how long a file and a function may be: the design's rules, executed.

Each rule is a function from a file's path (inside the package) and source to complaints. It is run over every file of
the package, and over a snippet that breaks it, so that a rule that has stopped working fails too.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from fnmatch import fnmatch
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "src" / "deltaserve"
Rule = Callable[[str, str], Iterator[str]]

# ---- who may import whom -------------------------------------------------------------------------------------------

BELOW = {
    "__init__": {"cli"},
    "__main__": {"cli"},
    "cli": {"server", "bench"},
    "bench": {"engine"},
    "server": {"engine"},
    "engine": {"runner", "scheduler"},
    "runner": {"models"},
    "models": {"layers"},
    "layers": {"ops"},
    "ops": set(),
    "scheduler": {"cache"},
    "cache": set(),
}
"""Each may use what is below it on its own branch."""

SHARED = {
    "core": {"cli", "server", "bench", "engine", "scheduler", "runner", "cache"},
    "parallel": {"engine", "runner", "models", "layers"},
    "config": {"cli", "bench", "flags", "engine", "runner", "models"},
    "flags": {"cli", "bench"},
    "model_config": {"cli", "bench", "engine", "runner", "models"},
}
"""Off the branches: who may use them."""

TORCH_FREE = {"core", "cache", "scheduler", "config", "model_config", "flags", "server", "cli", "__init__", "__main__"}
LAZY = {"cli", "__init__", "__main__"}
"""May import what is heavy inside a function, not at the top of the file."""


def reach(part: str) -> set[str]:
    """All parts on the branches below `part`."""
    return BELOW.get(part, set()).union(*(reach(lower) for lower in BELOW.get(part, set())))


def may_import(part: str, other: str) -> bool:
    if part == other or part in ("__init__", "__main__"):
        return True
    return part in SHARED[other] if other in SHARED else other in reach(part)


def part_of(path: str) -> str:
    return path.split("/")[0].removesuffix(".py")


def imports(source: str) -> Iterator[tuple[int, str, bool]]:
    """(line, dotted name, at the top of the file), one for each imported module or name."""
    tree = ast.parse(source)
    inner = {
        id(node)
        for scope in ast.walk(tree)
        if isinstance(scope, ast.FunctionDef | ast.AsyncFunctionDef)
        for node in ast.walk(scope)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name, id(node) not in inner
        elif isinstance(node, ast.ImportFrom):
            module = "." * node.level + (node.module or "")
            for alias in node.names:
                yield node.lineno, f"{module}.{alias.name}", id(node) not in inner


def check_arrows(path: str, source: str) -> Iterator[str]:
    part = part_of(path)
    if part not in BELOW and part not in SHARED:
        yield f"{path}: no arrow of the design says whom {part} may import; add it to BELOW or SHARED"
        return
    for line, name, _ in imports(source):
        if name.startswith("."):
            yield f"{path}:{line}: relative import {name}; write the whole name"
        names = name.split(".")
        if names[0] != "deltaserve" or len(names) < 2:
            continue
        other = names[1]
        if (other in BELOW or other in SHARED) and not may_import(part, other):
            yield f"{path}:{line}: {part} may not import {other} ({name})"


def check_torch_free(path: str, source: str) -> Iterator[str]:
    part = part_of(path)
    if part not in TORCH_FREE:
        return
    for line, name, at_top in imports(source):
        if name.split(".")[0] in ("torch", "triton", "transformers") and (at_top or part not in LAZY):
            yield f"{path}:{line}: {part} imports {name}; it knows no tensor"


# ---- which words live where ----------------------------------------------------------------------------------------

FENCES: dict[str, tuple[str, tuple[str, ...]]] = {
    "speculation": (
        r"draft\w*?|verif(?:y|ies|ied|ying|ication)|accepted|acceptance",
        (
            "scheduler/*",
            "core/*",
            "runner/sampling.py",
            "runner/draft.py",
            "runner/draft_graphs.py",
            "runner/runner.py",
            "runner/warmup.py",  # has the sampler draw as for drafts
            "*/metrics.py",
            "config.py",
            "server/generation.py",  # the usage tells them, here and below
            "server/replies.py",
        ),
    ),
    "slot": (
        r"slots?",
        (
            "cache/*",
            "core/plan.py",
            "core/stats.py",
            "config.py",
            "runner/blueprint.py",
            "engine/compare.py",  # leaves the config's num_slots open
            "runner/inputs.py",
            "runner/columns.py",
            "runner/graphs.py",
            "runner/warmup.py",
            "runner/setup.py",
            "bench/*",
            "runner/memory.py",
            "runner/draft.py",  # the hidden state is kept per slot
            "runner/draft_graphs.py",
            "layers/context.py",
            "ops/layout.py",
            "ops/gated_delta/*",
            "ops/conv/*",
            "ops/places/*",
            "ops/attention/*",
            "*/metrics.py",
        ),
    ),
    "rank": (
        r"ranks?|all_reduce|all_gather",
        (
            "parallel.py",
            "engine/workers.py",
            "layers/linear.py",
            "layers/embedding.py",
            "layers/moe.py",
            "models/load.py",
            "runner/*",
            "core/request.py",  # a token's rank among the likely ones, here and below
            "engine/detokenizer.py",
        ),
    ),
    "device": (
        r"triton|cuda",
        (
            "ops/*",
            "bench/*",
            "runner/memory.py",
            "runner/graphs.py",
            "runner/warmup.py",
            "runner/setup.py",
            "runner/device.py",
            "config.py",
        ),
    ),
    "family": (r"qwen\w*?", ("models/*", "model_config.py", "server/chat.py", "__init__.py")),
}
"""A word, and the files that may say it. Elsewhere the idea it stands for has leaked."""


def split_camel(line: str) -> str:
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", " ", line).lower()


def check_fences(path: str, source: str) -> Iterator[str]:
    for fence, (words, homes) in FENCES.items():
        if any(fnmatch(path, home) for home in homes):
            continue
        pattern = re.compile(rf"(?<![a-z])(?:{words})(?![a-z])")
        for number, line in enumerate(source.splitlines(), 1):
            found = pattern.search(split_camel(line.replace("__slots__", "").replace("slots=True", "")))
            if found:
                yield f"{path}:{number}: {found.group()!r} is fenced ({fence}): {line.strip()[:80]}"


VAGUE = re.compile(r"(?<![a-z])(?:todo|fixme|xxx|helpers?|utils?|sessions?)(?![a-z])")
"""Words that postpone work or name nothing."""


def check_vague(path: str, source: str) -> Iterator[str]:
    for number, line in enumerate([path, *source.splitlines()]):
        found = VAGUE.search(split_camel(line))
        if found:
            yield f"{path}:{number}: {found.group()!r}: say what it is, or do it"


# ---- what fits a screen, and what hides ----------------------------------------------------------------------------

MAX_FILE, MAX_KERNEL_FILE = 400, 500
MAX_FUNCTION, MAX_KERNEL = 70, 200


def is_kernel(node: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    return any("jit" in ast.unparse(decorator) for decorator in node.decorator_list)


def check_lengths(path: str, source: str) -> Iterator[str]:
    lines = len(source.splitlines())
    limit = MAX_KERNEL_FILE if Path(path).name.startswith("triton_") else MAX_FILE
    if lines > limit:
        yield f"{path}: {lines} lines, at most {limit}"
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            size = (node.end_lineno or node.lineno) - node.lineno + 1
            limit = MAX_KERNEL if is_kernel(node) else MAX_FUNCTION
            if size > limit:
                yield f"{path}:{node.lineno}: {node.name} has {size} lines, at most {limit}"


def check_excepts(path: str, source: str) -> Iterator[str]:
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ExceptHandler):
            if node.type is None:
                yield f"{path}:{node.lineno}: a bare except"
            elif all(isinstance(statement, ast.Pass) for statement in node.body):
                yield f"{path}:{node.lineno}: an except that only passes"
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("suppress", "contextlib.suppress"):
            everything = {"Exception", "BaseException"} & {ast.unparse(argument) for argument in node.args}
            yield from (f"{path}:{node.lineno}: suppresses every {name}" for name in everything)


def check_hidden_inputs(path: str, source: str) -> Iterator[str]:
    """No environment switches, and no module variable that a function rebinds."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute | ast.Name):
            name = node.attr if isinstance(node, ast.Attribute) else node.id
            if name in ("environ", "environb", "getenv", "putenv"):
                yield f"{path}:{node.lineno}: reads the environment ({name}); make it a field of EngineConfig"
        elif isinstance(node, ast.ImportFrom) and node.module == "os":
            for alias in node.names:
                if alias.name in ("environ", "environb", "getenv", "putenv"):
                    yield f"{path}:{node.lineno}: imports {alias.name}; make it a field of EngineConfig"
        elif isinstance(node, ast.Global):
            yield f"{path}:{node.lineno}: rebinds {', '.join(node.names)}; no global state"


def check_docstring(path: str, source: str) -> Iterator[str]:
    if source.strip() and not ast.get_docstring(ast.parse(source)):
        yield f"{path}: no module docstring; say what it does and what it does not know"


RULES: dict[str, Rule] = {
    "arrows": check_arrows,
    "torch-free": check_torch_free,
    "fences": check_fences,
    "vague words": check_vague,
    "lengths": check_lengths,
    "excepts": check_excepts,
    "hidden inputs": check_hidden_inputs,
    "docstrings": check_docstring,
}


@pytest.mark.parametrize("rule", RULES)
def test_the_package_keeps(rule: str) -> None:
    files = sorted(PACKAGE.rglob("*.py"))
    assert files, f"no source in {PACKAGE}"
    complaints = [
        complaint
        for file in files
        for complaint in RULES[rule](file.relative_to(PACKAGE).as_posix(), file.read_text(encoding="utf-8"))
    ]
    assert not complaints, "\n" + "\n".join(complaints)


# ---- the rules themselves ------------------------------------------------------------------------------------------

BROKEN: list[tuple[str, str, str]] = [
    ("arrows", "ops/conv/api.py", "from deltaserve.core.plan import Plan"),
    ("arrows", "ops/conv/api.py", "from deltaserve import config"),
    ("arrows", "scheduler/scheduler.py", "import deltaserve.runner.runner"),
    ("arrows", "server/app.py", "def f():\n    from deltaserve.config import EngineConfig"),
    ("arrows", "cache/pool.py", "from .prefix import Index"),
    ("arrows", "bonus/new.py", "x = 1"),
    ("torch-free", "core/plan.py", "import torch"),
    ("torch-free", "cache/pool.py", "def f():\n    from torch import Tensor"),
    ("torch-free", "cli.py", "import torch"),
    ("fences", "engine/engine.py", "num_drafts = 0"),
    ("fences", "layers/gated_delta_net.py", "class SlotTable: ..."),
    ("fences", "scheduler/scheduler.py", "# give the slot back"),
    ("fences", "engine/engine.py", "world.all_reduce(x)"),
    ("fences", "models/qwen3_next.py", 'x.to("cuda:0")'),
    ("fences", "engine/llm.py", "Qwen3Next()"),
    ("vague words", "engine/llm_utils.py", "x = 1"),
    ("vague words", "engine/llm.py", "# TODO later"),
    ("lengths", "engine/llm.py", "x = 1\n" * (MAX_FILE + 1)),
    ("lengths", "ops/conv/triton_step.py", "x = 1\n" * (MAX_KERNEL_FILE + 1)),
    ("lengths", "engine/llm.py", "def f():\n" + "    x = 1\n" * MAX_FUNCTION),
    ("lengths", "ops/conv/triton_step.py", "@triton.jit\ndef f():\n" + "    x = 1\n" * MAX_KERNEL),
    ("excepts", "engine/llm.py", "try:\n    f()\nexcept:\n    g()"),
    ("excepts", "engine/llm.py", "try:\n    f()\nexcept ValueError:\n    pass"),
    ("excepts", "engine/llm.py", "with contextlib.suppress(Exception):\n    f()"),
    ("hidden inputs", "engine/llm.py", "import os\nos.environ.get('X')"),
    ("hidden inputs", "engine/llm.py", "from os import getenv"),
    ("hidden inputs", "engine/llm.py", "def f():\n    global x\n    x = 1"),
    ("docstrings", "engine/llm.py", "x = 1"),
]


@pytest.mark.parametrize(("rule", "path", "source"), BROKEN)
def test_rule_sees(rule: str, path: str, source: str) -> None:
    assert list(RULES[rule](path, source)), f"{rule} does not see {source!r} in {path}"


KEPT: list[tuple[str, str, str]] = [
    ("arrows", "engine/llm.py", "from deltaserve.scheduler.scheduler import Scheduler\nimport torch"),
    (
        "arrows",
        "runner/runner.py",
        "from deltaserve.ops.layout import Layout\nfrom deltaserve.config import EngineConfig",
    ),
    ("torch-free", "cli.py", "def compare():\n    import torch"),
    ("fences", "engine/engine.py", "@dataclass(slots=True)\nclass A:\n    __slots__ = ()\n    cranked = slotted = 1"),
    ("fences", "cache/pool.py", "slot = 1"),
    ("lengths", "engine/llm.py", "def f():\n" + "    x = 1\n" * (MAX_FUNCTION - 1)),
    ("lengths", "ops/conv/triton_step.py", "@triton.jit\ndef f():\n" + "    x = 1\n" * (MAX_KERNEL - 1)),
    ("excepts", "engine/llm.py", "with contextlib.suppress(ProcessLookupError):\n    f()"),
    ("vague words", "engine/llm.py", "utilisation = 1"),
]


@pytest.mark.parametrize(("rule", "path", "source"), KEPT)
def test_rule_lets_pass(rule: str, path: str, source: str) -> None:
    assert not list(RULES[rule](path, source))


# ---- the cost of an import -----------------------------------------------------------------------------------------

IMPORT = """
import sys, time
start = time.perf_counter()
import {module}
print(time.perf_counter() - start, *sorted({heavy} & set(sys.modules)))
"""


def import_in_a_new_process(module: str, heavy: set[str]) -> tuple[float, list[str]]:
    """Seconds of an import, and which of `heavy` it brought."""
    program = IMPORT.format(module=module, heavy=heavy)
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    seconds, *brought = run.stdout.split()
    return float(seconds), brought


def test_import_is_light() -> None:
    runs = [import_in_a_new_process("deltaserve", {"torch", "transformers", "fastapi", "triton"}) for _ in range(3)]
    assert all(not heavy for _, heavy in runs), runs
    assert min(seconds for seconds, _ in runs) < 0.3, runs


@pytest.mark.parametrize("module", ["deltaserve.cli", "deltaserve.server.app", "deltaserve.scheduler.scheduler"])
def test_no_tensor_library_comes_along(module: str) -> None:
    assert import_in_a_new_process(module, {"torch", "transformers", "triton"})[1] == []
