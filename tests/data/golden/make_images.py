#!/usr/bin/env python3
"""Writes the images in this directory, and in golden.json what Pillow and torchvision make of them.

    python3 tests/data/golden/make_images.py      # needs Pillow, torchvision and libturbojpeg.so.0

The source pixels come from a formula that tests/data/golden.h has too.
"""
import ctypes
import io
import json
import pathlib
import struct
import zlib

import PIL
import torchvision
from PIL import Image
from torchvision import transforms
from torchvision.transforms import autoaugment

HERE = pathlib.Path(__file__).parent


def noise(x, y, c):
    """A byte that is as good as random."""
    v = (x * 73856093 ^ y * 19349663 ^ (c + 1) * 83492791) & 0xFFFFFFFF
    v = (v ^ v >> 13) * 0x5BD1E995 & 0xFFFFFFFF
    return (v ^ v >> 15) & 0xFF


def smooth(x, y, c):
    """A byte that changes slowly, as photographs do."""
    return (x * (5 + c) + y * (7 - c) + noise(x, y, c) // 16) % 256


def picture(width, height, value):
    image = Image.new("RGB", (width, height))
    image.putdata([tuple(value(x, y, c) for c in range(3)) for y in range(height) for x in range(width)])
    return image


def numbers(image):
    return list(image.convert("RGB").tobytes())


def png(width, height, depth, colour, rows, interlaced=False, extra=()):
    """`rows` are packed scanlines, or with Adam7 those of the seven passes one after the other."""
    def chunk(kind, data):
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
    header = struct.pack(">IIBBBBB", width, height, depth, colour, 0, 0, int(interlaced))
    return (b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + b"".join(chunk(k, d) for k, d in extra) +
            chunk(b"IDAT", zlib.compress(b"".join(b"\0" + row for row in rows), 9)) + chunk(b"IEND", b""))


def adam7(width, height, pixel):
    rows = []
    for x0, y0, dx, dy in ((0, 0, 8, 8), (4, 0, 8, 8), (0, 4, 4, 8), (2, 0, 4, 4), (0, 2, 2, 4), (1, 0, 2, 2), (0, 1, 1, 2)):
        for y in range(y0, height, dy):
            row = b"".join(pixel(x, y) for x in range(x0, width, dx))
            if row:
                rows.append(row)
    return rows


def ycck(width, height):
    """A JPEG of four channels as printers want them; Pillow writes none."""
    library = ctypes.CDLL("libturbojpeg.so.0")
    library.tjInitCompress.restype = ctypes.c_void_p
    pixels = bytes(smooth(x, y, c) for y in range(height) for x in range(width) for c in range(4))
    out, size = ctypes.c_void_p(None), ctypes.c_ulong(0)
    handle = ctypes.c_void_p(library.tjInitCompress())
    TJPF_CMYK, TJSAMP_444 = 11, 0
    assert library.tjCompress2(handle, pixels, width, 4 * width, height, TJPF_CMYK, ctypes.byref(out), ctypes.byref(size),
                               TJSAMP_444, 90, 0) == 0
    return ctypes.string_at(out, size.value)


def jpeg(image, **options):
    stream = io.BytesIO()
    image.save(stream, "JPEG", **options)
    return stream.getvalue()


def files():
    w, h = 27, 18
    colour = picture(w, h, smooth)
    yield "rgb420.jpg", jpeg(colour, quality=90)
    yield "rgb444.jpg", jpeg(colour, quality=90, subsampling=0)
    yield "progressive.jpg", jpeg(colour, quality=80, progressive=True)
    yield "grey.jpg", jpeg(colour.convert("L"), quality=90)
    yield "cmyk.jpg", jpeg(colour.convert("CMYK"), quality=90)
    yield "ycck.jpg", ycck(w, h)
    w, h = 13, 11
    rgb = lambda x, y: bytes(noise(x, y, c) for c in range(3))
    scan = lambda pixel: [b"".join(pixel(x, y) for x in range(w)) for y in range(h)]
    yield "rgb.png", png(w, h, 8, 2, scan(rgb))
    yield "rgba.png", png(w, h, 8, 6, scan(lambda x, y: rgb(x, y) + bytes([noise(x, y, 3)])))
    yield "grey.png", png(w, h, 8, 0, scan(lambda x, y: bytes([noise(x, y, 0)])))
    yield "grey_alpha.png", png(w, h, 8, 4, scan(lambda x, y: bytes([noise(x, y, 0), noise(x, y, 1)])))
    yield "rgb16.png", png(w, h, 16, 2, scan(lambda x, y: b"".join(bytes([noise(x, y, c), noise(y, x, c)]) for c in range(3))))
    yield "grey16.png", png(w, h, 16, 0, scan(lambda x, y: bytes([noise(x, y, 0), noise(y, x, 0)])))
    yield "dark16.png", png(w, h, 16, 0, scan(lambda x, y: bytes([noise(x, y, 0) & 1, noise(y, x, 0)])))
    yield "dark16_interlaced.png", png(w, h, 16, 0, adam7(w, h, lambda x, y: bytes([noise(x, y, 0) & 1, noise(y, x, 0)])),
                                       interlaced=True)
    yield "grey_alpha16.png", png(w, h, 16, 4, scan(lambda x, y: bytes(noise(x, y, c) for c in range(4))))
    palette = b"".join(bytes([noise(i, 5, c) for c in range(3)]) for i in range(16))
    nibbles = [bytes(noise(2 * x, y, 0) & 15 | (noise(2 * x + 1, y, 0) & 15) << 4 for x in range((w + 1) // 2)) for y in range(h)]
    yield "palette4.png", png(w, h, 4, 3, nibbles, extra=[(b"PLTE", palette), (b"tRNS", bytes([0, 128, 255]))])
    yield "bits.png", png(w, h, 1, 0, [bytes(noise(x, y, 0) for x in range((w + 7) // 8)) for y in range(h)])
    yield "interlaced.png", png(w, h, 8, 2, adam7(w, h, rgb), interlaced=True)
    yield "transparent.png", png(w, h, 8, 2, scan(rgb), extra=[(b"tRNS", struct.pack(">HHH", *rgb(2, 2)))])


def resized():
    image = picture(37, 29, noise)
    for box, size in (((0, 0, 37, 29), (16, 12)), ((0, 0, 37, 29), (45, 40)), ((0, 0, 37, 29), (37, 29)),
                      ((0, 0, 37, 29), (5, 40)), ((3, 7, 30, 20), (9, 9)), ((10, 2, 14, 29), (24, 6)),
                      ((36, 28, 37, 29), (3, 2)), ((0, 0, 37, 29), (1, 1)), ((1, 1, 36, 28), (36, 26)),
                      ((0, 0, 37, 29), (37, 11)), ((0, 0, 37, 29), (13, 29)), ((5, 0, 6, 29), (70, 3)), ((0, 4, 37, 27), (61, 83))):
        # Pillow's order until 12, whatever the sizes: first the width, then the height.
        result = image.crop(box)
        for step in ((size[0], result.height), size):
            result = result.resize(step, Image.Resampling.BILINEAR)
        yield {"box": [box[0], box[1], box[2] - box[0], box[3] - box[1]], "size": size, "pixels": numbers(result)}


def evaluated():
    for width, height, size in ((75, 50, 28), (50, 75, 28), (41, 41, 21), (20, 30, 24), (101, 37, 13)):
        change = transforms.Compose([transforms.Resize(256 * size // 224), transforms.CenterCrop(size)])
        yield {"image": [width, height], "size": size, "pixels": numbers(change(picture(width, height, noise)))}


def dim(x, y, c):
    """Noise of a part of all values, another one in each channel."""
    return noise(x, y, c) // 2 + 20 + 10 * c


def augmented():
    """Of each of RandAugment's operations, the sums of what it makes of an image at each magnitude, then at each negative one."""
    policy = transforms.RandAugment()
    for width, height in ((37, 29), (96, 64), (32, 32), (5, 2), (2, 7), (1, 1)):
        image = picture(width, height, dim)
        for name, (magnitudes, signed) in policy._augmentation_space(31, (height, width)).items():
            steps = [float(m) for m in magnitudes] if magnitudes.ndim else [0.0]
            if signed:
                steps += [-m for m in steps]
            sums = [zlib.crc32(autoaugment._apply_op(image, name, m, transforms.InterpolationMode.NEAREST, None).tobytes())
                    for m in steps]
            yield {"image": [width, height], "operation": name, "magnitudes": steps, "sums": sums}


def main():
    decoded = {}
    for name, content in files():
        (HERE / name).write_bytes(content)
        image = Image.open(io.BytesIO(content))
        image.load()
        decoded[name] = {"size": image.size, "mode": image.mode, "pixels": numbers(image)}
    golden = {"made by": f"Pillow {PIL.__version__}, torchvision {torchvision.__version__}", "decoded": decoded,
              "resized": list(resized()), "evaluated": list(evaluated()), "augmented": list(augmented())}
    (HERE / "golden.json").write_text(json.dumps(golden, separators=(",", ":")).replace('},"', '},\n"').replace("},{", "},\n{") + "\n")


main()
