"""The protocol of a job's ports, written down a second time: docs/security.md. The standard library is enough."""
import hashlib
import hmac
import socket
import struct
import time

VERSION = 4
HELLO, CHALLENGE, PROVE, WELCOME, REFUSED = 1, 32, 33, 34, 65
STORE, DATA, LAUNCHER = 1, 2, 3
SET, AWAIT, ROLL_CALL, GIVE_UP, LEAVE, VALUE, ANSWERED, ATTENDANCE, PEER_GAVE_UP = 2, 3, 4, 5, 6, 67, 68, 69, 70
MAGIC = b"lockstep"


def number(value: int) -> bytes:
    return struct.pack("<I", value)


def text(value) -> bytes:
    value = value.encode() if isinstance(value, str) else value
    return number(len(value)) + value


def hello_frame(kind: int, body: bytes) -> bytes:
    return number(len(body) + 1) + bytes([kind]) + body


def crc32c(data: bytes) -> int:
    crc = 0xffffffff
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = (crc >> 1) ^ (0x82f63b78 if crc & 1 else 0)
    return crc ^ 0xffffffff


def store_frame(kind: int, body: bytes = b"") -> bytes:
    length, content = number(len(body) + 1), bytes([kind]) + body
    return length + number(crc32c(length + content)) + content


def sign(secret: bytes, message: bytes) -> bytes:
    return hmac.new(secret, message, hashlib.sha256).digest()


def proof(secret: bytes, port: int, side: int, caller_nonce: bytes, listener_nonce: bytes, identity: bytes,
          answer: bytes = None, encrypts: int = 0) -> bytes:
    message = text("lockstep handshake") + number(port) + number(side) + number(VERSION) + number(encrypts)
    message += text(caller_nonce) + text(listener_nonce) + text(identity)
    return sign(secret, message if answer is None else message + text(answer))


def identity_for_store(size: int, rank: int, job: str = "") -> bytes:
    return number(size) + number(rank) + number(1) + text("impostor") + text(job)


class Refused(Exception):
    """The other side closes the connection, and may say why."""


class Connection:
    """One to a port of the job's: ("127.0.0.1", 29500), or the path of a socket."""

    def __init__(self, address):
        family = socket.AF_UNIX if isinstance(address, str) else socket.AF_INET
        self.socket = socket.socket(family, socket.SOCK_STREAM)
        self.socket.settimeout(20)
        try:
            self.socket.connect(address)
        except OSError:
            self.socket.close()
            raise

    def close(self):
        self.socket.close()

    def say(self, data: bytes):
        try:
            self.socket.sendall(data)
        except OSError as error:
            raise Refused("closed") from error

    def read(self, count: int) -> bytes:
        data = b""
        while len(data) < count:
            try:
                more = self.socket.recv(count - len(data))
            except TimeoutError:
                raise AssertionError("no answer, and the connection stays open") from None
            except OSError as error:
                raise Refused("closed") from error
            if not more:
                raise Refused("closed")
            data += more
        return data

    def read_hello_frame(self):
        length = struct.unpack("<I", self.read(4))[0]
        content = self.read(length)
        if content[0] == REFUSED:
            raise Refused(content[5:].decode())
        return content[0], content[1:]

    def challenge(self, nonce: bytes, port_version: int = VERSION) -> bytes:
        """Says hello; the listener's nonce."""
        self.say(MAGIC + hello_frame(HELLO, number(port_version) + text(nonce)))
        magic = self.read(len(MAGIC))
        assert magic == MAGIC, magic
        kind, body = self.read_hello_frame()
        assert kind == CHALLENGE, kind
        return body[4:]

    def join(self, secret: bytes, port: int, identity: bytes, nonce: bytes = b"n" * 32, encrypts: int = 0) -> bytes:
        """The whole handshake; the listener's answer, once it has proven that it knows the secret too."""
        listener_nonce = self.challenge(nonce)
        mine = proof(secret, port, 0, nonce, listener_nonce, identity, encrypts=encrypts)
        self.say(hello_frame(PROVE, text(identity) + number(encrypts) + text(mine)))
        kind, body = self.read_hello_frame()
        assert kind == WELCOME, kind
        length = struct.unpack("<I", body[:4])[0]
        answer = body[4:4 + length]
        assert body[8 + length:] == proof(secret, port, 1, nonce, listener_nonce, identity, answer, encrypts)
        assert port != STORE or answer.startswith(number(0)), "rank 0 has no store for this group yet"
        return answer

    def last_words(self, seconds: float = 20) -> bytes:
        """All that comes until the other side closes the connection."""
        self.socket.settimeout(seconds)
        words = b""
        while True:
            try:
                more = self.socket.recv(4096)
            except TimeoutError:
                raise AssertionError(f"the connection is still open after {seconds} s") from None
            except OSError:
                return words
            if not more:
                return words
            words += more

    # ---- The store's frames

    def read_store_frame(self):
        length, checksum = struct.unpack("<II", self.read(8))
        content = self.read(length)
        assert checksum == crc32c(number(length) + content), "a frame's checksum is wrong"
        return content[0], content[1:]

    def set(self, key: str, value):
        self.say(store_frame(SET, text(key) + text(value)))

    def get(self, key: str) -> bytes:
        self.asked = getattr(self, "asked", 0) + 1
        self.say(store_frame(AWAIT, number(self.asked) + number(1) + text(key)))
        while True:
            kind, body = self.read_store_frame()
            if kind == VALUE and struct.unpack("<I", body[:4])[0] == self.asked:
                return body[12:]


def trickle(address, data: bytes, seconds: float) -> float:
    """Says a byte every `seconds`; after how many seconds the connection is closed."""
    begin = time.monotonic()
    connection = Connection(address)
    connection.socket.settimeout(seconds)
    for byte in data:
        try:
            connection.socket.sendall(bytes([byte]))
            if connection.socket.recv(4096) == b"":
                break
        except TimeoutError:
            continue
        except OSError:
            break
    else:
        raise AssertionError("the connection is still open")
    connection.close()
    return time.monotonic() - begin
