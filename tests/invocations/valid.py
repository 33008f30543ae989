"""Invocations that do what they should, on data of a few kilobytes, and the files that they name."""
import dataclasses
import gzip
import pathlib
import random
import shutil
import struct
import subprocess

WORDS = "now then here there good bad fine dull day night red blue of and to the".split()


@dataclasses.dataclass(frozen=True)
class Invocation:
    line: str  # words with blanks between; the first is the subcommand
    inputs: tuple = ()  # files and directories that it reads
    output: str = ""  # a file that it writes
    environment: dict = dataclasses.field(default_factory=dict)
    stdin: str = ""

    @property
    def words(self):
        return [word.replace("\u00b7", " ") for word in self.line.split()]


MLP = "mlp --hidden 8 --threads 1"
SHORT = "--steps 3 --batch 8"
GPT = "gpt --layers 1 --heads 1 --width 16 --context 8 --threads 1"
BERT = "bert --layers 1 --heads 2 --width 16 --max-length 16 --threads 1"
ONE_RANK = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29517"}

# What makes the files of weights and checkpoints.
PREPARE = [
    f"train {MLP} --data digits {SHORT} --save mlp.safetensors --checkpoint-dir kept --checkpoint-every 1 --keep 2",
    f"train {MLP} --data digits {SHORT} --save mlp.pt",
    f"train {GPT} --data text:prose.txt {SHORT} --save gpt.safetensors",
    f"train {BERT} --data csv:reviews.csv {SHORT} --save bert.safetensors",
    f"train {BERT} --data text:prose.txt {SHORT} --save masked.safetensors",
    f"train cnn --data images:photos --image-size 8 --threads 1 {SHORT} --save cnn.safetensors",
]

VALID = [
    Invocation(f"train {MLP} --data digits {SHORT} --save out.safetensors", output="out.safetensors"),
    Invocation(f"train {MLP} --data mnist:mnist {SHORT} --metrics m.jsonl --tail drop",
               ("mnist", "mnist/train-images-idx3-ubyte",
               "mnist/train-labels-idx1-ubyte"), "m.jsonl"),
    Invocation(f"train {MLP} --data cifar10:cifar {SHORT} --augment yes", ("cifar", "cifar/data_batch_1.bin",
               "cifar/test_batch.bin")),
    Invocation(f"train cnn --data images:photos --image-size 8 --threads 1 {SHORT} --workers 2",
               ("photos", "photos/cat", "photos/cat/0.png", "photos/dog/1.png")),
    Invocation(f"train {GPT} --data text:prose.txt {SHORT} --schedule cosine --warmup 1", ("prose.txt",)),
    Invocation(f"train {GPT} --data tokens:tokens.bin --classes 64 {SHORT}", ("tokens.bin",)),
    Invocation(f"train {BERT} --data csv:reviews.csv {SHORT} --clip-norm 1", ("reviews.csv",)),
    Invocation(f"train {BERT} --data csv:reviews.tsv --text text --label label {SHORT}", ("reviews.tsv",)),
    Invocation(f"train {BERT} --data texts:labelled {SHORT}",
               ("labelled", "labelled/train/bad", "labelled/train/good/1.txt",
               "labelled/test/bad/0.txt")),
    Invocation(f"train {BERT} --data text:prose.txt.gz {SHORT} --vocab-size 60", ("prose.txt.gz",)),
    Invocation(f"train lstm --width 8 --context 8 --threads 1 --data text:prose.txt {SHORT} --stateful", ("prose.txt",)),
    Invocation(f"train linear --data random:5,100 {SHORT} --optimizer sgd --lr 0.01 --momentum 0.9 --threads 1"),
    Invocation(f"train {MLP} --data digits {SHORT} --weights mlp.safetensors --freeze *bias", ("mlp.safetensors",)),
    Invocation(f"train {MLP} --data digits {SHORT} --weights mlp.pt", ("mlp.pt",)),
    Invocation(f"train {MLP} --data digits {SHORT} --checkpoint-dir ck --checkpoint-every 2 --resume auto", output="ck"),
    Invocation(f"train {MLP} --data digits --steps 5 --batch 8 --checkpoint-dir kept --resume auto",
               ("kept", "kept/step-0000000003", "kept/step-0000000003/card.json",
                "kept/step-0000000003/weights.safetensors")),
    Invocation(f"train {MLP} --config run.toml", ("run.toml",)),
    Invocation(f"train {MLP} --data digits {SHORT} --shards 2 --check-replicas 1", environment=ONE_RANK),
    Invocation(f"train {MLP} --data digits {SHORT} --trace trace.json --quiet", output="trace.json"),
    Invocation(f"train {MLP} --data digits {SHORT} --epochs 1 --eval-every 1 --ema 0.9 --comm-hook bf16".replace("--steps 3 ", "")),
    Invocation("eval mlp --data digits --weights mlp.safetensors --threads 1", ("mlp.safetensors",)),
    Invocation("eval mlp --data digits --weights mlp.pt --split test --metrics m.jsonl --threads 1", ("mlp.pt",),
               "m.jsonl"),
    Invocation("eval cnn --data images:photos --weights cnn.safetensors --threads 1",
               ("cnn.safetensors", "photos", "photos/dog/3.png")),
    Invocation("eval gpt --data text:prose.txt --weights gpt.safetensors --split all --threads 1",
               ("gpt.safetensors", "prose.txt")),
    Invocation("eval bert --data csv:reviews.csv --weights bert.safetensors --threads 1",
               ("bert.safetensors", "reviews.csv")),
    Invocation("eval bert --data texts:labelled --weights bert.safetensors --batch 4 --threads 1",
               ("bert.safetensors", "labelled", "labelled/test")),
    Invocation("infer mlp --weights mlp.safetensors --input random:2x1x8x8 --threads 1", ("mlp.safetensors",)),
    Invocation("infer cnn --weights cnn.safetensors --input photos/cat/0.png,photos/dog/1.png --top 2 --threads 1",
               ("cnn.safetensors", "photos/cat/0.png")),
    Invocation("infer cnn --weights cnn.safetensors --input photos/cat --class-names names.txt --json",
               ("cnn.safetensors", "photos/cat", "names.txt")),
    Invocation("infer gpt --weights gpt.safetensors --prompt now --tokens 4 --seed 3 --top-k 5", ("gpt.safetensors",)),
    Invocation("infer gpt --weights gpt.safetensors --input prose.txt --lines --tokens 2 --temperature 0",
               ("gpt.safetensors", "prose.txt")),
    Invocation("infer bert --weights bert.safetensors --input reviews.csv --lines --text text",
               ("bert.safetensors", "reviews.csv")),
    Invocation("infer bert --weights bert.safetensors --input -", ("bert.safetensors",), stdin="a good day\n"),
    Invocation("infer bert --weights masked.safetensors --prompt now\u00b7[MASK]\u00b7then --top 3",
               ("masked.safetensors",)),
    Invocation("export onnx cnn --weights cnn.safetensors --class-names names.txt --output out.onnx",
               ("cnn.safetensors", "names.txt"), "out.onnx"),
    Invocation("export onnx bert --weights bert.safetensors --output out.onnx", ("bert.safetensors",), "out.onnx"),
    Invocation(f"launch -n 2 -- lockstep train {MLP} --data digits {SHORT}"),
    Invocation(f"launch -n 2 --bind-to none --log-dir logs --no-prefix -- lockstep train {MLP} --data random:1x8x8,100 {SHORT}",
               output="logs"),
    Invocation(f"launch -n 2 --max-restarts 1 -- lockstep train {MLP} --data digits {SHORT} --checkpoint-dir ck --resume auto",
               output="ck"),
    Invocation("launch -n 2 -- lockstep eval mlp --data digits --weights mlp.safetensors --threads 1",
               ("mlp.safetensors",)),
    Invocation("launch --np 1 --grace-seconds 2 -- sh -c exit\u00b70"),
    Invocation("launch --hostfile hosts -n 1 -- lockstep bench allreduce --min 4 --max 64", ("hosts",)),
    Invocation("checkpoint show kept", ("kept", "kept/step-0000000003/card.json")),
    Invocation("checkpoint verify kept", ("kept", "kept/step-0000000003/card.json",
                                          "kept/step-0000000003/weights.safetensors")),
    Invocation("bench step mlp --hidden 8 --steps 2 --batch 4 --threads 1"),
    Invocation("bench allreduce --min 4 --max 64"),
    Invocation("bench send-recv --pattern ring --memory own --min 4 --max 64"),
    Invocation("doctor --json"),
    Invocation("devices --json"),
    Invocation("version"),
]


