"""What is altered of an invocation: its words, the files that it reads, its environment, its descriptors and limits.

A mutation takes a Case and random numbers. It alters the case and adds what it has done to `case.done`, or returns False
where there is nothing to alter. Case.expects is the strictest thing that is known of the result: MUST_FAIL, SAME (as the
unaltered one, or refused), or anything that is documented.
"""
import contextlib
import dataclasses
import gzip
import os
import pathlib
import resource
import shutil

ANYTHING, SAME, MUST_FAIL = "anything documented", "the same, or refused", "refused"

MODELS = ("linear mlp cnn resnet18 resnet18-cifar vgg11 gpt gpt2 bert bert-base rnn lstm gru").split()
SMALL_MODELS = "linear mlp cnn gpt bert rnn lstm gru".split()
DATA = ("digits random:5,40 random:1x8x8,40 random:tokens,64 mnist:mnist cifar10:cifar cifar100:cifar images:photos text:prose.txt "
        "text:prose.txt.gz tokens:tokens.bin csv:reviews.csv csv:reviews.tsv texts:labelled images:labelled texts:photos "
        "text:mlp.safetensors mnist:cifar csv:prose.txt tokens:prose.txt images:. text: digits:x random: random:0,9 "
        "random:5,1 random:1x1x1,40 images:photos/cat nothing:here").split()
BAD_NUMBERS = ["-1", "0", "1e400", "nan", "inf", "-inf", "abc", "", " ", "1e", "0x10", "1,5", "3s", "2GB", "10%", "1_000", "\u0663",
               "9223372036854775807", "18446744073709551616", "99999999999999999999999", "-9223372036854775808", "1.5", "1e-400",
               "--", "-", "+1", "1 2", "1;2", "\u00b5", "\U0001f600", "%s%n", "{}", "$HOME", "\x1b[31m", "a\nb", "None", "true"]
BAD_WORDS = ["", " ", "x", "-", "--", "---", "\u00fc", "\U0001f600", "a b", "\n", "\x1b[2J", "{}", "%s", "x" * 5000, "/proc", ".",
             "/dev/null", "/dev/full", "/dev/zero", "none.such", "nan", "-1", "0", "auto", "yes", "no", "~/x", "a,b", ",", ":", "=", "*"]
BAD_BYTES = [b"\xff\xfe", b"caf\xe9", b"\xed\xa0\x80"]


@dataclasses.dataclass
class Case:
    words: list  # bytes where they are not UTF-8
    inputs: tuple
    output: str
    environment: dict
    directory: pathlib.Path
    stdin: object = b""  # bytes, or "closed", "directory"
    stdout: str = ""  # "closed", "full", "gone"
    stderr: str = ""
    limits: list = dataclasses.field(default_factory=list)
    user: int = 0  # others than 0: whose process it is
    umask: int = 0o022
    work: str = "."
    expects: str = ANYTHING
    done: list = dataclasses.field(default_factory=list)
    flags: dict = dataclasses.field(default_factory=dict)  # of each subcommand: name → placeholder, "" of those without

    def did(self, what, expects=ANYTHING):
        # Of two mutations nothing is known but what both allow.
        self.expects = expects if not self.done else ANYTHING if expects != self.expects else expects
        self.done.append(what)


def subcommand(case):
    return case.words[0] if case.words and isinstance(case.words[0], str) else ""


def own_flags(case):
    """The flags of its subcommand; of launch, those of the program too come after the launcher's."""
    return case.flags.get(subcommand(case), {})


def places_of_flags(case, with_value=False):
    found = []
    for i, word in enumerate(case.words):
        if isinstance(word, str) and word.startswith("--") and len(word) > 2:
            takes = i + 1 < len(case.words) and not str(case.words[i + 1]).startswith("--")
            if takes or not with_value:
                found.append((i, takes))
    return found


# ---- words


def drop_flag(case, drawn):
    places = places_of_flags(case)
    if not places:
        return False
    i, takes = drawn.choice(places)
    case.did(f"without {case.words[i]}")
    del case.words[i:i + 1 + takes]


def drop_value(case, drawn):
    places = places_of_flags(case, with_value=True)
    if not places:
        return False
    i, _ = drawn.choice(places)
    case.did(f"{case.words[i]} without its value", MUST_FAIL)
    del case.words[i + 1]


