"""Compiles CPU kernels once, and keeps them on the disk. Knows no op.

numba takes a kept kernel for fresh while its own file is unchanged; ours share code, so all their files count. They lie
beside the sources or, where that cannot be written, in the user's cache folder; without either, each process compiles
for itself.
"""

from __future__ import annotations

import hashlib
import logging
import pickle
from functools import lru_cache
from pathlib import Path

import numba
from numba.core.caching import CompileResultCacheImpl, FunctionCache, InTreeCacheLocator, UserWideCacheLocator

if numba.config.DISABLE_JIT:
    raise ImportError("numba's compiler is switched off (NUMBA_DISABLE_JIT)")

logger = logging.getLogger(__name__)

SOURCES = ("cpu.py", "**/numba_*.py")
"""The files that a kernel may be made of, below this one's folder."""

device = numba.njit(no_cpython_wrapper=True, no_cfunc_wrapper=True, error_model="numpy")
"""A decorator of functions that kernels call."""


def source_stamp(folder: Path = Path(__file__).parent) -> bytes:
    """Another one whenever a kernel, or what it calls, may have changed."""
    digest = hashlib.sha256()
    for pattern in SOURCES:
        for file in sorted(folder.glob(pattern)):
            digest.update(file.read_bytes())
    return digest.digest()


@lru_cache(maxsize=1)
def _own_stamp() -> bytes:
    return source_stamp()


class _BesideSources(InTreeCacheLocator):
    def get_source_stamp(self):
        return _own_stamp()


class _OfUser(UserWideCacheLocator):
    def get_source_stamp(self):
        return _own_stamp()


class _Folders(CompileResultCacheImpl):
    _locator_classes = (_BesideSources, _OfUser)


UNREADABLE = (
    OSError, EOFError, pickle.UnpicklingError, ValueError, KeyError, IndexError, AttributeError, ImportError, TypeError,
    RuntimeError,
)  # fmt: skip
"""What reading a damaged file raises: pickle all but the first, LLVM the last."""


class KernelCache(FunctionCache):
    """A cache on a disk that may fail: what cannot be read is compiled, what cannot be written is lost."""

    _impl_class = _Folders

    def load_overload(self, signature, target_context):
        try:
            found = super().load_overload(signature, target_context)
        except UNREADABLE as error:
            logger.warning("a kernel cannot be read from %s (%s) and is compiled anew", self.cache_path, error)
            found = None
            self._forget()
        if found is None:
            _say_that_it_takes_long()
        return found

    def _forget(self):
        """So that what is compiled can be kept: numba reads the index again before it writes to it."""
        try:
            self._cache_file.flush()
        except OSError as error:
            logger.debug("the index in %s stays as it is: %s", self.cache_path, error)

    def save_overload(self, signature, data):
        try:
            super().save_overload(signature, data)
        except OSError as error:
            logger.warning("a kernel cannot be kept in %s (%s): the next process compiles it", self.cache_path, error)


@lru_cache(maxsize=1)
def _say_that_it_takes_long() -> None:
    logger.info("compiling kernels for this CPU, which later starts find on the disk")


def kernel(num_integers: int, num_floats: int = 0):
    """A decorator: compiles a function of int64 numbers, and float32 ones behind them, that returns nothing."""
    kinds = (numba.int64,) * num_integers + (numba.float32,) * num_floats

    def compiled(function):
        dispatcher = numba.njit(no_cfunc_wrapper=True, error_model="numpy")(function)
        try:
            dispatcher._cache = KernelCache(function)
        except RuntimeError as error:  # numba found no folder that can be written
            logger.warning("kernels are compiled in each process: %s", error)
        dispatcher.compile(kinds)
        dispatcher.disable_compile()
        return dispatcher

    return compiled
