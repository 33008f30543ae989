#!/usr/bin/env python3
"""Draws a data set: ten kinds of light shapes on dark ground, of many sizes, places and colours, a little turned, under
noise, as PNG files of 40 × 40 pixels.

    examples/draw_shapes.py DIR [--train 200] [--val 50]      # images of each class
    lockstep train resnet18-cifar --data images:DIR --image-size 32 --augment no

DIR/train and DIR/val get one folder per class, and the same images every time. It needs nothing but
Python's standard library.
"""
import argparse
import math
import pathlib
import random
import struct
import zlib

SIDE = 40


def star(x, y):
    """Five arms: the radius goes back and forth between the inner and the outer one."""
    part = math.atan2(y, x) / (2 * math.pi) * 10 % 2
    return math.hypot(x, y) < 1 - 0.6 * min(part, 2 - part)


# Whether a point belongs to the shape, which lies within ±1.
SHAPES = {
    "bars": lambda x, y: max(abs(x), abs(y)) < 0.9 and (x + 0.9) % 0.6 < 0.3,
    "board": lambda x, y: max(abs(x), abs(y)) < 0.9 and ((x + 0.9) % 0.9 < 0.45) == ((y + 0.9) % 0.9 < 0.45),
    "cross": lambda x, y: max(abs(x), abs(y)) < 1 and min(abs(x), abs(y)) < 0.25,
    "disc": lambda x, y: math.hypot(x, y) < 0.9,
    "ell": lambda x, y: max(abs(x), abs(y)) < 0.9 and (x < -0.3 or y < -0.3),
    "frame": lambda x, y: 0.5 < max(abs(x), abs(y)) < 0.85,
    "half": lambda x, y: math.hypot(x, y) < 1 and y > 0,
    "ring": lambda x, y: 0.55 < math.hypot(x, y) < 1,
    "star": star,
    "triangle": lambda x, y: y > -0.6 and 1.732 * abs(x) + y < 1,
}


def draw(inside, random_of):
    size = random_of.uniform(9, 15)
    x0, y0 = (SIDE / 2 + random_of.uniform(-4, 4) for _ in range(2))
    angle = random_of.uniform(-0.4, 0.4)
    cos, sin = math.cos(angle) / size, math.sin(angle) / size
    back, front = ([random_of.randrange(least, least + 120) for _ in range(3)] for least in (0, 136))
    noise = random_of.uniform(0, 20)
    rows = bytearray()
    for row in range(SIDE):
        rows.append(0)  # PNG: no filter
        for column in range(SIDE):
            dx, dy = column + 0.5 - x0, row + 0.5 - y0
            colour = front if inside(dx * cos + dy * sin, dy * cos - dx * sin) else back
            for channel in colour:
                rows.append(min(255, max(0, round(channel + random_of.gauss(0, noise)))))
    return bytes(rows)


def png(rows):
    def chunk(kind, data):
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", SIDE, SIDE, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")


def main():
    parser = argparse.ArgumentParser(description="Draws shapes as PNG files, in DIR/train and DIR/val.")
    parser.add_argument("directory", type=pathlib.Path, metavar="DIR")
    parser.add_argument("--train", type=int, default=200, help="images of each class to train on (200)")
    parser.add_argument("--val", type=int, default=50, help="images of each class to validate on (50)")
    options = parser.parse_args()
    for part, count in ("train", options.train), ("val", options.val):
        for name, inside in SHAPES.items():
            folder = options.directory / part / name
            folder.mkdir(parents=True, exist_ok=True)
            for i in range(count):
                (folder / f"{i:04}.png").write_bytes(png(draw(inside, random.Random(f"{part} {name} {i}"))))
    print(f"{len(SHAPES) * options.train} images in {options.directory}/train, "
          f"{len(SHAPES) * options.val} in {options.directory}/val")


main()