def double_flag(case, drawn):
    places = [(i, takes) for i, takes in places_of_flags(case) if case.words[i] != "--export"]
    if not places:
        return False
    i, takes = drawn.choice(places)
    case.did(f"{case.words[i]} twice", MUST_FAIL)
    case.words[i:i] = case.words[i:i + 1 + takes]


def misspell(case, drawn):
    places = places_of_flags(case)
    if not places:
        return False
    i, _ = drawn.choice(places)
    word = case.words[i]
    at = drawn.randrange(2, len(word))
    other = drawn.choice([word[:at] + "q" + word[at:], word[:at] + "q" + word[at + 1:], word + "s", word[:2] + "\u00e9" + word[2:], word + "x"])
    known = {name for flags in case.flags.values() for name in flags}
    if other in known:
        return False
    case.did(f"{word} misspelt as {other}", MUST_FAIL)
    case.words[i] = other


def other_spelling(case, drawn):
    places = places_of_flags(case)
    if not places:
        return False
    i, takes = drawn.choice(places)
    word = case.words[i]
    if takes and drawn.random() < 0.5:
        case.did(f"{word}=VALUE", SAME)
        case.words[i:i + 2] = [f"{word}={case.words[i + 1]}"]
    else:
        case.did(f"{word} with _", SAME)
        case.words[i] = "--" + word[2:].replace("-", "_")


def bad_value(case, drawn):
    places = places_of_flags(case, with_value=True)
    if not places:
        return False
    i, _ = drawn.choice(places)
    value = drawn.choice(BAD_NUMBERS + BAD_WORDS)
    case.did(f"{case.words[i]} {value[:40]!r} in place of {case.words[i + 1]!r}")
    case.words[i + 1] = value


def typed_value(drawn, placeholder):
    """One that the placeholder allows, mostly."""
    if "|" in placeholder and placeholder.replace("|", "").replace("-", "").replace("_", "").isalnum():
        return drawn.choice(placeholder.split("|"))
    if drawn.random() < 0.3:
        return drawn.choice(BAD_NUMBERS + BAD_WORDS)
    if placeholder in ("N", "B", "E", "K", "S", "V", "STEPS", "BYTES", "T", "A", "G", "M"):
        return drawn.choice(["0", "1", "2", "3", "7", "64", "1000"])
    if placeholder in ("X", "P", "D", "LR"):
        return drawn.choice(["0", "0.5", "1", "0.001", "2.5"])
    if "FILE" in placeholder:
        return drawn.choice(["prose.txt", "new.file", "mlp.safetensors", "photos", "none/x", "names.txt", "tokens.bin"])
    if "DIR" in placeholder:
        return drawn.choice(["kept", "photos", "new", "prose.txt", "none/x", "."])
    return drawn.choice(["auto", "1", "cpu", "none", "text", "0.5,0.9", "label", "1:2", *BAD_WORDS])


def add_flag(case, drawn):
    """One of its own, which may have no effect: then it is to be refused."""
    flags = own_flags(case)
    end = case.words.index("--") if "--" in case.words else len(case.words)
    names = sorted(set(flags) - set(map(str, case.words)) - {"--help", "--config"})
    if not names:
        return False
    name = drawn.choice(names)
    added = [name] + ([typed_value(drawn, flags[name])] if flags[name] else [])
    case.did("with " + " ".join(word[:40] for word in added))
    case.words[end:end] = added


def add_flag_of_another(case, drawn):
    mine = own_flags(case)
    others = sorted({name for flags in case.flags.values() for name in flags} - set(mine))
    if not others or not mine:
        return False
    name = drawn.choice(others)
    end = case.words.index("--") if "--" in case.words else len(case.words)
    case.did(f"with another command's {name}")
    case.words[end:end] = [name] + (["1"] if drawn.random() < 0.7 else [])


def shuffle(case, drawn):
    """Flags in another order."""
    end = case.words.index("--") if "--" in case.words else len(case.words)
    groups, i = [], 1
    while i < end:
        takes = str(case.words[i]).startswith("--") and i + 1 < end and not str(case.words[i + 1]).startswith("--")
        if takes and own_flags(case).get(case.words[i], "x") == "":
            takes = False
        groups.append(case.words[i:i + 1 + takes])
        i += 1 + takes
    if len(groups) < 3:
        return False
    positional = [group for group in groups if not str(group[0]).startswith("-")]
    if len(positional) > 1:
        return False
    drawn.shuffle(groups)
    case.did("in another order", SAME)
    case.words[1:end] = [word for group in groups for word in group]


