"""unpack_wheel.py PATTERN DIRECTORY WHEEL…

Unpacks of each wheel, a file or an address, those files whose path matches the regular expression, under what its first
group says. A wheel is a zip file; of one that has an address only the parts that it needs are transferred, where the
server gives parts of files.
"""
import io
import pathlib
import re
import shutil
import sys
import urllib.request
import zipfile


class Remote(io.RawIOBase):
    """A file that has an address, read by ranges of bytes."""

    def __init__(self, url: str):
        self.url, self.at = url, 0
        with urllib.request.urlopen(urllib.request.Request(url, method="HEAD")) as reply:
            self.size = int(reply.headers["Content-Length"])

    def readable(self):
        return True

    def seekable(self):
        return True

    def seek(self, offset, whence=io.SEEK_SET):
        self.at = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self.at, io.SEEK_END: self.size}[whence]
        return self.at

    def tell(self):
        return self.at

    def readinto(self, buffer):
        count = min(len(buffer), self.size - self.at)
        if count <= 0:
            return 0
        part = {"Range": f"bytes={self.at}-{self.at + count - 1}"}
        with urllib.request.urlopen(urllib.request.Request(self.url, headers=part)) as reply:
            if reply.status != 206:
                raise OSError("the server does not give parts of files")
            data = reply.read()
        buffer[:len(data)] = data
        self.at += len(data)
        return len(data)


def opened(source: str) -> zipfile.ZipFile:
    if "://" not in source:
        return zipfile.ZipFile(source)
    try:
        return zipfile.ZipFile(io.BufferedReader(Remote(source), 1 << 20))
    except OSError:
        return zipfile.ZipFile(io.BytesIO(urllib.request.urlopen(source).read()))


def main(pattern: str, target: str, *sources: str) -> None:
    for source in sources:
        wheel = opened(source)
        for entry in wheel.infolist():
            found = re.search(pattern, entry.filename)
            if not found or entry.is_dir():
                continue
            file = pathlib.Path(target) / found[1]
            file.parent.mkdir(parents=True, exist_ok=True)
            with wheel.open(entry) as packed, open(file, "wb") as copy:
                shutil.copyfileobj(packed, copy, 1 << 20)
            if "/bin/" in entry.filename:
                file.chmod(0o755)


main(*sys.argv[1:])
