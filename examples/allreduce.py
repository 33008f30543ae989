#!/usr/bin/env python3
"""Sums arrays over the ranks from Python, through lockstep's C interface and ctypes alone: NumPy arrays where NumPy is
installed, Python's own arrays otherwise.

  LIBLOCKSTEP=/opt/lockstep/lib/liblockstep_c.so lockstep launch -n 2 -- python3 allreduce.py
"""
import array
import ctypes
import os
import sys

try:
    import numpy
except ImportError:
    numpy = None

F32, F64, SUM, MAX = 0, 1, 0, 2  # lockstep_dtype and lockstep_op
ABI_VERSION = 1


class LockstepError(Exception):
    def __init__(self, code, text, of_peer):
        super().__init__(text)
        self.code, self.of_peer = code, of_peer


class Group:
    def __init__(self, library=os.environ.get("LIBLOCKSTEP", "liblockstep_c.so")):
        self.library = ctypes.CDLL(library)
        self.library.lockstep_last_error.restype = ctypes.c_char_p
        if self.library.lockstep_abi_version() < ABI_VERSION:
            raise ImportError(f"{library} is older than this script")
        self.handle = ctypes.c_void_p()
        self.call("lockstep_group_make", None, ctypes.byref(self.handle))
        self.rank, self.size = self.number("rank"), self.number("size")

    def call(self, function, *arguments):
        code = getattr(self.library, function)(*arguments)
        if code != 0:
            raise LockstepError(code, self.library.lockstep_last_error().decode(),
                                self.library.lockstep_last_error_is_of_peer() != 0)

    def number(self, name):
        number = ctypes.c_int()
        self.call(f"lockstep_group_{name}", self.handle, ctypes.byref(number))
        return number.value

    def all_reduce(self, values, op=SUM):
        """In place, of a writable buffer of f32 or f64: a NumPy array or an array.array."""
        view = memoryview(values)
        if view.format not in ("f", "d") or not view.c_contiguous:
            raise TypeError(f"a contiguous buffer of float32 or float64 is needed, not of '{view.format}'")
        if view.nbytes == 0:
            address = None
        else:
            address = ctypes.addressof(ctypes.c_char.from_buffer(values))
        self.call("lockstep_all_reduce", self.handle, ctypes.c_void_p(address),
                  ctypes.c_size_t(view.nbytes // view.itemsize), F32 if view.format == "f" else F64, op)

    def shutdown(self):
        self.call("lockstep_group_shutdown", self.handle)
        self.call("lockstep_group_destroy", self.handle)


def main():
    group = Group()
    if numpy is not None:
        gradients = numpy.full((100, 1000), group.rank + 1, dtype=numpy.float32)
    else:
        gradients = array.array("f", [group.rank + 1]) * 100_000
    group.all_reduce(gradients)
    slowest = array.array("d", [0.25 * group.rank])
    group.all_reduce(slowest, MAX)
    if group.rank == 0:
        first = gradients[0, 0] if numpy is not None else gradients[0]
        print(f"{group.size} ranks: {first:g}, the slowest: {slowest[0]:g}")
    group.shutdown()


if __name__ == "__main__":
    try:
        main()
    except LockstepError as error:
        if not error.of_peer:
            print(f"error: {error}", file=sys.stderr)
        sys.exit(error.code)