def add_word(case, drawn):
    at = drawn.randrange(len(case.words) + 1)
    word = drawn.choice(BAD_WORDS + BAD_BYTES)
    case.did(f"with the word {word[:40]!r} at {at}")
    case.words.insert(at, word)


def drop_word(case, drawn):
    at = drawn.randrange(len(case.words))
    case.did(f"without the word {case.words[at]!r}")
    del case.words[at]


def spoil_word(case, drawn):
    at = drawn.randrange(len(case.words))
    word = case.words[at]
    if not isinstance(word, str):
        return False
    place = drawn.randrange(len(word) + 1)
    piece = drawn.choice([b"\xff", "\u00e9".encode(), b"\n", b" ", b"'", b"\\", b"=", b"\x7f", "\u202e".encode(), b"-", b":", b",", b"0"])
    case.words[at] = word[:place].encode() + piece + word[place:].encode()
    case.did(f"{word!r} as {case.words[at]!r}")


def other_model(case, drawn):
    if subcommand(case) not in ("train", "eval", "infer") or len(case.words) < 2:
        return False
    model = drawn.choice(SMALL_MODELS + (MODELS if drawn.random() < 0.1 else []))
    case.did(f"model {model}")
    case.words[1] = model


def other_data(case, drawn):
    if "--data" not in case.words[:-1]:
        return False
    data = drawn.choice(DATA)
    case.did(f"--data {data}")
    case.words[case.words.index("--data") + 1] = data


def other_subcommand(case, drawn):
    other = drawn.choice(["train", "eval", "infer", "bench", "checkpoint", "devices", "version", "inspect", "launch", "Train", "tain",
                          "help", "--help", "-h", "--version"])
    case.did(f"subcommand {other}")
    case.words[0] = other


# ---- files


def target_of(case, drawn, kind):
    # None that another mutation has made endless.
    names = [name for name in case.inputs if getattr(case.directory / name, kind)() and (case.directory / name).stat().st_size < 1 << 20]
    return case.directory / drawn.choice(names) if names else None


def spoil_file(case, drawn):
    path = target_of(case, drawn, "is_file")
    if path is None:
        return False
    data = path.read_bytes()
    name = path.relative_to(case.directory)
    is_text = path.suffix in (".txt", ".csv", ".tsv", ".toml", "") and b"\0" not in data and path.suffix != ".gz"

    def write(what, new, expects=ANYTHING):
        path.write_bytes(new)
        case.did(f"{name}: {what}", expects)

    if not data:
        return False
    at = drawn.randrange(len(data))
    ways = {
        "cut": lambda: write(f"cut at byte {at}", data[:at]),
        "empty": lambda: write("empty", b"", MUST_FAIL),
        "flipped": lambda: write(f"byte {at} is another one", data[:at] + bytes([data[at] ^ drawn.randrange(1, 256)]) + data[at + 1:]),
        "noise": lambda: write("random bytes", drawn.randbytes(len(data))),
        "zeros": lambda: write("zeros", bytes(len(data))),
        "longer": lambda: write("with more at its end", data + drawn.randbytes(drawn.randrange(1, 200))),
        "twice": lambda: write("twice", data + data),
        "compressed": lambda: write("compressed", gzip.compress(data)),
        "lfs": lambda: write("a pointer of Git LFS", b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"0" * 64 +
                             b"\nsize 12345\n", MUST_FAIL if name.name in ("mlp.safetensors", "mlp.pt", "tokens.bin") else ANYTHING),
        "page": lambda: write("a page of HTML", b"<!DOCTYPE html>\n<html><body>404 Not Found</body></html>\n"),
        "another": lambda: (shutil.copyfile(case.directory / drawn.choice(["prose.txt", "mlp.safetensors", "mlp.pt", "tokens.bin",
                                                                          "photos/cat/0.png"]), path),
                            case.did(f"{name}: another file's bytes")),
    }
    if is_text:
        ways |= {
            "crlf": lambda: write("lines end with CR LF", data.replace(b"\n", b"\r\n")),
            "cr": lambda: write("lines end with CR", data.replace(b"\n", b"\r")),
            "bom": lambda: write("a byte order mark", b"\xef\xbb\xbf" + data),
            "utf16": lambda: write("UTF-16", data.decode().encode("utf-16")),
            "utf16le": lambda: write("UTF-16 without a mark", data.decode().encode("utf-16-le")),
            "latin1": lambda: write("Latin-1", data.replace(b"day", "d\u00e4y".encode("latin-1"))),
            "nul": lambda: write("with a byte of 0", data[:at] + b"\0" + data[at:]),
            "quote": lambda: write("with a quote", data[:at] + b'"' + data[at:]),
            "unended": lambda: write("without an end of its last line", data.rstrip(b"\n")),
            "blank": lambda: write("with blank lines", data.replace(b"\n", b"\n\n", 3)),
        }
    ways[drawn.choice(sorted(ways))]()


