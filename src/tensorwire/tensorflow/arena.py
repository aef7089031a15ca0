"""``import tensorwire.tensorflow.arena``, before the first tensor, keeps TensorFlow's tensors in shared memory.

Workers on the same machine then read them in place, and sending 256 KiB or more copies nothing. The arena reserves as
many addresses as the machine has memory, and takes pages on first use.

Raises:
    Unsupported: There are tensors already, or the library cannot be compiled.
"""

from __future__ import annotations

import ctypes
import os

from tensorwire._native import Memory
from tensorwire.errors import Unsupported
from tensorwire.tensorflow.build import compiled
from tensorwire.tensorflow.operator_edges import set_tensor_memory

_memory = Memory.allocate(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"), reserve=False)
_library = ctypes.CDLL(str(compiled("arena")))
_library.tensorwire_arena.argtypes = [ctypes.c_void_p, ctypes.c_uint64]
_library.tensorwire_arena_used.restype = ctypes.c_uint64
if not _library.tensorwire_arena(_memory.address, _memory.nbytes):
    raise Unsupported(
        "TensorFlow has made tensors already: import tensorwire.tensorflow.arena first, right after tensorflow"
    )
set_tensor_memory(_memory)


def used() -> int:
    """Returns how many bytes of it its blocks take, used or kept for use again."""
    return int(_library.tensorwire_arena_used())
