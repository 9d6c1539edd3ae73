"""When kernels ran on the GPU, by the activity records of CUPTI, NVIDIA's profiling library that CUDA wheels of JAX bring."""

import ctypes
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

_CONCURRENT_KERNEL = 10  # CUPTI_ACTIVITY_KIND_CONCURRENT_KERNEL
_FORCED = 1  # CUPTI_ACTIVITY_FLAG_FLUSH_FORCED
_NO_MORE = 12  # CUPTI_ERROR_MAX_LIMIT_REACHED: the end of a buffer
_BUFFER = 1 << 20  # bytes
_REQUESTED = ctypes.CFUNCTYPE(
    None, ctypes.POINTER(ctypes.c_void_p), ctypes.POINTER(ctypes.c_size_t), ctypes.POINTER(ctypes.c_size_t)
)
_COMPLETED = ctypes.CFUNCTYPE(
    None, ctypes.c_void_p, ctypes.c_uint32, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_size_t
)

Span = tuple[int, int]  # begin and end, ns


class _Kernel(ctypes.Structure):
    """What all versions of CUpti_ActivityKernel begin with (cupti_activity.h of CUDA 13.0)."""

    _fields_ = [("kind", ctypes.c_uint32), ("_", ctypes.c_uint32 * 3), ("start", ctypes.c_uint64), ("end", ctypes.c_uint64)]  # fmt: skip


class Recorder:
    """Records kernels of this process, on all its streams. Raises RuntimeError where CUPTI does not work."""

    def __init__(self) -> None:
        name = _library()
        try:
            self._cupti = ctypes.CDLL(name)
        except OSError as error:
            raise RuntimeError(f"CUPTI does not load: {error}") from error
        self._buffers: dict[int, Any] = {}
        self._spans: list[Span] = []
        self._lost = 0
        # CUPTI keeps their addresses.
        self._callbacks = _REQUESTED(self._requested), _COMPLETED(self._completed)
        self._call("cuptiActivityRegisterCallbacks", *self._callbacks)

    def spans(self, run: Callable[[], Any]) -> list[Span]:
        """Those of the kernels of ``run()``, which returns when they have ended, by their begin."""
        self._call("cuptiActivityEnable", _CONCURRENT_KERNEL)
        self._call("cuptiActivityFlushAll", _FORCED)
        self._spans, self._lost = [], 0
        try:
            run()
        finally:
            self._call("cuptiActivityFlushAll", _FORCED)
            self._call("cuptiActivityDisable", _CONCURRENT_KERNEL)
        if self._lost:
            raise RuntimeError(f"CUPTI lost the records of {self._lost} kernels")
        return sorted(self._spans)

    def _call(self, function: str, *arguments: Any) -> None:
        if status := getattr(self._cupti, function)(*arguments):
            raise RuntimeError(f"{function} returned {status}")

    def _requested(self, buffer: Any, size: Any, most_records: Any) -> None:
        new = (ctypes.c_uint8 * _BUFFER)()
        address = ctypes.addressof(new)
        self._buffers[address] = new
        buffer[0], size[0], most_records[0] = address, _BUFFER, 0

    def _completed(self, context: int | None, stream: int, buffer: int, _: int, valid: int) -> None:
        record, dropped = ctypes.c_void_p(), ctypes.c_size_t()
        following = self._cupti.cuptiActivityGetNextRecord
        read = lambda: following(ctypes.c_void_p(buffer), ctypes.c_size_t(valid), ctypes.byref(record))
        while valid and not (status := read()):
            kernel = ctypes.cast(record, ctypes.POINTER(_Kernel))[0]
            if kernel.kind == _CONCURRENT_KERNEL:
                self._lost += kernel.end == 0
                self._spans.append((kernel.start, kernel.end))
        self._lost += bool(valid) and status != _NO_MORE
        if not self._cupti.cuptiActivityGetNumDroppedRecords(
            ctypes.c_void_p(context), ctypes.c_uint32(stream), ctypes.byref(dropped)
        ):
            self._lost += dropped.value
        del self._buffers[buffer]


def covered_us(spans: list[Span]) -> float:
    """Length of the union, in microseconds: what overlaps counts once, what lies between not at all."""
    total, until = 0, 0
    for begin, end in sorted(spans):
        total += max(0, end - max(begin, until))
        until = max(until, end)
    return total / 1e3


def _library() -> str:
    """CUPTI as this process has loaded it, else as a wheel holds it, else by its name. (Triton brings an older one of its own.)"""
    for line in Path("/proc/self/maps").read_text().splitlines():
        if "libcupti.so" in line and "/triton/" not in line:
            return line.split()[-1]
    for place in sys.path:
        if found := sorted(Path(place or ".", "nvidia").glob("**/libcupti.so.*")):
            return str(max(found, key=lambda path: [int(x) for x in path.name.split(".")[2:]]))
    return "libcupti.so"