def replace_path(case, drawn):
    path = target_of(case, drawn, "exists")
    if path is None:
        return False
    name = path.relative_to(case.directory)
    is_directory = path.is_dir()

    def away():
        shutil.rmtree(path) if is_directory else path.unlink()

    def no_permission():
        path.chmod(0)
        case.user = 65534 if os.geteuid() == 0 else 0

    def other_kind():
        away()
        path.write_bytes(b"x") if is_directory else path.mkdir()

    ways = {
        "gone": away,
        "without permission": no_permission,
        "a file or a directory in its place": other_kind,
        "a pipe": lambda: (away(), os.mkfifo(path)),
        "a link to itself": lambda: (away(), path.symlink_to(path.name)),
        "a broken link": lambda: (away(), path.symlink_to("nowhere")),
        "/dev/null": lambda: (away(), path.symlink_to("/dev/null")),
        "/dev/zero": lambda: (away(), path.symlink_to("/dev/zero")),
        "/dev/full": lambda: (away(), path.symlink_to("/dev/full")),
        "/proc/self/mem": lambda: (away(), path.symlink_to("/proc/self/mem")),
        "a socket": lambda: (away(), os.mknod(path, 0o140600)),
    }
    if not is_directory:
        ways["sparse, of a tebibyte"] = lambda: os.truncate(path, 1 << 40)
    way = drawn.choice(sorted(ways))
    ways[way]()
    # Those within a directory may be left out, with a warning.
    named = any(str(word).split(":")[-1].split(",")[0] == str(name) for word in case.words)
    case.did(f"{name}: {way}", MUST_FAIL if named else ANYTHING)


def spoil_directory(case, drawn):
    path = target_of(case, drawn, "is_dir")
    if path is None:
        return False
    name = path.relative_to(case.directory)
    ways = {
        "emptied": lambda: (shutil.rmtree(path), path.mkdir()),
        "with a link to itself": lambda: (path / "loop").symlink_to("."),
        "with an empty directory": lambda: (path / "empty").mkdir(),
        "with a broken link": lambda: (path / "broken").symlink_to("nowhere"),
        "with a pipe": lambda: os.mkfifo(path / "pipe.png"),
        "with a file that is none of its kind": lambda: (path / "notes.md").write_text("notes\n"),
        "with names that are not UTF-8": lambda: (pathlib.Path(os.fsdecode(os.fsencode(path) + b"/caf\xe9")).mkdir()),
        "with hidden files": lambda: (path / ".DS_Store").write_bytes(b"\0\1"),
        "with an empty file": lambda: (path / "z.png").write_bytes(b""),
        "through a link": lambda: (path.rename(path.with_name("elsewhere")), path.symlink_to("elsewhere")),
        "of the first entry alone": lambda: [shutil.rmtree(entry) if entry.is_dir() else entry.unlink()
                                             for entry in sorted(path.iterdir())[1:]],
        "with a folder of a folder": lambda: shutil.copytree(path, path / "within", symlinks=True,
                                                             ignore=lambda *_: ["within"]),
    }
    way = drawn.choice(sorted(ways))
    ways[way]()
    case.did(f"{name}: {way}", SAME if way == "through a link" else ANYTHING)


