"""Runs a kernel written in Gluon on a CPU: what Triton's interpreter does not do.

A kernel's file is loaded a second time with stand-ins for Gluon, by which its functions are plain Python over torch
tensors. The partitions of a program are threads that meet at real barriers with phases, counts and bytes. What is
asynchronous on a GPU is late here: a copy fills its buffer with NaN and arrives after a random while, a product reads
its operands when it is waited for. So a buffer that is read too early or freed too early shows, and so does a barrier
that nobody opens. Which threads hold what of a tensor is not seen: the compiler checks layouts.
"""

from __future__ import annotations

import importlib.util
import random
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch

PATIENCE = 5.0
"""Seconds at a barrier after which nobody will come."""


class Register(torch.Tensor):
    """A tensor as a kernel sees it."""

    @property
    def type(self) -> Any:
        return SimpleNamespace(layout=None)

    def __floordiv__(self, other: Any) -> torch.Tensor:  # towards 0, as on a GPU
        return torch.div(self, other, rounding_mode="trunc")

    def __mod__(self, other: Any) -> torch.Tensor:  # with the sign of `self`
        return torch.fmod(self, other)


def register(value: Any, dtype: torch.dtype | None = None) -> torch.Tensor:
    made = value if isinstance(value, torch.Tensor) else torch.tensor(value)
    return (made if dtype is None else made.to(dtype)).as_subclass(Register)


@dataclass
class Pointer:
    memory: torch.Tensor
    """Flat."""
    offset: Any = 0

    @property
    def dtype(self) -> Any:
        return SimpleNamespace(element_ty=self.memory.dtype)

    def __add__(self, more: Any) -> Pointer:
        return Pointer(self.memory, self.offset + more)

    def __sub__(self, less: Any) -> Pointer:
        return Pointer(self.memory, self.offset - less)


@dataclass
class Shared:
    """Shared memory; indexed and permuted ones are views."""

    data: torch.Tensor

    @property
    def shape(self) -> Sequence[int]:
        return self.data.shape

    @property
    def dtype(self) -> torch.dtype:
        return self.data.dtype

    def index(self, i: Any) -> Shared:
        assert 0 <= int(i) < self.data.shape[0], f"buffer {int(i)} of {self.data.shape[0]}"
        return Shared(self.data[int(i)])

    def slice(self, start: int, length: int, dim: int = 0) -> Shared:
        return Shared(self.data.narrow(dim, start, length))

    def permute(self, order: Sequence[int]) -> Shared:
        return Shared(self.data.permute(*order))

    def load(self, layout: Any) -> torch.Tensor:
        return register(self.data.clone())

    def store(self, value: torch.Tensor) -> None:
        assert value.shape == self.data.shape, f"{tuple(value.shape)} into {tuple(self.data.shape)}"
        self.data.copy_(value)


class Barrier:
    def __init__(self) -> None:
        self.count = self.pending = self.bytes = self.phases = 0
        self.change = threading.Condition()

    def init(self, count: int) -> None:
        self.count = self.pending = count

    def settle(self, arrivals: int, num_bytes: int) -> None:
        with self.change:
            self.pending -= arrivals
            self.bytes += num_bytes
            assert self.pending >= 0, "more arrivals than a barrier counts"
            if self.pending == 0 and self.bytes == 0:
                self.phases += 1
                self.pending = self.count
                self.change.notify_all()

    def wait(self, parity: int) -> None:
        """Until the phase of this parity is over: the one under way has the other one."""
        with self.change:
            assert self.change.wait_for(lambda: self.phases % 2 != parity, PATIENCE), "a barrier that nobody opens"


class Barriers:
    def __init__(self, count: int) -> None:
        self.all = [Barrier() for _ in range(count)]
        self.shape = (count, 1)

    def index(self, i: Any) -> Barrier:
        return self.all[int(i)]


@dataclass(eq=False)
class Product:
    """One of the matrix unit that is not known to be done."""

    a: Any
    b: Shared
    acc: Any
    value: torch.Tensor | None = None

    def finish(self) -> None:
        a = self.a.data if isinstance(self.a, Shared) else self.a
        base = self.acc.value if isinstance(self.acc, Product) else self.acc
        self.value = register((0 if base is None else base) + a.float() @ self.b.data.float())


@dataclass
class Place(threading.local):
    """Of the running thread."""

    program: tuple[int, ...] = (0, 0)
    grid: tuple[int, ...] = (0, 0)
    products: list[Product] = field(default_factory=list)
    copies: list[Callable[[], object]] = field(default_factory=list)
    """Begun and in no group yet."""
    groups: list[list[Callable[[], object]]] = field(default_factory=list)
    """Of copies that have not arrived."""
    threads: int = 0
    """In the partition."""


HERE = Place()


def plain(fn: Callable[..., Any] | None = None, **_: Any) -> Any:
    return fn if fn is not None else lambda inner: inner


class Whole(int):
    """A constant of a kernel."""

    @property
    def value(self) -> int:
        return int(self)


def constexpr(value: Any) -> Any:
    return Whole(value) if isinstance(value, int) else value


