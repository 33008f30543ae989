# Sourced by the scripts: packages of PyPI, of which nothing is installed.

# fetch_wheel NAME==VERSION DIRECTORY: puts it there.
fetch_wheel() {
  command -v pip3 >/dev/null || install_packages python3-pip
  pip3 download --quiet --disable-pip-version-check --no-deps --only-binary=:all: --dest "$2" "$1" >&2
}

# unpack_wheel WHEEL PREFIX DIRECTORY: its files below PREFIX, wherever that is in it (include/), or all (""). A wheel is a zip
# file; python3 reads it where there is no unzip.
unpack_wheel() {
  command -v python3 >/dev/null || install_packages python3
  python3 - "$@" <<'END'
import pathlib, shutil, sys, zipfile
wheel, prefix, target = zipfile.ZipFile(sys.argv[1]), sys.argv[2], pathlib.Path(sys.argv[3])
for entry in wheel.infolist():
    _, found, below = f"/{entry.filename}".partition(f"/{prefix}")
    if found and below and not entry.is_dir():
        file = target / below
        file.parent.mkdir(parents=True, exist_ok=True)
        with wheel.open(entry) as source, open(file, "wb") as copy:
            shutil.copyfileobj(source, copy, 1 << 20)
        if "/bin/" in entry.filename:
            file.chmod(0o755)
END
}
