"""What programs that are compiled against the installed headers rely on: functions, tables of classes, and layouts.

g++ itself says what headers declare, by its names for the linker: its debugging information has the members of classes, and
what it writes of headers for Ada (-fdump-ada-spec) the functions outside of classes.
"""
import pathlib
import re
import subprocess

DUMPING = ["-std=c++20", "-gdwarf-5", "-fno-eliminate-unused-debug-types", "-fno-eliminate-unused-debug-symbols",
           "-fkeep-inline-functions"]
CLASSES = ("DW_TAG_class_type", "DW_TAG_structure_type", "DW_TAG_union_type")
OF_LOCKSTEP = re.compile(r"_ZN[KVRO]*8lockstep|lockstep_")
# After its form, and where texts are kept, which readelf has said in several ways.
VALUE = re.compile(r"(?:\(\w+\)\s+)?(?:\((?:alt |indirect |indexed |offset)[^)]*\): )?(.*)")


def run(*argv, **how):
    done = subprocess.run([str(word) for word in argv], capture_output=True, text=True, **how)
    if done.returncode:
        raise RuntimeError(f"{argv[0]} ended with {done.returncode}: {done.stderr[-2000:]}")
    return done.stdout


def demangled(symbols):
    return run("c++filt", input="\n".join(symbols)).splitlines()


def symbols_of(libraries, *flags):
    """What they define, less versions."""
    lines = [line.split() for library in libraries for line in run("nm", "--defined-only", *flags, library).splitlines()]
    return {words[2].partition("@")[0] for words in lines if len(words) == 3}


class Entry:
    """One of debugging information: its kind, attributes, and the entry that it is in."""

    def __init__(self, tag, outer):
        self.tag, self.outer, self.at = tag, outer, {}

    def name(self):
        """Qualified; None in functions, templates, and what has no name."""
        own = self.at.get("DW_AT_name")
        if own is None or "<" in own or self.tag == "DW_TAG_subprogram":
            return None
        if self.outer is None or self.outer.tag == "DW_TAG_compile_unit":
            return own
        outer = self.outer.name()
        return f"{outer}::{own}" if outer else None


def entries(file):
    """By their places in the file."""
    found, path = {}, []
    entry = None
    for line in run("readelf", "-W", "--debug-dump=info", file).splitlines():
        if begins := re.match(r"\s*<(\w+)><(\w+)>: Abbrev Number: \d+ \((\w+)\)", line):
            del path[int(begins[1], 16):]
            entry = found[int(begins[2], 16)] = Entry(begins[3], path[-1] if path else None)
            path.append(entry)
        elif entry and (attribute := re.match(r"\s*<\w+>\s+(DW_AT_\w+)\s*:\s*(.*)", line)):
            entry.at[attribute[1]] = VALUE.match(attribute[2])[1].strip()
    return found


def source_files(file):
    """By the numbers that the entries have for them."""
    directories, files = {}, {}
    for line in run("readelf", "-W", "--debug-dump=rawline", file).splitlines():
        if named := re.match(r"\s+(\d+)\s+(?:\(udata\)\s+(\d+)\s+)?\(line_strp\)\s+\(.*?\): (.*)", line):
            if named[2] is None:
                directories[named[1]] = named[3]
            else:
                files[named[1]] = str(pathlib.Path(directories[named[2]], named[3]))
    return files


class Interface:
    """That of `headers` under `include`.

    declared: by its name for the linker, where the header has each function. missing(symbols): those that neither the headers
    nor `symbols` define, and that somebody may call. public(symbols): those of `symbols` that programs may use. layouts: lines
    that change when programs have to be compiled anew.
    """

    def __init__(self, directory, include, headers, flags=()):
        source = directory / "headers.cpp"
        source.write_text("".join(f"#include <{header}>\n" for header in headers))
        run("g++", *DUMPING, "-fdump-ada-spec", f"-I{include}", *flags, "-c", source, "-o", "headers.o", cwd=directory)
        self.inline = symbols_of([directory / "headers.o"])
        self.files = source_files(directory / "headers.o")
        self.entries = entries(directory / "headers.o")
        self.declared, self.classes, self.layouts = {}, set(), set()
        for file in directory.glob("lockstep_*.ads"):
            self.read_ada(file.read_text())
        for entry in self.entries.values():
            self.read(entry)

    def read_ada(self, text):
        imported = r"-- (/\S+):(\d+)\s+with Import => True,\s+Convention => \w+,\s+External_Name => \"(\w+)\";"
        end = 0
        for found in re.finditer(imported, text):
            is_variable = re.search(r"\w+ : [^;()]*$", text[end:found.start()])
            end = found.end()
            if not is_variable and OF_LOCKSTEP.match(found[3]):
                self.declared[found[3]] = (found[1], int(found[2]))

    def read(self, entry):
        at = entry.at
        linked = at.get("DW_AT_linkage_name", "")
        name = entry.name() or ""
        if entry.tag == "DW_TAG_subprogram" and OF_LOCKSTEP.match(linked):
            if "DW_AT_artificial" in at:
                return
            for variant in {re.sub("([CD])4(?=E)", rf"\g<1>{kind}", linked) for kind in "12"}:
                self.declared.setdefault(variant, (self.files.get(at.get("DW_AT_decl_file")), int(at.get("DW_AT_decl_line", 0))))
            if "DW_AT_vtable_elem_location" in at:
                slot = re.search(r"DW_OP_constu: (\d+)", at["DW_AT_vtable_elem_location"])
                self.layouts.add(f"virtual {linked} {slot[1] if slot else 0}")
        elif not name.startswith("lockstep::") or "DW_AT_declaration" in at:
            return
        elif entry.tag in CLASSES:
            self.classes.add(name)
            self.layouts.add(f"class {name} {at.get('DW_AT_byte_size')} bytes")
        elif entry.tag == "DW_TAG_member" and "DW_AT_data_member_location" in at:
            self.layouts.add(f"member {name} at {at['DW_AT_data_member_location']} {self.type_of(entry)}")
        elif entry.tag == "DW_TAG_enumerator":
            self.layouts.add(f"value {name} {at.get('DW_AT_const_value')}")

    def type_of(self, entry):
        place = re.search(r"<0x(\w+)>", entry.at.get("DW_AT_type", ""))
        if place is None:
            return "void"
        found = self.entries[int(place[1], 16)]
        mark = {"DW_TAG_pointer_type": "*", "DW_TAG_reference_type": "&", "DW_TAG_const_type": " const",
                "DW_TAG_array_type": "[]"}.get(found.tag, "")
        return found.at.get("DW_AT_name") or self.type_of(found) + mark

    def missing(self, symbols):
        return sorted(name for name in self.declared.keys() - self.inline - symbols if self.needs_definition(name))

    def needs_definition(self, name):
        file, line = self.declared[name]
        if file is None:
            return True
        lines = pathlib.Path(file).read_text().splitlines()[line - 1:]
        text = re.sub(r"//.*|= \{[^{}]*\}(?=[,)])", "", "\n".join(lines))  # comments, default arguments
        return re.match(r"[^;{]*?=\s*(default|delete|0)\s*;|[^;{]*\{", text) is None

    def public(self, symbols):
        tables = sorted(symbol for symbol in symbols if re.match("_ZT[VIST]", symbol))
        used = {symbol for symbol, text in zip(tables, demangled(tables)) if text.rpartition(" for ")[2] in self.classes}
        return sorted(self.declared.keys() & symbols | used)
