"""Alterations of the files and directories that an invocation names. As those of words.py."""
import gzip
import os
import pathlib
import shutil

from case import ANYTHING, MUST_FAIL, SAME



def target_of(case, drawn, kind):
    # None that another mutation has made endless.
    names = [name for name in case.inputs if getattr(case.directory / name, kind)()
             and (case.directory / name).stat().st_size < 1 << 20]
    return case.directory / drawn.choice(names) if names else None


def spoil_file(case, drawn):
    path = target_of(case, drawn, "is_file")
    if path is None:
        return False
    data = path.read_bytes()
    name = path.relative_to(case.directory)
    named = any(str(word).endswith(str(name)) for word in case.words)  # and not within a directory, one of many
    is_text = path.suffix in (".txt", ".csv", ".tsv", ".toml", "") and b"\0" not in data and path.suffix != ".gz"

    def write(what, new, expects=ANYTHING):
        path.write_bytes(new)
        case.did(f"{name}: {what}", expects)

    if not data:
        return False
    at = drawn.randrange(len(data))
    ways = {
        "cut": lambda: write(f"cut at byte {at}", data[:at]),
        "empty": lambda: write("empty", b"", MUST_FAIL if named else ANYTHING),
        "flipped": lambda: write(f"byte {at} is another one",
                                 data[:at] + bytes([data[at] ^ drawn.randrange(1, 256)]) + data[at + 1:]),
        "noise": lambda: write("random bytes", drawn.randbytes(len(data))),
        "zeros": lambda: write("zeros", bytes(len(data))),
        "longer": lambda: write("with more at its end", data + drawn.randbytes(drawn.randrange(1, 200))),
        "twice": lambda: write("twice", data + data),
        "compressed": lambda: write("compressed", gzip.compress(data), SAME),
        "lfs": lambda: write("a pointer of Git LFS", b"version https://git-lfs.github.com/spec/v1\noid sha256:"
                             + b"0" * 64 +
                             b"\nsize 12345\n", MUST_FAIL if name.name in ("mlp.safetensors", "mlp.pt",
                                                                           "tokens.bin") else ANYTHING),
        "page": lambda: write("a page of HTML", b"<!DOCTYPE html>\n<html><body>404 Not Found</body></html>\n"),
        "another": lambda: (shutil.copyfile(case.directory / drawn.choice(["prose.txt", "mlp.safetensors", "mlp.pt",
                                                                           "tokens.bin",
                                                                          "photos/cat/0.png"]), path),
                            case.did(f"{name}: another file's bytes")),
    }
    if path.suffix == ".safetensors":
        ways["nan"] = lambda: write("with a NaN", data[:-4] + b"\0\0\xc0\x7f", MUST_FAIL if named else ANYTHING)
    lines = data.decode(errors="replace").splitlines(keepends=True)
    if path.suffix in (".csv", ".tsv") and len(lines) > 2:
        row = drawn.randrange(1, len(lines))
        ways |= {
            "ragged": lambda: write(f"row {row} has a field more",
                                    "".join([*lines[:row], lines[row].rstrip("\n") + ",x\tx\n",
                                                                          *lines[row + 1:]]).encode(), MUST_FAIL),
            "short": lambda: write(f"row {row} has one field",
                                   "".join([*lines[:row], "good\n", *lines[row + 1:]]).encode(), MUST_FAIL),
            "headless": lambda: write("without its first line", "".join(lines[1:]).encode()),
            "two heads": lambda: write("its first line twice", "".join([lines[0], *lines]).encode()),
            "one class": lambda: write("one class alone", data.replace(b"good", b"bad")),
            "third class": lambda: write("a class of one row",
                                         "".join([*lines[:row], lines[row].replace("good", "odd").replace("bad", "odd"),
                                                                       *lines[row + 1:]]).encode()),
            "capital": lambda: write("names in capitals", "".join([lines[0].upper(), *lines[1:]]).encode()),
            "numbered": lambda: write("with an index", "".join(("" if i == 0 else str(i))
                                                               + ("," if path.suffix == ".csv" else "\t") + line
                                                              for i, line in enumerate(lines)).encode()),
            "semicolons": lambda: write("with semicolons", data.replace(b",", b";").replace(b"\t", b";")),
            "blank class": lambda: write(f"row {row} without a class",
                                         "".join([*lines[:row], lines[row].replace("good", "").replace("bad", ""),
                                                                               *lines[row + 1:]]).encode()),
            "long": lambda: write("with a field of a megabyte",
                                  data + b"good" + (b"," if path.suffix == ".csv"
                                                    else b"\t") + b"x" * (1 << 20) + b"\n"),
            "many": lambda: write("ten thousand rows", "".join(lines[:1] + lines[1:] * 350).encode()),
        }
    if is_text:
        # What tools and editors do to tables and lists without changing what they say.
        same = SAME if path.suffix != ".txt" else ANYTHING
        ways |= {
            "crlf": lambda: write("lines end with CR LF", data.replace(b"\n", b"\r\n"), same),
            "cr": lambda: write("lines end with CR", data.replace(b"\n", b"\r"), same),
            "bom": lambda: write("a byte order mark", b"\xef\xbb\xbf" + data, same),
            "utf16": lambda: write("UTF-16", data.decode(errors="replace").encode("utf-16"), SAME),
            "utf16le": lambda: write("UTF-16 without a mark", data.decode(errors="replace").encode("utf-16-le"), SAME),
            "latin1": lambda: write("Latin-1", data.replace(b"day", "d\u00e4y".encode("latin-1"))),
            "nul": lambda: write("with a byte of 0", data[:at] + b"\0" + data[at:]),
            "quote": lambda: write("with a quote", data[:at] + b'"' + data[at:]),
            "unended": lambda: write("without an end of its last line", data.rstrip(b"\n"), same),
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


STRANGE_NAMES = [b"caf\xe9", "caf\u00e9".encode(), b"a b", b"a\nb", b"-x", b"--help", "\U0001f600".encode(), b"a,b",
                 b"a'b\"c", b"x" * 200,
                 b"\x1b[31mred", b"{}", b"%s", b"con:x", "\u202etxt".encode(), b"~", b"$HOME", b"*"]


def strange_name(case, drawn):
    """An entry of a directory that it reads has a name that few have."""
    path = target_of(case, drawn, "is_dir")
    if path is None:
        return False
    entries = sorted(path.iterdir())
    if not entries:
        return False
    old = drawn.choice(entries)
    new = drawn.choice(STRANGE_NAMES) + os.fsencode(old.suffix)
    old.rename(os.fsdecode(os.fsencode(path) + b"/" + new))
    case.did(f"{path.relative_to(case.directory)}: {old.name} is called {new[:40]!r}")