def load(at: Pointer, mask: Any = True, other: Any = 0, volatile: bool = False) -> torch.Tensor:
    offset, is_there = torch.broadcast_tensors(register(at.offset), register(mask))  # type: ignore[no-untyped-call]
    picked = at.memory[torch.where(is_there, offset, 0).long()]
    return register(torch.where(is_there, picked, register(other, picked.dtype)))


def store(at: Pointer, value: torch.Tensor, mask: Any = True) -> None:
    assert value.dtype == at.memory.dtype, "a store that rounds"
    where = register(mask).expand(value.shape)
    at.memory[at.offset.expand(value.shape)[where].long()] = value[where].as_subclass(torch.Tensor)


def assembly(text: str, constraints: str, args: Sequence[torch.Tensor], *_: Any, **__: Any) -> torch.Tensor:
    if text.startswith("rcp"):
        return register(args[0].reciprocal())
    assert "mul.f32" in text, text
    return register(args[0] * args[1])


@dataclass
class Box:
    """A tensor that is copied by boxes."""

    data: torch.Tensor


def copy_box(desc: Box, at: Sequence[Any], barrier: Barrier, target: Shared, pred: Any = True) -> None:
    if not bool(pred):
        return
    target.data.fill_(torch.nan)
    (row, column), (rows, columns) = map(int, at), target.data.shape
    assert column * desc.data.element_size() % 16 == 0, f"illegal instruction: a box that begins at column {column}"

    def arrive() -> None:
        target.data.zero_()  # what is not there
        low, high = (min(max(row + end, 0), desc.data.shape[0]) for end in (0, rows))
        left, right = (min(max(column + end, 0), desc.data.shape[1]) for end in (0, columns))
        target.data[low - row : high - row, left - column : right - column] = desc.data[low:high, left:right]
        barrier.settle(0, -target.data.numel() * target.data.element_size())

    threading.Timer(random.random() * 2e-3, arrive).start()


def copy_later(target: Shared, at: Pointer, mask: Any = True) -> None:
    """Without a barrier: arrives when its group is waited for."""
    target.data.fill_(torch.nan)
    HERE.copies.append(lambda: target.data.copy_(load(at, mask)))


def commit_group() -> None:
    HERE.groups.append(HERE.copies)
    HERE.copies = []


def wait_group(left: int) -> None:
    while len(HERE.groups) > left:
        for arrive in HERE.groups.pop(0):
            arrive()


def arrive_copied(barrier: Barrier, increment_count: bool) -> None:
    """Each of the partition's threads arrives when what it has begun to copy is there."""
    assert not increment_count
    copies, HERE.copies, threads = HERE.copies, [], HERE.threads

    def arrive() -> None:
        for copy in copies:
            copy()
        barrier.settle(threads, 0)

    threading.Timer(random.random() * 2e-3, arrive).start()


def multiply(a: Any, b: Shared, acc: Any, use_acc: bool = True, is_async: bool = False) -> Any:
    product = Product(a, b, acc if use_acc else None)
    HERE.products.append(product)
    return product if is_async else wait_products(0, [product])


def wait_products(left: int, deps: Sequence[Any]) -> Any:
    while len(HERE.products) > left:
        HERE.products.pop(0).finish()
    if random.random() < 0.2:
        time.sleep(random.random() * 2e-3)
    results = tuple(x.value if isinstance(x, Product) else x for x in deps)
    assert all(x is not None for x in results), "the result of a product that is not done"
    return results if len(results) > 1 else results[0]


def specialize(
    partitions: Sequence[tuple[Callable[..., None], tuple[Any, ...]]], warps: Sequence[int], *_: Any
) -> None:
    """`warps`: of all but the first partition, which has four."""
    program, grid = HERE.program, HERE.grid

    def run(body: Callable[..., None], args: tuple[Any, ...], num_warps: int) -> None:
        HERE.program, HERE.grid, HERE.products, HERE.threads = program, grid, [], 32 * num_warps
        body(*args)

    with ThreadPoolExecutor(len(partitions)) as pool:
        given = zip(partitions, (4, *warps), strict=True)
        for running in [pool.submit(run, *partition, num_warps) for partition, num_warps in given]:
            running.result()


