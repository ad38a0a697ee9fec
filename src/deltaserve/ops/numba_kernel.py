"""Compiles CPU kernels once, and keeps them on the disk. Knows no op.

numba takes a kept kernel for fresh while its own file is unchanged; ours share code, so all their files count. A folder
that cannot be written is no error: then each process compiles for itself.
"""

from __future__ import annotations

import hashlib
import logging
from functools import lru_cache
from pathlib import Path

import numba
from numba.core import caching

logger = logging.getLogger(__name__)

PARTS = "**/numba_*.py"
"""The files that a kernel may be made of, below this one's folder."""

device = numba.njit(no_cpython_wrapper=True, no_cfunc_wrapper=True)
"""A decorator of functions that kernels call."""


@lru_cache(maxsize=1)
def source_stamp() -> bytes:
    """Another one whenever a kernel or what it calls may have changed."""
    digest = hashlib.sha256()
    for file in sorted(Path(__file__).parent.glob(PARTS)):
        digest.update(file.read_bytes())
    return digest.digest()


class _Stamped:
    def get_source_stamp(self):
        return source_stamp()


class _InTree(_Stamped, caching.InTreeCacheLocator):
    pass


class _UserWide(_Stamped, caching.UserWideCacheLocator):
    pass


class _Implementation(caching.CompileResultCacheImpl):
    _locator_classes = [_InTree, _UserWide]


class _Cache(caching.FunctionCache):
    """A cache whose disk may fail: what cannot be read is compiled, what cannot be written is lost."""

    _impl_class = _Implementation

    def load_overload(self, signature, target_context):
        try:
            return super().load_overload(signature, target_context)
        except (OSError, EOFError) as error:
            logger.warning("a kernel cannot be read from %s (%s): it is compiled anew", self.cache_path, error)
            return None

    def save_overload(self, signature, data):
        try:
            super().save_overload(signature, data)
        except OSError as error:
            logger.warning("a kernel cannot be kept in %s (%s)", self.cache_path, error)


def kernel(num_integers: int, num_floats: int = 0):
    """A decorator: compiles a function of int64, the last `num_floats` parameters float32, that returns nothing."""
    kinds = (numba.int64,) * num_integers + (numba.float32,) * num_floats

    def compiled(function):
        dispatcher = numba.njit(no_cfunc_wrapper=True)(function)
        try:
            dispatcher._cache = _Cache(function)
        except RuntimeError as error:  # no folder can be written
            logger.warning("kernels are not kept: %s", error)
        dispatcher.compile(kinds)
        dispatcher.disable_compile()
        if not dispatcher.stats.cache_hits:
            logger.info("compiled %s", function.__qualname__)
        return dispatcher

    return compiled
