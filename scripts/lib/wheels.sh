# Sourced by the scripts: packages of PyPI, of which nothing is installed.

# fetch_wheel NAME==VERSION DIRECTORY: puts it there.
fetch_wheel() {
  command -v pip3 >/dev/null || install_packages python3-pip
  pip3 download --quiet --disable-pip-version-check --no-deps --only-binary=:all: --dest "$2" "$1" >&2
}

# headers_of WHEEL DIRECTORY: what lies below a directory `include` in it. A wheel is a zip file; python3 reads it where
# there is no unzip.
headers_of() {
  python3 - "$1" "$2" <<'END'
import pathlib, sys, zipfile
wheel, target = zipfile.ZipFile(sys.argv[1]), pathlib.Path(sys.argv[2])
for name in wheel.namelist():
    _, include, below = f"/{name}".partition("/include/")
    if include and below and not below.endswith("/"):
        file = target / below
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(wheel.read(name))
END
}
