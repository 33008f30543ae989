"""Numbers that Python and C++ make alike, so that golden files need not hold them: this file and counter.h.

A name has a key, FNV-1a of its UTF-8 bytes (64 bits). Its word i is SplitMix64's: mix(key + (i + 1) · gamma). From words:

    uniform   (the upper 24 bits − 2^23) · 2^(exponent − 23), so in ±2^exponent; away from 0 by `apart`, plus `centre`;
              rounded to f32
    sign      −1 where the lowest bit is set, else 1
    below     word mod bound

What a parameter starts as follows from its name and shape, in PyTorch's layout (`initial`).
"""
import numpy as np

GAMMA = np.uint64(0x9E3779B97F4A7C15)


def key_of(name: str) -> int:
    key = 0xCBF29CE484222325
    for byte in name.encode():
        key = (key ^ byte) * 0x100000001B3 & 0xFFFFFFFFFFFFFFFF
    return key


def words(name: str, count: int) -> np.ndarray:
    with np.errstate(over="ignore"):
        x = np.uint64(key_of(name)) + (np.arange(count, dtype=np.uint64) + np.uint64(1)) * GAMMA
        x = (x ^ x >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ x >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
        return x ^ x >> np.uint64(31)


def count_of(shape) -> int:
    return int(np.prod(shape, dtype=np.int64))


def uniform(name: str, shape, exponent: int = 0, centre: float = 0.0, apart: float = 0.0) -> np.ndarray:
    whole = (words(name, count_of(shape)) >> np.uint64(40)).astype(np.int64) - (1 << 23)
    values = np.ldexp(whole.astype(np.float64), exponent - 23)
    return (values + np.copysign(apart, values) + centre).astype(np.float32).reshape(shape)


def signs(name: str, count: int) -> np.ndarray:
    return 1.0 - 2.0 * (words(name, count) & np.uint64(1)).astype(np.float64)


def below(name: str, shape, bound: int) -> np.ndarray:
    return (words(name, count_of(shape)) % np.uint64(bound)).astype(np.int64).reshape(shape)


def exponent_for(shape) -> int:
    """The largest e with 4^e · (numbers of one output) ≤ 4: products then keep about the size of what goes in."""
    inputs, e = count_of(shape[1:]), 1
    while e > -32 and 4.0**e * inputs > 4:
        e -= 1
    return e


def initial(case: str, name: str, shape, norm_bias: float = 0.0) -> np.ndarray:
    """Of a parameter or a buffer. norm_bias: how far the biases of batch norms are from 0; MobileNet's are above it, on
    the way to the middle of ReLU6: of a channel of zeros a depthwise convolution has no variance."""
    key = f"{case}/{name}"
    if len(shape) > 1:
        return uniform(key, shape, exponent_for(shape))
    if name.endswith("weight") or name.endswith("running_var"):
        return uniform(key, shape, -1, 1.0)
    if name.startswith("features.") and name.endswith("bias"):
        return uniform(key, shape, -2, norm_bias)
    of_norm = "bn" in name or ".downsample.1." in name
    return uniform(key, shape, -2, apart=norm_bias if of_norm and name.endswith("bias") else 0.0)