def language() -> ModuleType:
    """Stands for triton.experimental.gluon.language."""
    made = ModuleType("gluon_language")

    def allocate(dtype: torch.dtype, shape: Sequence[int], layout: Any) -> Any:
        return Barriers(shape[0]) if layout == "barrier" else Shared(torch.full(shape, torch.nan, dtype=dtype))

    def both(op: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        return lambda a, b: register(op(register(a), register(b)))

    for name in ("NVMMADistributed", "Blocked", "Slice", "NVMMAShared", "SwizzledShared", "DotOperand"):
        setattr(made, f"{name}Layout", lambda *_: None)
    vars(made).update(
        constexpr=constexpr, float32=torch.float32, int32=torch.int32, int64=torch.int64, load=load, store=store,
        float8e4nv=torch.float8_e4m3fn, abs=torch.abs, exp=torch.exp, div_rn=torch.div, full_like=torch.full_like,
        fma=lambda a, b, c: (a.double() * b.double() + c.double()).float(), reshape=torch.reshape,
        permute=torch.permute, split=lambda x: x.unbind(-1), join=lambda a, b: torch.stack([a, b], -1),
        program_id=lambda axis: register(HERE.program[axis]), num_programs=lambda axis: HERE.grid[axis],
        to_tensor=register, arange=lambda a, b, layout: register(torch.arange(a, b)),
        zeros=lambda shape, dtype, layout: register(torch.zeros(list(map(int, shape)), dtype=dtype)),
        full=lambda shape, value, dtype, layout: register(torch.full(list(map(int, shape)), value, dtype=dtype)),
        zeros_like=torch.zeros_like, where=lambda c, a, b: register(torch.where(register(c), register(a), register(b))),
        maximum=both(torch.maximum), minimum=both(torch.minimum), max=lambda x, axis: x.amax(axis),
        log=torch.log, rsqrt=torch.rsqrt,
        sum=lambda x, axis: x.sum(axis), exp2=torch.exp2, convert_layout=lambda x, layout: x,
        broadcast=lambda a, b: (a, b.expand(a.shape)), inline_asm_elementwise=assembly,
        allocate_shared_memory=allocate, static_range=range, warp_specialize=specialize,
        barrier=lambda: None, static_assert=lambda is_so: None,
    )  # fmt: skip
    return made


def hopper() -> ModuleType:
    """Stands for triton.experimental.gluon.language.nvidia.hopper."""
    made = ModuleType("gluon_hopper")
    mbarrier = SimpleNamespace(
        MBarrierLayout=lambda: "barrier",
        init=lambda barrier, count: barrier.init(count),
        wait=lambda barrier, parity, pred=True: barrier.wait(int(parity)) if pred else None,
        expect=lambda barrier, size, pred=True: barrier.settle(1, int(size)) if pred else None,
        arrive=lambda barrier, count=1, pred=True: barrier.settle(count, 0) if pred else None,
    )
    vars(made).update(
        fence_async_shared=lambda: None, mbarrier=mbarrier, tma=SimpleNamespace(async_load=copy_box),
        warpgroup_mma=multiply, warpgroup_mma_wait=wait_products, warpgroup_mma_init=lambda x: Product(x, x, x, x),
        async_copy=SimpleNamespace(
            async_load=copy_later, commit_group=commit_group, wait_group=wait_group, mbarrier_arrive=arrive_copied
        ),
    )  # fmt: skip
    return made


@contextmanager
def stand_ins() -> Iterator[None]:
    root = "triton.experimental.gluon"
    gluon = ModuleType("gluon")
    vars(gluon).update(jit=plain, constexpr_function=plain, language=language())
    tensors = ModuleType("gluon_tensors")
    vars(tensors).update(TensorDescriptor=SimpleNamespace(from_tensor=lambda x, box, layout: Box(x)))
    fakes = {root: gluon, f"{root}.language": gluon.language, f"{root}.language.nvidia.hopper": hopper()}
    fakes[f"{root}.nvidia.hopper"] = tensors
    before = {name: sys.modules.get(name) for name in fakes}
    sys.modules.update(fakes)
    parent = importlib.import_module("triton.experimental")
    real = vars(parent).get("gluon")  # if it was imported before
    vars(parent)["gluon"] = gluon
    try:
        yield
    finally:
        del vars(parent)["gluon"]
        vars(parent).update({} if real is None else {"gluon": real})
        for name, module in before.items():
            sys.modules.pop(name) if module is None else sys.modules.update({name: module})


def flat(x: torch.Tensor) -> torch.Tensor:
    """All memory from the first element of `x` on."""
    return x.as_strided((x.untyped_storage().nbytes() // x.element_size() - x.storage_offset(),), (1,))


class Launcher:
    """`kernel[grid](...)`, program by program."""

    def __init__(self, kernel: Callable[..., None]) -> None:
        self.kernel = kernel

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        def launch(*args: Any, num_warps: int, **constants: Any) -> None:
            arrays = [Pointer(flat(x)) if isinstance(x, torch.Tensor) else x for x in args]
            for program in product(*map(range, grid)):
                HERE.program, HERE.grid, HERE.groups = program, grid, []
                self.kernel(*arrays, **constants)

        return launch


def load_kernels(path: str, *kernels: str, parts: Sequence[str] = ()) -> ModuleType:
    """The module of a file of kernels, in which `kernels` can be launched on CPU tensors. `parts`: modules of functions
    in Gluon that it imports."""
    before = {name: sys.modules.get(name) for name in parts}
    with stand_ins():
        try:
            for name in parts:
                found = importlib.util.find_spec(name)
                assert found is not None
                assert found.origin is not None
                sys.modules[name] = _load(found.origin)
            module = _load(path)
        finally:
            for name, real in before.items():
                sys.modules.pop(name, None) if real is None else sys.modules.update({name: real})
    for kernel in kernels:
        setattr(module, kernel, Launcher(getattr(module, kernel)))
    return module


def _load(path: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"{Path(path).stem}_on_a_cpu", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
