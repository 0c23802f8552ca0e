"""The order of a save's writes, syncs and renames, and what a power cut may leave of it.

``python -m tests.powercut`` looks at every state of every save path.
"""

import os
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.powercut.check import check, check_path, recorded
from tests.powercut.paths import PATHS, BrokenError
from tests.powercut.record import STRACE, Call
from tests.sweep import split

if STRACE is None and os.environ.get("CI"):
    raise FileNotFoundError("there is no strace")
needs_strace = pytest.mark.skipif(STRACE is None, reason="strace records the calls")

SAVE = [
    Call("create", ".f.tmp"), Call("write", ".f.tmp", data=b"new\n"), Call("sync", ".f.tmp"),
    Call("rename", ".f.tmp", "f"), Call("sync", "."), Call("mark", offset=1),
]  # fmt: skip


def look(folder: Path) -> int:
    content = (folder / "f").read_text()
    if content not in ("old\n", "new\n"):
        raise BrokenError(content)
    return 0 if content == "old\n" else 1


def broken(calls: Sequence[Call], tmp_path: Path) -> dict[str, int]:
    start = tmp_path / "start"
    start.mkdir()
    (start / "f").write_text("old\n")
    found = check(start, list(calls), look, tmp_path / "state")
    return {model: len(problems) for model, _, problems in found}


def test_a_save_that_is_right(tmp_path):
    assert broken(SAVE, tmp_path) == {"ordered": 0, "weak": 0}


@pytest.mark.parametrize("left_out", [2, 4], ids=["the file's sync", "the folder's sync"])
def test_a_sync_that_is_missing_is_found(tmp_path, left_out):
    found = broken([*SAVE[:left_out], *SAVE[left_out + 1 :]], tmp_path)
    assert found["weak"] > 0
    # In order, a file's sync makes the names before it durable, and not that of the rename.
    assert found["ordered"] > 0


def test_renames_that_a_file_system_may_reorder(tmp_path):
    """Two names without a sync between them: in order they are right, otherwise not."""
    calls = [
        Call("unlink", "f"), Call("create", "g"), Call("write", "g", data=b"new\n"),
        Call("sync", "g"), Call("rename", "g", "f"), Call("sync", "."), Call("mark", offset=1),
    ]  # fmt: skip
    found = broken(calls, tmp_path)
    assert found["ordered"] > 0
    assert found["weak"] > 0


def order(calls: Sequence[Call]) -> list[str]:
    """The calls in words, temporary names shortened, equal neighbours once."""
    words: list[str] = []
    for call in calls:
        if call.kind in ("create", "truncate"):
            continue
        names = " ".join(
            "tmp" if name.endswith(".tmp") else name for name in (call.path, call.other) if name
        )
        word = f"{call.kind} {names}".strip()
        if call.kind == "mark":
            word = f"done {call.offset}"
        if words[-1:] != [word]:
            words.append(word)
    return words


PLAIN = ["write tmp", "sync tmp", "rename tmp ck", "sync ."]
KEPT = ["write tmp", "sync tmp", "link ck tmp", "rename tmp ck.previous", "rename tmp ck", "sync ."]
ORDERS = {
    "checkpoint": PLAIN,
    "checkpoint, the one before kept": KEPT,
    "checkpoint, data outside": ["write ck.data", "sync ck.data", "sync .", *PLAIN],
    "checkpoint, data outside, the one before kept": [
        "write ck.data", "sync ck.data", "sync .", *KEPT
    ],
}  # fmt: skip


@needs_strace
@pytest.mark.parametrize("name", ORDERS)
def test_the_order_of_a_checkpoints_calls(name, tmp_path):
    calls, _ = recorded(name, tmp_path)
    words = order(calls)
    assert words[words.index("done 2") + 1 : words.index("done 3")] == ORDERS[name]


def assert_in_order(words: list[str], *wanted: str) -> None:
    at = 0
    for word in wanted:
        assert word in words[at:], f"{word} after {words[:at]}; {words}"
        at = words.index(word, at) + 1


@needs_strace
@pytest.mark.parametrize(("name", "wanted"), [
    ("build", ["sync a/b", "sync a", "sync .", "done 1"]),
    ("install", ["sync .", "done 1"]),
    ("export", ["write tmp", "sync tmp", "rename tmp m.onnx", "sync .", "done 1"]),
    ("carry over", [*PLAIN, "done 1"]),
])  # fmt: skip
def test_the_order_of_the_other_saves(name, wanted, tmp_path):
    calls, _ = recorded(name, tmp_path)
    assert_in_order(order(calls), *wanted)
    # Every file that stays was synced after it was last written.
    unsynced: set[str] = set()
    for call in calls:
        if call.kind == "write":
            unsynced.add(call.path)
        elif call.kind in ("sync", "unlink"):
            unsynced.discard(call.path)
        elif call.kind in ("rename", "exchange"):
            under = f"{call.path}/"
            assert not {path for path in unsynced if path == call.path or path.startswith(under)}


@needs_strace
def test_the_last_file_of_a_folder_comes_after_a_sync(tmp_path):
    """Where folders cannot be swapped: plan, stage, the other files, the manifest, the end."""
    words = order(recorded("build without a swap", tmp_path)[0])
    inside = next(w.split()[2] for w in words if w.startswith("rename") and ".odtpack-update" in w)
    assert_in_order(
        words,
        "rename tmp .package.odtpack-plan", "sync .",
        f"rename {next(w.split()[1] for w in words if w.endswith(inside))} {inside}",
        "sync package", "unlink package/manifest.json", "sync package",
        f"rename {inside}/training_model.onnx package/training_model.onnx",
        "sync package", f"sync {inside}",
        f"rename {inside}/manifest.json package/manifest.json",
        "sync package", f"sync {inside}", f"unlink {inside}", "sync package",
        "unlink .package.odtpack-plan", "done 1",
    )  # fmt: skip


@needs_strace
@pytest.mark.parametrize("name", split(PATHS, lambda name: name in list(ORDERS)[1::2]))
def test_what_a_power_cut_leaves(name, tmp_path):
    for model, states, problems in check_path(name, tmp_path):
        assert states > (30 if name in list(ORDERS)[1::2] else 3), model
        assert problems == []