def spoil_output(case, drawn):
    if not case.output:
        return False
    path = case.directory / case.output
    ways = {
        "a directory": lambda: path.mkdir(),
        "a directory with something in it": lambda: (path.mkdir(), (path / "x").write_text("x")),
        "a file": lambda: path.write_text("x\n"),
        "a pipe": lambda: os.mkfifo(path),
        "a link to itself": lambda: path.symlink_to(path.name),
        "a link to nothing": lambda: path.symlink_to("none/such"),
        "/dev/full": lambda: path.symlink_to("/dev/full"),
        "/dev/null": lambda: path.symlink_to("/dev/null"),
        "what may not be written": lambda: (path.write_text("x\n"), path.chmod(0o400), setattr(case, "user", 65534)),
    }
    if os.geteuid() != 0:
        del ways["what may not be written"]
    way = drawn.choice(sorted(ways))
    ways[way]()
    case.did(f"{case.output} is {way}")


# ---- environment, descriptors, limits

VARIABLES = {
    "OMP_NUM_THREADS": ["0", "-1", "1", "2", "999999", "abc", "", "1,2"], "OMP_THREAD_LIMIT": ["1", "0", "2", "x"],
    "OMP_DYNAMIC": ["true", "x"], "OMP_MAX_ACTIVE_LEVELS": ["0", "x"], "OMP_STACKSIZE": ["1", "1k", "10G", "x", "64k"],
    "OMP_PROC_BIND": ["true", "close", "x"], "OMP_PLACES": ["cores", "{0}", "{99}", "x"], "OMP_SCHEDULE": ["dynamic", "x"],
    "OMP_WAIT_POLICY": ["active", "passive", "x"], "OMP_CANCELLATION": ["true"], "OMP_DISPLAY_ENV": ["true", "verbose"],
    "GOMP_SPINCOUNT": ["0", "infinite", "x"], "GOMP_CPU_AFFINITY": ["0", "99", "x"], "GOMP_STACKSIZE": ["1", "x"],
    "ONEDNN_VERBOSE": ["1"], "ONEDNN_MAX_CPU_ISA": ["SSE41", "AVX2", "x", ""], "ONEDNN_DEFAULT_FPMATH_MODE": ["BF16", "x"],
    "ONEDNN_PRIMITIVE_CACHE_CAPACITY": ["0", "-1", "x"], "ONEDNN_JIT_DUMP": ["0"], "DNNL_VERBOSE": ["2"],
    "TMPDIR": ["/proc/nowhere", "", "/dev/null", "relative", "/" + "x" * 300, "/proc"], "HOME": [None, "", "/proc/nowhere"],
    "LANG": ["de_DE.UTF-8", "x", "", "C", "tr_TR.UTF-8"], "LC_ALL": ["de_DE.UTF-8", "POSIX", "x", "tr_TR"], "LC_NUMERIC": ["de_DE.UTF-8"],
    "PATH": [None, "", "/proc/nowhere"], "TERM": ["", "dumb", "x"], "COLUMNS": ["0", "-1", "x", "1", "99999"], "TZ": ["x", ""],
    "USER": [None, "", "a/b", "x" * 300], "LD_BIND_NOW": ["1"], "MALLOC_ARENA_MAX": ["1"], "MALLOC_PERTURB_": ["165"],
    "GLIBC_TUNABLES": ["glibc.malloc.check=3", "x"], "PYTHONPATH": ["x"], "XDG_CACHE_HOME": ["/proc/nowhere", ""], "NO_COLOR": ["1"],
    "RANK": ["0", "1", "-1", "x", "", "99"], "WORLD_SIZE": ["1", "2", "0", "-1", "x", ""], "LOCAL_RANK": ["0", "3", "x", "-1"],
    "LOCAL_WORLD_SIZE": ["1", "0", "x", "4"], "MASTER_ADDR": ["", "no.such.host.invalid", "127.0.0.1", "x y", "::1", "256.1.1.1"],
    "MASTER_PORT": ["0", "-1", "70000", "x", "", "1"], "GROUP_RANK": ["0"], "TORCHELASTIC_RUN_ID": ["x"],
    "PMI_SIZE": ["2", "1", "x"], "PMI_RANK": ["0", "1", "x"], "PMI_FD": ["3"], "PMIX_RANK": ["0"], "PMIX_NAMESPACE": ["x"],
    "SLURM_PROCID": ["0", "1", "x"], "SLURM_NTASKS": ["2", "1", "x"], "SLURM_JOB_ID": ["5"], "SLURM_LOCALID": ["0"],
    "SLURM_STEP_ID": ["0"], "OMPI_COMM_WORLD_RANK": ["0", "x"], "OMPI_COMM_WORLD_SIZE": ["2", "x", "1"],
    "MPI_LOCALNRANKS": ["2"], "JSM_NAMESPACE_RANK": ["0"], "MV2_COMM_WORLD_RANK": ["0"], "FLUX_TASK_RANK": ["0"], "PALS_RANKID": ["0"],
    "LOCKSTEP_BATCH": ["4", "x", "", "-1"], "LOCKSTEP_EPOCS": ["1"], "LOCKSTEP_LR": ["0.1", "nan", "1e999"], "LOCKSTEP_DATA": ["x"],
    "LOCKSTEP_JOB_SECRET": ["x", "", "0123456789abcdef0123456789abcdef", "x" * 5000], "LOCKSTEP_BIND": ["x", "none", "core", ""],
    "LOCKSTEP_SHM_SOCKETS": ["x", "auto", "2", "-1"], "LOCKSTEP_SOCKET_IFNAME": ["x", "lo", "^lo", ""],
    "LOCKSTEP_LISTEN": ["x", "0.0.0.0", "::", ""], "LOCKSTEP_FLIGHT_DIR": ["/proc/nowhere", "", "."], "LOCKSTEP_STATUS_FD": ["99", "x", "-1", "1"],
    "LOCKSTEP_LAUNCHER": ["x", "", "unix:/proc/nowhere"], "LOCKSTEP_ATTEMPT": ["x", "3", "-1"], "LOCKSTEP_CHECKPOINT_STEP": ["x", "9", "-1"],
    "LOCKSTEP_HOST_NAME": ["x", "", "a b"], "LOCKSTEP_JOB": ["x"], "LOCKSTEP_SHM_DIR": ["/proc/nowhere", ""], "LOCKSTEP_THREADS": ["2", "0"],
    "LOCKSTEP_CONFIG": ["none.toml", "run.toml"], "LOCKSTEP_": ["x"], "LOCKSTEP_QUIET": ["1", "yes", "maybe", "false", ""],
    "CUDA_VISIBLE_DEVICES": ["0", "-1", "x", None], "CUDA_DEVICE_ORDER": ["x"], "NCCL_DEBUG": ["INFO", "x"],
}


