"""Reads the matched tensors of a checkpoint into a model, with several threads. Knows no name and no request.

Neighbouring tensors of a file are read at once into a buffer from which the device copies on its own; turning,
quantising and placing them happens there. A thread waits only for the last use of its buffer, never for a tensor.
What is quantised while loading is on the device in pieces of a buffer's size: never the whole model in two dtypes.
"""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from queue import SimpleQueue

import torch
from torch import Tensor, nn
from tqdm import tqdm

from deltaserve.models.checkpoint import TensorInfo
from deltaserve.models.matching import Job
from deltaserve.models.names import Piece
from deltaserve.ops.linear.api import dequantize_weight, quantize_weight

DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16, "F8_E4M3": torch.float8_e4m3fn}
BATCH_BYTES = 64 << 20
"""What is read at once, a larger tensor that cannot be cut aside."""
MAX_GAP = 1 << 20
"""Bytes between two tensors that are read along rather than skipped."""
MAX_THREADS = 8


@dataclass(frozen=True)
class Task:
    """A tensor to read, or consecutive rows of one, and where they go."""

    info: TensorInfo
    piece: Piece
    row: int = 0
    """The first of the rows."""
    scales: TensorInfo | None = None
    """To multiply the tensor with."""
    scale_piece: Piece | None = None
    """Where its scales go once it is quantised."""

    @property
    def end(self) -> int:
        return self.info.start + self.info.nbytes


def fill(model: nn.Module, jobs: list[Job], progress: bool) -> None:
    """Writes every weight of the model once. Raises ValueError naming a file that cannot be read."""
    parameters = dict(model.named_parameters())
    tasks = [task for job in jobs for task in _tasks(job)]
    _check_coverage(parameters, tasks)
    batches = list(_batches([part for task in tasks for part in _cut(task)]))
    sizes = [batch[-1].end - batch[0].info.start for batch in batches]
    threads = min(MAX_THREADS, os.cpu_count() or 1)
    device = next(iter(parameters.values())).device
    usual = min(BATCH_BYTES, max(sizes))
    buffers: SimpleQueue[_Buffer] = SimpleQueue()  # two for each thread: the device empties one while the other fills
    made = [_Buffer(device, usual) for _ in range(min(2 * threads, len(batches)))]
    for buffer in made:
        buffers.put(buffer)

    def work(batch: list[Task]) -> int:
        buffer = buffers.get()
        try:
            return buffer.run(parameters, batch)
        finally:
            buffers.put(buffer)

    with (
        tqdm(total=sum(sizes), unit="B", unit_scale=True, desc="Loading weights", disable=not progress) as bar,
        ThreadPoolExecutor(threads) as pool,
    ):
        try:
            for nbytes in pool.map(work, batches):
                bar.update(nbytes)
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
        finally:
            for buffer in made:
                buffer.close()
    if device.type != "cpu":
        torch.accelerator.empty_cache()  # what was for loading is for the cache of the requests now


def _tasks(job: Job) -> Iterator[Task]:
    """FP8 weights and their scales are read apart unless one is needed for the other."""
    if job.scales is None or job.scale_piece is None:
        yield Task(job.info, job.piece, scales=job.scales, scale_piece=job.scale_piece)
    else:
        yield Task(job.info, job.piece)
        yield Task(job.scales, job.scale_piece)


def _check_coverage(parameters: dict[str, nn.Parameter], tasks: list[Task]) -> None:
    written = dict.fromkeys(parameters, 0)
    for task in tasks:
        for piece in (task.piece, task.scale_piece):
            if piece is not None:
                written[piece.parameter] += math.prod(piece.shape)
    for name, count in written.items():
        assert count == parameters[name].numel(), f"the table of names fills {count} numbers of {name}"


