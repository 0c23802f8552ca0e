"""Damage bytes at random: seeded, so that every input can be had again."""

import random
from collections.abc import Sequence

WORDS = (
    b"\xff\xff\xff\xff", b"\xff\xff\xff\x7f", bytes(4), b"\x00\x00\x00\x80", bytes(8),
    b"\xff" * 8, b"\x01", b"\x00", b"../", b"/etc/passwd", b"\xed\xa0\x80", b"\xc0\xaf", b"%s%n",
    b"1e400", b"-1", b"NaN", b"null", b"true", b"{}", b"[]", b"[[[[[[[[", b'""', b"\\ud800",
    b"9" * 40, b"-9223372036854775809", b"18446744073709551616", b"\n", b"\r\n", b"'''", b"=",
    b"\x80\x80\x80\x80\x80\x80\x80\x80\x80\x01", b"inf", b"0x", b"#", b"\xef\xbb\xbf",
)  # fmt: skip


def mutate(seeds: Sequence[bytes], rng: random.Random) -> bytes:
    """Return one of the seeds, damaged once to five times."""
    data = bytearray(rng.choice(seeds))
    for _ in range(rng.choice((1, 1, 1, 2, 3, 5))):
        size = len(data)
        at = rng.randrange(size + 1)
        kind = rng.randrange(10)
        if kind <= 2 and size:
            data[at % size] ^= 1 << rng.randrange(8)
        elif kind == 3 and size:
            data[at % size] = rng.randrange(256)
        elif kind == 4:
            word = rng.choice(WORDS)
            data[at : at + len(word)] = word
        elif kind == 5:
            data[at:at] = rng.choice(WORDS)
        elif kind == 6:
            del data[at : at + rng.choice((1, 2, 8, 64, size))]
        elif kind == 7:
            piece = data[at : at + rng.choice((1, 4, 16, 256))]
            data[at:at] = piece * rng.choice((1, 2, 50))
        elif kind == 8:
            other = rng.choice(seeds)
            start = rng.randrange(len(other) + 1)
            data[at:] = other[start:]
        else:
            end = min(at + rng.choice((4, 16, 64)), size)
            data[at:end] = bytes(end - at)
    return bytes(data)