def set_variable(case, drawn):
    name = drawn.choice(sorted(VARIABLES))
    value = drawn.choice(VARIABLES[name])
    case.environment.pop(name, None)
    if value is not None:
        case.environment[name] = value
    elif name == "CUDA_VISIBLE_DEVICES":
        case.environment[name] = ""
    if name in ("WORLD_SIZE", "RANK", "MASTER_ADDR"):
        case.environment.setdefault("LOCKSTEP_TIMEOUT_SECONDS", "2")
    harmless = name.startswith(("OMP_", "GOMP", "ONEDNN_P", "ONEDNN_J", "LC_", "LANG", "TERM", "COLUMNS", "TZ", "USER", "MALLOC",
                                "GLIBC", "PYTHON", "NO_COLOR", "LD_", "HOME", "XDG", "GROUP_RANK", "TORCHELASTIC"))
    case.did(f"{name}={value if value is None else value[:40]!r}", SAME if harmless else ANYTHING)


LAUNCHERS = [
    {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}, {"RANK": "1", "WORLD_SIZE": "2", "MASTER_PORT": "1"}, {"WORLD_SIZE": "2"},
    {"RANK": "0"}, {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}, {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "1"},
    {"PMI_RANK": "0", "PMI_SIZE": "2", "PMI_FD": "7"}, {"PMI_RANK": "1", "PMI_SIZE": "2"}, {"PMI_SIZE": "1", "PMI_RANK": "0"},
    {"SLURM_PROCID": "0", "SLURM_NTASKS": "2", "SLURM_STEP_ID": "0", "SLURM_JOB_ID": "1"},
    {"SLURM_PROCID": "1", "SLURM_NTASKS": "2", "SLURM_STEP_ID": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"},
    {"SLURM_JOB_ID": "1", "SLURM_NTASKS": "2"}, {"SLURM_JOB_ID": "1", "SLURM_PROCID": "0", "SLURM_NTASKS": "1"},
    {"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "0"}, {"OMPI_COMM_WORLD_RANK": "0"}, {"PMIX_RANK": "0", "PMIX_NAMESPACE": "x"},
    {"MV2_COMM_WORLD_RANK": "0", "MV2_COMM_WORLD_SIZE": "2"}, {"MPI_LOCALRANKID": "0", "MPI_LOCALNRANKS": "2"},
    {"LOCKSTEP_LAUNCHER": "unix:/proc/nowhere", "RANK": "0", "WORLD_SIZE": "2"}, {"LOCKSTEP_LAUNCHER": "x", "LOCKSTEP_JOB": "/proc/nowhere"},
    {"FLUX_TASK_RANK": "0", "FLUX_JOB_SIZE": "2"}, {"JSM_NAMESPACE_RANK": "0", "JSM_NAMESPACE_SIZE": "2"},
    {"HOROVOD_RANK": "0", "HOROVOD_SIZE": "2"}, {"PALS_RANKID": "0", "PALS_SIZE": "2"},
]


def other_launcher(case, drawn):
    variables = dict(drawn.choice(LAUNCHERS))
    if drawn.random() < 0.3:
        variables.pop(drawn.choice(sorted(variables)))
    case.environment.update(variables)
    case.environment.setdefault("LOCKSTEP_TIMEOUT_SECONDS", "2")
    case.did("in the environment " + " ".join(f"{name}={value}" for name, value in variables.items()))


def spoil_descriptor(case, drawn):
    which = drawn.choice(["stdin closed", "stdin a directory", "stdout closed", "stdout full", "stdout gone", "stderr closed", "stderr full",
                          "stderr gone"])
    name, what = which.split(" ", 1)
    setattr(case, name, what.split()[-1])
    case.did(which, SAME if name != "stdout" else ANYTHING)


LIMITS = {"NOFILE": [3, 8, 16, 24, 64], "AS": [1 << 26, 1 << 28, 1 << 29, 1 << 30], "FSIZE": [0, 100, 5000], "STACK": [1 << 16, 1 << 18, 1 << 20],
          "MEMLOCK": [0], "CORE": [0], "DATA": [1 << 24, 1 << 27], "NPROC": [0, 1], "SIGPENDING": [0], "NICE": [0]}


def set_limit(case, drawn):
    name = drawn.choice(sorted(LIMITS))
    value = drawn.choice(LIMITS[name])
    case.limits.append((getattr(resource, f"RLIMIT_{name}"), value))
    if name == "NPROC":  # no limit of root's
        case.user = 65534 if os.geteuid() == 0 else 0
    case.did(f"ulimit {name} {value}", SAME)


def surroundings(case, drawn):
    def of_nobody():
        if os.geteuid() == 0:
            case.user = 65534

    ways = {
        "umask 777": lambda: setattr(case, "umask", 0o777),
        "in a directory that is gone": lambda: ((case.directory / "gone").mkdir(), setattr(case, "work", "gone")),
        "in a directory that may not be written": lambda: (case.directory.chmod(0o555), of_nobody()),
        "without a home": lambda: case.environment.pop("HOME", None),
        "with an environment of one variable": lambda: (case.environment.clear(), case.environment.update({"CUDA_VISIBLE_DEVICES": ""})),
    }
    way = drawn.choice(sorted(ways))
    ways[way]()
    case.did(way)


MUTATIONS = {  # with their weights
    drop_flag: 3, drop_value: 2, double_flag: 2, misspell: 3, other_spelling: 1, bad_value: 6, add_flag: 10, add_flag_of_another: 3,
    shuffle: 2, add_word: 2, drop_word: 2, spoil_word: 3, other_model: 4, other_data: 4, other_subcommand: 1, spoil_file: 8,
    replace_path: 6, spoil_directory: 4, spoil_output: 3, set_variable: 8, other_launcher: 4, spoil_descriptor: 3, set_limit: 4,
    surroundings: 2,
}


def mutate(case, drawn):
    """One mutation, or several."""
    wanted = drawn.choices([1, 2, 3], [6, 3, 1])[0]
    for _ in range(50):
        if len(case.done) >= wanted:
            return
        way, = drawn.choices(list(MUTATIONS), list(MUTATIONS.values()))
        with contextlib.suppress(OSError):  # of a file that another mutation has made unusable
            way(case, drawn)
