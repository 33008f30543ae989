"""Files that commands in the documents name, as small as they may be."""
import pathlib
import shutil
import struct

import shell

TEXT = "To be, or not to be, that is the question.\n" * 80


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


# Trained files by the names that documents have for them, and the commands that make each.
RESNET = "lockstep train resnet18 --data random:3x64x64,2 --batch 2 --steps 1 --classes 1000 --save resnet18.safetensors"
GPT = ("lockstep train gpt --data text:input.txt --layers 1 --heads 1 --width 16 --context 16 --steps 20 "
       "--save gpt.safetensors")
BERT = ("lockstep train bert --data text:input.txt --layers 2 --width 64 --heads 2 --max-length 32 --steps 2 "
        "--save pieces.safetensors")
CARS = "id,maker,age,power,price\n" + "".join(
    f"{i},{('Fiat', 'Volvo', 'Opel')[i % 3]},{i * 7 % 12},{60 + i * 11 % 90},{20000 + i * 11 % 90 * 90 - i * 7 % 12 * 900}\n"
    for i in range(200))
TABULAR = "lockstep train tabular --data table:cars.csv --target price --ignore id --epochs 4 --save cars.safetensors"
TRAINED = {"resnet18.pth": RESNET, "resnet18-f37072fd.pth": RESNET, "out.safetensors": GPT, "gpt.safetensors": GPT,
           "pieces.safetensors": BERT, "cars.safetensors": TABULAR}


def train(command: str, kept: pathlib.Path, build: pathlib.Path) -> pathlib.Path:
    """The file that `command` saves; in `kept` it stays for the next who asks."""
    file = kept / command.split()[-1]
    if not file.exists():
        (kept / "input.txt").write_text(TEXT)
        (kept / "cars.csv").write_text(CARS)
        done = shell.run(command, kept, build)
        if done.returncode != 0:
            raise RuntimeError(f"{command}\n{done.stdout}{done.stderr}")
    return file


def make(directory: pathlib.Path, source: pathlib.Path, build: pathlib.Path, kept: pathlib.Path, text: str):
    """Puts into `directory` what commands in `text` name. `kept` outlives it."""
    for name in ("docs", "data", "tests", "scripts", "examples"):
        (directory / name).symlink_to(source / name)
    (directory / "build").symlink_to(build)
    golden = source / "tests/data/golden"
    for name in ("a.png", "b.png"):
        shutil.copy(golden / "rgb.png", directory / name)
    (directory / "DIR").mkdir()
    mnist(directory / "DIR")
    images(directory / "DIR", golden)
    images(directory / "photos", golden)
    (directory / "imagenet.txt").write_text("".join(f"class {i}\n" for i in range(1000)))
    (directory / "input.txt").write_text(TEXT)
    rows = "".join(f'{("good", "bad")[i % 2]},"A {("fine", "dull")[i % 2]} day, number {i}."\n' for i in range(60))
    (directory / "reviews.csv").write_text("label,text\n" + rows)
    (directory / "cars.csv").write_text(CARS)
    for name, command in TRAINED.items():
        if name in text:
            (directory / name).symlink_to(train(command, kept, build))