def _cut(task: Task) -> Iterator[Task]:
    """A tensor beyond BATCH_BYTES in runs of rows, where its rows do not hang together."""
    info = task.info
    is_free = task.piece.order is None and task.scales is None and (task.scale_piece is None or len(info.shape) == 3)
    if info.nbytes <= BATCH_BYTES or not is_free:
        yield task
        return
    num_rows, row_bytes = info.shape[0], info.nbytes // info.shape[0]
    step = max(1, BATCH_BYTES // row_bytes)
    for row in range(0, num_rows, step):
        shape = (min(step, num_rows - row), *info.shape[1:])
        part = replace(info, shape=shape, start=info.start + row * row_bytes, nbytes=shape[0] * row_bytes)
        yield replace(task, info=part, row=row)


def _batches(tasks: list[Task]) -> Iterator[list[Task]]:
    """The tasks in the files' order, cut into batches of one file and about BATCH_BYTES."""
    batch: list[Task] = []
    for task in sorted(tasks, key=lambda task: (task.info.file, task.info.start)):
        if batch and (
            task.info.file != batch[0].info.file
            or task.end - batch[0].info.start > BATCH_BYTES
            or task.info.start - batch[-1].end > MAX_GAP
        ):
            yield batch
            batch = []
        batch.append(task)
    if batch:
        yield batch


class _Buffer:
    """A batch's bytes on their way, and the device's queue that takes them on. On a CPU nothing is waited for."""

    def __init__(self, device: torch.device, size: int) -> None:
        self.device = device
        self.stream = None if device.type == "cpu" else torch.Stream(device)
        if self.stream is not None:
            self.stream.wait_stream(torch.accelerator.current_stream(device))
        self._allocate(size)

    def close(self) -> None:
        """Waits until the device has taken all, and lets go of the memory."""
        self._wait()
        self._allocate(0)

    def _wait(self) -> None:
        if self.stream is not None:
            self.stream.synchronize()

    def _allocate(self, size: int) -> None:
        self.host = torch.empty(size, dtype=torch.uint8, pin_memory=self.stream is not None)
        self.there = self.host
        if self.stream is not None:
            with self.stream:
                self.there = torch.empty(size, dtype=torch.uint8, device=self.device)

    @torch.inference_mode()
    def run(self, parameters: dict[str, nn.Parameter], batch: list[Task]) -> int:
        """Reads and places a batch; the bytes that were read."""
        file, start = batch[0].info.file, batch[0].info.start
        size = batch[-1].end - start
        self._wait()
        if size > len(self.host):
            self._allocate(size)
        read(file, start, self.host[:size])
        with self.stream or contextlib.nullcontext():
            if self.stream is not None:
                self.there[:size].copy_(self.host[:size], non_blocking=True)
            for task in batch:
                self._place(parameters, task, _tensor(self.there[task.info.start - start :], task.info))
        return size

    def _place(self, parameters: dict[str, nn.Parameter], task: Task, tensor: Tensor) -> None:
        if task.scales is not None:
            scales = torch.empty(task.scales.nbytes, dtype=torch.uint8)
            read(task.scales.file, task.scales.start, scales)
            factors = _tensor(scales, task.scales).float().to(self.device)
            wide = torch.promote_types(parameters[task.piece.parameter].dtype, torch.float32)
            tensor = dequantize_weight(tensor, factors, wide)
        elif task.scale_piece is not None:
            tensor, factors = quantize_weight(tensor)
            _write(parameters[task.scale_piece.parameter], task.scale_piece, factors, task.row)
        _write(parameters[task.piece.parameter], task.piece, tensor, task.row)


def read(file: Path, start: int, into: Tensor) -> None:
    """Fills a tensor of bytes from a file. Raises ValueError naming the file when it cannot."""
    view = into.numpy().data
    try:
        with file.open("rb", buffering=0) as stream:
            stream.seek(start)
            done = 0
            while done < len(view):
                count = stream.readinto(view[done:])
                if not count:
                    raise ValueError(f"{file} ends before byte {start + len(view)}; download it again")
                done += count
    except OSError as error:
        raise ValueError(f"{file} cannot be read ({error}); download it again") from error


def _tensor(data: Tensor, info: TensorInfo) -> Tensor:
    """The first bytes of `data` as what they are."""
    data, dtype = data[: info.nbytes], DTYPES[info.dtype]
    if data.storage_offset() % dtype.itemsize:
        data = data.clone()
    return data.view(dtype).view(info.shape)


def _write(parameter: Tensor, piece: Piece, source: Tensor, row: int) -> None:
    target = parameter[piece.index][row : row + len(source)]
    if target.dtype == source.dtype == torch.float8_e4m3fn:  # as bytes: some devices move no FP8
        target, source = target.view(torch.uint8), source.view(torch.uint8)
    if piece.order is not None:
        source = source.index_select(0, piece.order.to(source.device))
    if piece.plus_one:
        source = source.to(target.dtype) + 1
    target.copy_(source.reshape(target.shape))
