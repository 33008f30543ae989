"""Files that commands in the documents name, as small as they may be."""
import pathlib
import shutil
import struct


def idx(dimensions: list, data: bytes) -> bytes:
    return bytes([0, 0, 8, len(dimensions)]) + b"".join(struct.pack(">I", n) for n in dimensions) + data


def mnist(directory: pathlib.Path):
    for part, count in ("train", 512), ("t10k", 64):
        pixels = bytes(i * 7 % 251 for i in range(count * 28 * 28))
        (directory / f"{part}-images-idx3-ubyte").write_bytes(idx([count, 28, 28], pixels))
        (directory / f"{part}-labels-idx1-ubyte").write_bytes(idx([count], bytes(i % 10 for i in range(count))))


def images(directory: pathlib.Path, golden: pathlib.Path):
    for i in range(12):
        folder = directory / ("cat", "dog")[i % 2]
        folder.mkdir(parents=True, exist_ok=True)
        shutil.copy(golden / "rgb.png", folder / f"{i}.png")


# Commands that make a file, by its name; run where a document names it and has not made it itself.
TRAINED = {
    "resnet18.pth": "lockstep train resnet18 --data random:3x64x64,2 --batch 2 --steps 1 --classes 1000 --save resnet18.pth",
    "resnet18-f37072fd.pth": "lockstep train resnet18 --data random:3x64x64,2 --batch 2 --steps 1 --classes 1000 "
                             "--save resnet18-f37072fd.pth",
    "out.safetensors": "lockstep train gpt --data text:input.txt --layers 1 --heads 1 --width 16 --context 16 --save out.safetensors",
}


def make(directory: pathlib.Path, source: pathlib.Path, build: pathlib.Path, text: str) -> list:
    """Puts into `directory` what `text`, a document, names. Returns the commands that make the rest."""
    golden = source / "tests/data/golden"
    for name in ("docs", "data", "tests", "scripts"):
        (directory / name).symlink_to(source / name)
    (directory / "examples").symlink_to(source / "examples")
    (directory / "build").symlink_to(build)
    for name in ("a.png", "b.png"):
        shutil.copy(golden / "rgb.png", directory / name)
    (directory / "DIR").mkdir()
    mnist(directory / "DIR")
    images(directory / "DIR", golden)
    images(directory / "photos", golden)
    (directory / "imagenet.txt").write_text("".join(f"class {i}\n" for i in range(1000)))
    (directory / "input.txt").write_text("To be, or not to be, that is the question.\n" * 40)
    return [command for name, command in TRAINED.items() if name in text]