def idx(dimensions, data):
    return bytes([0, 0, 8, len(dimensions)]) + b"".join(struct.pack(">I", n) for n in dimensions) + data


def make_files(directory, source):
    drawn = random.Random(1)
    (directory / "mnist").mkdir()
    for part, count in ("train", 64), ("t10k", 16):
        (directory / "mnist" / f"{part}-images-idx3-ubyte").write_bytes(idx([count, 6, 6], drawn.randbytes(count * 36)))
        (directory / "mnist" / f"{part}-labels-idx1-ubyte").write_bytes(idx([count], bytes(i % 10 for i in range(count))))
    (directory / "cifar").mkdir()
    for name in [f"data_batch_{i}.bin" for i in range(1, 6)] + ["test_batch.bin"]:
        (directory / "cifar" / name).write_bytes(b"".join(bytes([i]) + drawn.randbytes(3072) for i in range(10)))
    golden = source / "tests/data/golden"
    for i in range(20):
        folder = directory / "photos" / ("cat", "dog")[i % 2]
        folder.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(golden / ("rgb.png", "grey.png")[i % 2], folder / f"{i}.png")
    prose = "".join(" ".join(drawn.choices(WORDS, k=6)) + ".\n" for _ in range(30))
    (directory / "prose.txt").write_text(prose)
    (directory / "prose.txt.gz").write_bytes(gzip.compress(prose.encode(), mtime=0))
    (directory / "tokens.bin").write_bytes(struct.pack("<600H", *(drawn.randrange(64) for _ in range(600))))
    rows = [(("good", "bad")[i % 2], f"a {('fine', 'dull')[i % 2]} day, {' '.join(drawn.choices(WORDS, k=3))}")
            for i in range(30)]
    (directory / "reviews.csv").write_text("label,text\n" + "".join(f'{label},"{text}"\n' for label, text in rows))
    (directory / "reviews.tsv").write_text("label\ttext\n" + "".join(f"{label}\t{text}\n" for label, text in rows))
    for part in ("train", "test"):
        for i in range(8):
            folder = directory / "labelled" / part / ("bad", "good")[i % 2]
            folder.mkdir(parents=True, exist_ok=True)
            (folder / f"{i}.txt").write_text(" ".join(drawn.choices(WORDS, k=8)) + "\n")
    (directory / "names.txt").write_text("cat\ndog\n")
    (directory / "hosts").write_text("localhost slots=1\n")
    (directory / "run.toml").write_text('data = "digits"\nsteps = 3\nbatch = 8\nlr = 0.01\n')


def prepare(directory, source, program, environment):
    """All files that VALID names."""
    make_files(directory, source)
    for line in PREPARE:
        subprocess.run([program, *line.split(), "--quiet"], cwd=directory, env=environment, check=True,
                       stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, timeout=120)
