"""Small tokenizers and files for the tests of corpora."""

import base64
import gzip
import hashlib
import json
import socket

from compactattn.data import tokenizers

MERGES = [b"he", b"ll", b"hell", b"hello", b" w", b"or", b" wor", b"ld", b" world", b"\n\n", b"12", b"th", b"the", b" the"]


def tiny_ranks():
    """A file of ranks: the 256 bytes, then a few merges."""
    tokens = [bytes([i]) for i in range(256)] + MERGES
    return b"".join(base64.b64encode(token) + b" %d\n" % rank for rank, token in enumerate(tokens))


def use_tiny_ranks(monkeypatch, folder):
    """Lets "gpt2" be the tiny tokenizer, whose ranks are in the file that is returned."""
    path = folder / "tiny.tiktoken"
    path.write_bytes(tiny_ranks())
    monkeypatch.setattr(tokenizers, "GPT2_SHA256", hashlib.sha256(tiny_ranks()).hexdigest())
    return path


def cut_off(monkeypatch, folder):
    """Takes the network away, as requests tells it: three errors around the one that says why."""

    def fetch(url):
        try:
            try:
                raise socket.gaierror(-2, "Name or service not known")
            except OSError as error:
                raise RuntimeError(f"Failed to resolve a host {'that has a long name ' * 20}") from error
        except RuntimeError as error:
            raise ConnectionError(f"Max retries exceeded (Caused by {error!r})") from None

    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(folder / "cache"))
    monkeypatch.setattr("tiktoken.load.read_file", fetch)


def write_text(path, documents, separator="<|endoftext|>"):
    text = f"\n{separator}\n".join(documents) + "\n"
    path.write_bytes(gzip.compress(text.encode()) if path.suffix == ".gz" else text.encode())
    return path


def write_json_lines(path, values):
    path.write_text("".join(json.dumps(value) + "\n" for value in values))
    return path
