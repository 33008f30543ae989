#!/usr/bin/env python3
"""What a link gives plain sockets: every rank sends each other one its share of an allreduce of BYTES, two ways, with
no arithmetic and nothing else to wait for. RANK, WORLD_SIZE; rank i listens at HOST of the i-th argument.

  wire.py BYTES ROUNDS ADDRESS…          prints {"bytes": …, "time_us": [a round each, of this rank]}
"""
import json
import os
import selectors
import socket
import sys
import time

PORT = 29400


def connect(rank: int, addresses: list) -> dict:
    """A socket to each other rank; the higher one calls."""
    peers = {}
    with socket.create_server((addresses[rank], PORT + rank)) as listening:
        for other in range(rank):
            deadline = time.monotonic() + 20
            while True:
                try:
                    peers[other] = socket.create_connection((addresses[other], PORT + other), timeout=5)
                    break
                except OSError:
                    if time.monotonic() > deadline:
                        raise
                    time.sleep(0.05)
            peers[other].sendall(bytes([rank]))
        while len(peers) < len(addresses) - 1:
            peer, _ = listening.accept()
            peers[peer.recv(1)[0]] = peer
    for peer in peers.values():
        peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for option in (33, 32):  # SO_RCVBUFFORCE, SO_SNDBUFFORCE
            try:
                peer.setsockopt(socket.SOL_SOCKET, option, 4 << 20)
            except OSError:
                pass
        peer.setblocking(False)
    return peers


def exchange(peers: dict, amount: int, data: memoryview) -> None:
    """`amount` bytes to and from every peer."""
    selector = selectors.DefaultSelector()
    sent, got = dict.fromkeys(peers, 0), dict.fromkeys(peers, 0)
    room = bytearray(1 << 18)
    for rank, peer in peers.items():
        selector.register(peer, selectors.EVENT_READ | selectors.EVENT_WRITE, rank)
    left = 2 * len(peers)
    while left:
        for key, events in selector.select():
            rank, peer = key.data, key.fileobj
            if events & selectors.EVENT_READ and got[rank] < amount:
                got[rank] += peer.recv_into(room, min(len(room), amount - got[rank]))
                left -= got[rank] == amount
            if events & selectors.EVENT_WRITE and sent[rank] < amount:
                sent[rank] += peer.send(data[:min(len(data), amount - sent[rank])])
                left -= sent[rank] == amount
            wanted = (selectors.EVENT_READ if got[rank] < amount else 0) | (
                selectors.EVENT_WRITE if sent[rank] < amount else 0)
            if wanted:
                selector.modify(peer, wanted, rank)
            else:
                selector.unregister(peer)
    selector.close()


def main() -> None:
    total, rounds, addresses = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3:]
    rank = int(os.environ["RANK"])
    peers = connect(rank, addresses)
    data = memoryview(bytes(1 << 18))
    # Of 2 (N - 1) / N of the region that a rank sends, a share to each of the N - 1 others.
    share = 2 * total // len(addresses)
    times = []
    for _ in range(rounds + 2):
        exchange(peers, 1, data)  # begin together
        begin = time.perf_counter()
        exchange(peers, share, data)
        times.append(1e6 * (time.perf_counter() - begin))
    print(json.dumps({"bytes": total, "time_us": times[2:]}))


if __name__ == "__main__":
    main()
