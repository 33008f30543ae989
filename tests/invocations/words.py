"""Alterations of an invocation's words: flags, values, files' names, the program that is launched. Each takes a Case and
random numbers, alters the case and says so with Case.did(), or returns False where there is nothing to alter."""
import json
import os

from case import ANYTHING, MUST_FAIL, SAME, own_flags, places_of_flags, subcommand

MODELS = ("linear mlp tabular cnn resnet18 resnet18-cifar vgg11 mobilenet-v2 vit vit-b16 gpt gpt2 llama bert bert-base rnn lstm gru").split()
SMALL_MODELS = "linear mlp tabular cnn vit gpt llama bert rnn lstm gru".split()
DATA = ("digits random:5,40 random:1x8x8,40 random:tokens,64 mnist:mnist cifar10:cifar cifar100:cifar images:photos tar:photos tar:mlp.safetensors text:prose.txt "
        "text:prose.txt.gz tokens:tokens.bin csv:reviews.csv csv:reviews.tsv table:reviews.csv npy:x.npy,y.npy texts:labelled images:labelled texts:photos "
        "text:mlp.safetensors mnist:cifar csv:prose.txt tokens:prose.txt images:. text: digits:x random: random:0,9 "
        "random:5,1 random:1x1x1,40 images:photos/cat nothing:here").split()
BAD_NUMBERS = ["-1", "0", "1e400", "nan", "inf", "-inf", "abc", "", " ", "1e", "0x10", "1,5", "3s", "2GB", "10%",
               "1_000", "\u0663",
               "9223372036854775807", "18446744073709551616", "99999999999999999999999", "-9223372036854775808", "1.5", "1e-400",
               "--", "-", "+1", "1 2", "1;2", "\u00b5", "\U0001f600", "%s%n", "{}", "$HOME", "\x1b[31m", "a\nb", "None", "true"]
BAD_WORDS = ["", " ", "x", "-", "--", "---", "\u00fc", "\U0001f600", "a b", "\n", "\x1b[2J", "{}", "%s", "x" * 5000,
             "/proc", ".",
             "/dev/null", "/dev/full", "/dev/zero", "none.such", "nan", "-1", "0", "auto", "yes", "no", "~/x", "a,b", ",", ":", "=", "*"]
NUMBERS = ("N", "B", "E", "K", "S", "V", "STEPS", "BYTES", "T", "A", "G", "M", "X", "P", "D", "LR")
NO_NUMBERS = {"1e400", "nan", "inf", "-inf", "abc", "", " ", "1e", "0x10", "1,5", "3s", "2GB", "10%", "1_000", "1 2",
              "{}", "%s%n", "None"}
BAD_BYTES = [b"\xff\xfe", b"caf\xe9", b"\xed\xa0\x80"]


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
    other = drawn.choice([word[:at] + "q" + word[at:], word[:at] + "q" + word[at + 1:], word + "s",
                          word[:2] + "\u00e9" + word[2:], word + "x"])
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
    is_number = own_flags(case).get(case.words[i]) in NUMBERS and case.words[i] != "--np" and "--" not in case.words[:i]
    case.did(f"{case.words[i]} {value[:40]!r} in place of {case.words[i + 1]!r}",
             MUST_FAIL if is_number and value in NO_NUMBERS else ANYTHING)
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
    """One of its own, which may have no effect: then it is to be refused. On the command line, in a file or in the
    environment."""
    flags = own_flags(case)
    end = case.words.index("--") if "--" in case.words else len(case.words)
    names = sorted(set(flags) - set(map(str, case.words)) - {"--help",
                                                             "--config"} - ({"--np"} if "-n" in case.words else set()))
    if not names:
        return False
    name = drawn.choice(names)
    value = typed_value(drawn, flags[name]) if flags[name] else ""
    what = f"with {name} {value[:40]}".rstrip()
    place = drawn.choices(["words", "environment", "file"], [6, 2, 2])[0]
    if place == "environment" and "\0" not in value:
        case.environment["LOCKSTEP_" + name[2:].upper().replace("-", "_")] = value if flags[name] else "1"
        case.did(what + " in the environment")
    elif place == "file" and "--config" not in case.words:
        text = "true" if not flags[name] else json.dumps(value, ensure_ascii=False)
        (case.directory / "added.toml").write_text(f"{name[2:]} = {text}\n")
        case.words[end:end] = ["--config", "added.toml"]
        case.did(what + " in a file")
    else:
        case.words[end:end] = [name] + ([value] if flags[name] else [])
        case.did(what)


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
    # After the word that ends a launcher's flags it may be one of the program's own.
    case.did(f"with the word {word[:40]!r} at {at}", ANYTHING if "--" in case.words[:at] else MUST_FAIL)
    case.words.insert(at, word)


def drop_word(case, drawn):
    at = drawn.randrange(len(case.words))
    word = case.words[at]
    alone = word == "--" or "--" in case.words[:at] or own_flags(case).get(word) == ""
    case.did(f"without the word {word!r}", ANYTHING if alone else MUST_FAIL)
    del case.words[at]


def spoil_word(case, drawn):
    at = drawn.randrange(len(case.words))
    word = case.words[at]
    if not isinstance(word, str):
        return False
    place = drawn.randrange(len(word) + 1)
    piece = drawn.choice([b"\xff", "\u00e9".encode(), b"\n", b" ", b"'", b"\\", b"=", b"\x7f", "\u202e".encode(), b"-",
                          b":", b",", b"0"])
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


def other_file(case, drawn):
    """Another one that is there, in place of one that the words name."""
    places = [i for i, word in enumerate(case.words) if isinstance(word, str) and word.split(":")[-1] in case.inputs]
    if not places:
        return False
    i = drawn.choice(places)
    before, colon, name = case.words[i].rpartition(":")
    other = drawn.choice(sorted(os.listdir(case.directory)))
    case.did(f"{other} in place of {name}")
    case.words[i] = before + colon + other


def other_subcommand(case, drawn):
    other = drawn.choice(["train", "eval", "infer", "export", "bench", "checkpoint", "devices", "version", "inspect", "launch",
                          "Train", "tain",
                          "help", "--help", "-h", "--version"])
    case.did(f"subcommand {other}")
    case.words[0] = other


PROGRAMS = [
    ["sh", "-c", "exit 3"], ["sh", "-c", "kill -9 $$"], ["sh", "-c", "kill $$"], ["none-such"], ["./none-such"],
    ["."], ["prose.txt"], ["./prose.txt"], ["/dev/null"], ["true"], ["false"], ["sh", "-c", "yes | head -c 300000"],
    ["sh", "-c", "printf 'a\\000b\\377'"], ["sh", "-c", "sleep 1 &"], ["sh", "-c", "exec >&- 2>&-; sleep 0.2"],
    ["lockstep"], ["lockstep", "--help"], ["lockstep", "launch", "-n", "1", "--", "true"], [""],
    ["sh", "-c", "trap '' TERM; kill -9 $PPID"], ["env"], ["sh", "-c", "[ $RANK = 0 ] && exit 5; sleep 30"],
]


def other_program(case, drawn):
    if subcommand(case) != "launch" or "--" not in case.words:
        return False
    program = drawn.choice(PROGRAMS)
    case.words[case.words.index("--") + 1:] = program
    if drawn.random() < 0.3:
        case.words[1:1] = ["--max-restarts", "1"]
    case.did(f"the program {' '.join(program)}")
