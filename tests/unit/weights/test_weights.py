"""Which weights a model has: every byte of every tensor counts, and is read once."""

from __future__ import annotations

import json
import os
import shutil
import struct
import subprocess
import sys
import tempfile
import threading
import time
import unittest
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import CancelledError
from contextlib import contextmanager
from functools import partial
from hashlib import sha256
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
from safetensors.numpy import save_file

from vua.errors import ConfigError
from vua.weights import (
    checkpoint_files,
    identify_weights,
    process_began_s,
    weights_fingerprint,
    write_note,
)
from vua.weights import fingerprint as fingerprint_module
from vua.weights.fingerprint import processor_digest, recall, remember

Tensors = Mapping[str, np.ndarray]


def make_tensors(count: int = 12, seed: int = 0) -> dict[str, np.ndarray]:
    """Some tensors of different sizes."""
    random = np.random.default_rng(seed)
    return {f"layer.{n}": random.standard_normal((16, 8 + n), np.float32) for n in range(count)}


def sum_of(clock: Callable[[], float], seconds: float) -> float:
    """What a clock shows that is ahead."""
    return clock() + seconds


def unread(path: Path) -> str:
    """The fingerprint, from reading alone."""
    return weights_fingerprint(path, cache=False)


def told(memo: bytes) -> dict[str, object]:
    """What a memo says, but for how long it took and when."""
    said: dict[str, object] = json.loads(memo.partition(b"\n")[2])["value"]
    return {name: said[name] for name in said if name not in ("read_s", "seconds")}


class WeightsCase(unittest.TestCase):
    """A model directory, and a cache directory of its own."""

    def setUp(self) -> None:
        """Make both."""
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = Path(folder.name)
        self.model = self.folder / "model"
        self.model.mkdir()
        self.memos = self.folder / "cache" / "vua" / "weights"
        patched = mock.patch.dict(os.environ, XDG_CACHE_HOME=str(self.folder / "cache"))
        patched.start()
        self.addCleanup(patched.stop)

    def write(self, tensors: Tensors, name: str = "model.safetensors", **metadata: str) -> Path:
        """Write a safetensors file."""
        save_file(dict(tensors), self.model / name, metadata or None)
        return self.model / name

    @contextmanager
    def later(self, seconds: float = 60.0) -> Iterator[None]:
        """What was just written counts as settled."""
        clock = partial(sum_of, time.time, seconds)
        with mock.patch.object(fingerprint_module.time, "time", side_effect=clock):
            yield

    def read(self, path: Path | None = None) -> int:
        """Identify and return how many bytes had to be read."""
        with self.later():
            return identify_weights(checkpoint_files(path or self.model)).read_nbytes


class TestContent(WeightsCase):
    """What counts, and what does not."""

    def test_large_tensors_count_throughout(self) -> None:
        """A tensor of many pieces, digested by several threads: pieces and their order count."""
        size = 5 * (4 << 20) + 12345
        tensor = np.random.default_rng(0).integers(0, 256, size, np.uint8)
        self.write({"large": tensor})
        found = [unread(self.model), unread(self.model)]
        for at in (0, size // 2, size - 1):
            changed = tensor.copy()
            changed[at] ^= 1
            self.write({"large": changed})
            found.append(unread(self.model))
        swapped = tensor.copy()
        swapped[: 4 << 20], swapped[4 << 20 : 8 << 20] = (
            tensor[4 << 20 : 8 << 20].copy(), tensor[: 4 << 20].copy(),
        )  # fmt: skip
        self.write({"large": swapped})
        found.append(unread(self.model))

        self.assertEqual(found[0], found[1])
        self.assertEqual(len(found) - 1, len(set(found)))

    def test_name_dtype_and_shape_count(self) -> None:
        """The same bytes under another name, in another shape or type are other weights."""
        tensor = np.arange(64, dtype=np.float32)
        found = set()
        variants: tuple[Tensors, ...] = (
            {"a": tensor},
            {"b": tensor},
            {"a": tensor.reshape(8, 8)},
            {"a": tensor.view(np.int32)},
            {"a": tensor[:32], "b": tensor[32:]},
            {"b": tensor[:32], "a": tensor[32:]},
            {"a": tensor, "b": tensor[:0]},
        )
        for tensors in variants:
            self.write(tensors)
            found.add(unread(self.model))

        # torchao says there how tensors are put together
        for text in ('{"_type": "A"}', '{"_type": "B"}'):
            found.add(unread(self.write({"a": tensor}, tensor_names='["w"]', w=text)))
        (self.model / "adapter_config.json").write_text('{"r": 8}')
        found.add(unread(self.model))

        self.assertEqual(len(variants) + 3, len(found))

    def test_sharding_names_and_metadata_do_not_count(self) -> None:
        """The same tensors in other files, with other metadata, elsewhere, are the same weights."""
        tensors = make_tensors()
        before = unread(self.write(tensors))
        self.assertEqual(before, unread(self.write(tensors, format="pt", made="today")))
        (self.model / "model.safetensors").unlink()
        half = [*tensors][:5]
        self.write({name: tensors[name] for name in half}, "model-00001-of-00002.safetensors")
        rest = {name: tensors[name] for name in tensors if name not in half}
        self.write(rest, "model-00002-of-00002.safetensors")
        self.assertEqual(before, unread(self.model))
        moved = self.model.rename(self.folder / "elsewhere")
        self.assertEqual(before, unread(moved))
        self.model.mkdir()
        for file in moved.iterdir():
            (self.model / file.name).symlink_to(file)
        self.assertEqual(before, unread(self.model))

    def test_what_engines_do_not_load_does_not_count(self) -> None:
        """Files of training, of other formats, hidden ones, and what an index leaves out."""
        tensors = make_tensors()
        self.write(tensors)
        before = unread(self.model)
        for name in ("training_args.bin", "optimizer.pt", "README.md", "._model.safetensors"):
            (self.model / name).write_bytes(b"something else")
        (self.model / "pytorch_model.bin").write_bytes(b"the same in another format")
        self.assertEqual(before, unread(self.model))
        self.write(make_tensors(seed=1), "consolidated.safetensors")
        self.assertNotEqual(before, unread(self.model))
        index = self.model / "model.safetensors.index.json"
        index.write_text(json.dumps({"weight_map": dict.fromkeys(tensors, "model.safetensors")}))
        self.assertEqual(before, unread(self.model))

    def test_an_index_that_does_not_fit_hides_nothing(self) -> None:
        """Where it names files that are not there, or is none, every file counts."""
        self.write(make_tensors())
        self.write(make_tensors(seed=1), "more.safetensors")
        every = unread(self.model)
        for text in (
            "",
            "{",
            "[]",
            '{"weight_map": 3}',
            '{"weight_map": {"a": "gone"}}',
            "[" * 9999,
        ):
            with self.subTest(text[:20]):
                (self.model / "model.safetensors.index.json").write_text(text)

                self.assertEqual(every, unread(self.model))

    def test_the_files_order_counts_where_it_decides(self) -> None:
        """Two files with different tensors of one name: which comes last is what is loaded."""
        one, two = self.write({"a": np.zeros(4)}, "1.safetensors"), self.model / "2.safetensors"
        self.write({"a": np.ones(4)}, "2.safetensors")
        before = unread(self.model)
        one.rename(self.model / "x")
        two.rename(one)
        (self.model / "x").rename(two)
        swapped = unread(self.model)
        self.write({"a": np.ones(4)}, "2.safetensors")

        self.assertEqual(3, len({before, swapped, unread(self.model)}))

    def test_other_formats_count_as_a_whole(self) -> None:
        """Each byte of GGUF and torch's files counts, and which name each has."""
        for suffix in (".gguf", ".bin", ".pt"):
            file = self.folder / f"x{suffix}"
            content = bytearray(os.urandom(300_000))
            file.write_bytes(content)
            found = [unread(file)]
            for at in (0, 99_999, 150_001, len(content) - 1):
                content[at] ^= 1
                file.write_bytes(content)
                found.append(unread(file))
            found.append(unread(file.rename(self.folder / f"y{suffix}")))
            with self.subTest(suffix):
                self.assertEqual(len(found), len(set(found)))

    def test_parts_of_gguf_files_belong_together(self) -> None:
        """One part stands for all; another quantisation beside does not count."""
        for name in ("a-00001-of-00002.gguf", "a-00002-of-00002.gguf", "b.gguf"):
            (self.model / name).write_bytes(name.encode())
        first = self.model / "a-00001-of-00002.gguf"
        before = unread(first)
        (self.model / "b.gguf").write_bytes(b"another one")
        self.assertEqual(before, unread(first))
        (self.model / "a-00002-of-00002.gguf").write_bytes(b"changed")
        self.assertNotEqual(before, unread(first))

    def test_broken_safetensors_count_as_a_whole(self) -> None:
        """Lies about lengths, gaps, overlaps, doubled names: every byte counts all the same."""
        a = '"a":{"dtype":"U8","shape":[8],"data_offsets":[0,8]}'
        b = '"b":{"dtype":"U8","shape":[8],"data_offsets":[8,16]}'
        overlap = b.replace("[8,16]", "[0,16]")
        gap = b.replace("[8,16]", "[9,16]")
        for header, nbytes in (
            (f"{{{a},{overlap}}}", 16),
            (f"{{{a},{gap}}}", 16),
            (f"{{{a},{b}}}", 17),  # bytes that no tensor has
            (f"{{{a},{b}}}", 15),  # truncated
            (f"{{{a},{a}}}", 8),  # a name twice
            (f"{{{a},{b}", 16),
            ("[]", 16),
            (f"{{{a.replace('[8]', '[true]')},{b}}}", 16),
            (f"{{{a.replace('0,8', '0,1e1')},{b}}}", 16),
            ('{"a":' * 30_000, 16),
        ):
            head = struct.pack("<Q", len(header)) + header.encode()
            file = self.model / "model.safetensors"
            found = []
            for at in (None, 0, nbytes // 2, nbytes - 1):
                data = bytearray(nbytes)
                if at is not None:
                    data[at] = 1
                file.write_bytes(head + data)
                found.append(unread(self.model))
            file.write_bytes(struct.pack("<Q", 1 << 40) + b"{}")
            found.append(unread(self.model))
            with self.subTest(header[:60]):
                self.assertEqual(len(found), len(set(found)))

    def test_no_weights_are_an_error(self) -> None:
        """A directory without weights, another file or a hub name is refused."""
        (self.model / "notes.txt").write_text("")
        (self.model / "training_args.bin").write_text("")
        for path in (self.model, self.model / "notes.txt", Path("someone/some-model")):
            with self.subTest(path), self.assertRaisesRegex(ConfigError, "no weights"):
                weights_fingerprint(path)

    def test_the_fingerprint_is_frozen(self) -> None:
        """A directory that an earlier release wrote is still found."""
        self.write({"a": np.arange(4, dtype=np.int32), "b": np.ones((2, 3), np.float16)})

        self.assertEqual(FROZEN, unread(self.model))


FROZEN = "7fef6308b68ef1b1e4130441ba6334b1abbc1fc1ba0404197ec9d0bb54a66d88"


class TestMemo(WeightsCase):
    """What is read once is remembered, and nothing else is believed."""

    def setUp(self) -> None:
        """Make a model of one file."""
        super().setUp()
        self.file = self.write(make_tensors())
        self.nbytes = self.file.stat().st_size

    def test_unchanged_files_are_read_once(self) -> None:
        """The second time nothing is read; memos are private, and nothing lies beside the model."""
        self.assertEqual([self.nbytes, 0], [self.read(), self.read()])
        self.assertEqual(unread(self.model), weights_fingerprint(self.model))
        self.assertEqual(["model.safetensors"], [file.name for file in self.model.iterdir()])
        for path, mode in ((self.memos, 0o700), *((file, 0o600) for file in self.memos.iterdir())):
            self.assertEqual(mode, path.stat().st_mode & 0o777)

    def test_what_changes_a_files_state(self) -> None:
        """mtime, inode, size; and ctime alone, where somebody sets mtime back."""
        self.assertTrue(self.read())
        mtime_ns = self.file.stat().st_mtime_ns

        def rewrite() -> None:
            content = bytearray(self.file.read_bytes())
            content[-1] ^= 1
            with self.file.open("r+b") as stream:
                stream.write(content)
            os.utime(self.file, ns=(mtime_ns, mtime_ns))

        def exchange() -> None:
            copy = self.folder / "copy"
            copy.write_bytes(self.file.read_bytes())
            os.utime(copy, ns=(mtime_ns, mtime_ns))
            copy.rename(self.file)

        def turn() -> None:
            elsewhere = self.folder / "elsewhere.safetensors"
            elsewhere.write_bytes(self.file.read_bytes()[:-1] + b"x")
            os.utime(elsewhere, ns=(mtime_ns, mtime_ns))
            self.file.unlink()
            self.file.symlink_to(elsewhere)

        changes: dict[str, Callable[[], object]] = {
            "a link that leads elsewhere": turn,
            "mtime": lambda: os.utime(self.file, (1, 1)),
            "ctime": rewrite,
            "inode": exchange,
            "size": lambda: self.write(make_tensors(13)),
        }
        for name, change in changes.items():
            change()
            with self.subTest(name):
                with self.later():
                    self.assertEqual(unread(self.model), weights_fingerprint(self.model))
                self.assertEqual(0, self.read())

    def test_read_ahead(self) -> None:
        """What others have read since then counts as read; what is older does not."""
        file = self.write(make_tensors())
        began_s = time.time()
        self.assertGreater(self.read(), 0)
        again = identify_weights([file], since_s=began_s)
        self.assertEqual((file.stat().st_size,) * 2, (again.read_nbytes, again.nbytes))
        self.assertGreater(again.seconds, 0)
        self.assertEqual(0, identify_weights([file], since_s=began_s + 3600).read_nbytes)
        self.assertEqual(0, identify_weights([file]).read_nbytes)

    def noted(self, model: Path) -> int:
        """Bytes that a start reads which remembers nothing, and finds the right weights."""
        with (
            tempfile.TemporaryDirectory() as home,
            mock.patch.dict(os.environ, XDG_CACHE_HOME=home),
        ):
            found = identify_weights(checkpoint_files(model))
        self.assertEqual(unread(model), found.fingerprint)
        return found.read_nbytes

    def test_a_note_travels(self) -> None:
        """A copy of a model with a note is not read again, at most some tensors of it."""
        many = {f"t{at}": np.full(1 << 18, at, np.uint8) for at in range(12)}
        self.write(many)
        nbytes = self.file.stat().st_size
        self.assertGreaterEqual(self.noted(self.model), nbytes)
        note, found = write_note(self.model)
        self.assertEqual((unread(self.model), nbytes), (found.fingerprint, found.nbytes))
        copy = self.folder / "copy"
        shutil.copytree(self.model, copy)
        second = int(self.file.stat().st_mtime)
        os.utime(copy / self.file.name, (second, second))  # as archives keep it
        with mock.patch("vua.weights.content._SAMPLE_NBYTES", 1 << 18):
            for model in (self.model, copy):
                self.assertLessEqual(self.noted(model), 2 << 18)
            with mock.patch("os.access", return_value=False):
                self.assertEqual(0, self.noted(copy))  # nothing can be written there
            other = copy / self.file.name
            content = bytearray(other.read_bytes())
            for change in ("size", "mtime", "bytes"):
                with self.subTest(change):
                    other.write_bytes(content[:-1] if change == "size" else content)
                    if change == "bytes":
                        other.write_bytes(bytes(content[: -12 << 18]) + b"x" * (12 << 18))
                    at = second - 1 if change == "mtime" else second
                    os.utime(other, (at, at))
                    self.assertGreaterEqual(self.noted(copy), len(content) - (1 << 19))
        (copy / note.name).chmod(0o666)
        other.write_bytes(content)
        os.utime(other, (second, second))
        self.assertGreaterEqual(self.noted(copy), nbytes)  # others could have written it

    def test_a_note_changes_nothing(self) -> None:
        """It is in no digest of the model's other files, and a damaged one is none."""
        (self.model / "preprocessor_config.json").write_text("{}")
        digest = processor_digest(self.model)
        note, _ = write_note(self.model)
        self.assertEqual(digest, processor_digest(self.model))
        for damage in (b"", b"{}", b"[1", note.read_bytes().replace(b"tensors", b"tensorz")):
            note.write_bytes(damage)
            self.assertGreaterEqual(self.noted(self.model), self.nbytes)

    def test_files_just_written_are_not_remembered(self) -> None:
        """A clock that ticks coarsely could hide the next write."""
        weights_fingerprint(self.model)
        self.assertEqual([], [*self.memos.glob("*.json")])

    def test_damage_is_no_memo(self) -> None:
        """Whatever a memo holds, the fingerprint is right and the memo is made anew."""
        self.assertTrue(self.read())
        expected = unread(self.model)
        (memo,) = self.memos.glob("*.json")
        sound = memo.read_bytes()
        other = sound[:100] + bytes([sound[100] ^ 1]) + sound[101:]
        for content in (b"", b"\xff\0", sound[:-1], sound + b" ", b"[" * 100_000, other):
            with self.subTest(content[-30:]):
                memo.write_bytes(content)
                with self.later():
                    self.assertEqual(expected, weights_fingerprint(self.model))
                self.assertEqual(told(sound), told(memo.read_bytes()))

    def test_a_memo_for_another_key_is_none(self) -> None:
        """One that was copied to another's place is not believed."""
        remember("one", {"whole": "x"})
        (memo,) = self.memos.glob("*.json")
        remember("other", {"whole": "y"})
        (place,) = {*self.memos.glob("*.json")} - {memo}
        place.write_bytes(memo.read_bytes())
        self.assertEqual(({"whole": "x"}, None), (recall("one"), recall("other")))

    def test_what_others_may_write_is_not_believed(self) -> None:
        """Memos and directories of other users, or open to them, links and FIFOs: read anew."""
        self.assertTrue(self.read())
        (memo,) = self.memos.glob("*.json")
        for path in (memo, self.memos, self.memos.parent):
            for mode in (0o620, 0o602):
                before = path.stat().st_mode
                path.chmod(mode | 0o100)
                with self.subTest(path=path.name, mode=mode):
                    self.assertIsNone(self.remembered())
                path.chmod(before)
        with self.subTest("another user's"), mock.patch("os.geteuid", return_value=os.getuid() + 1):
            self.assertIsNone(self.remembered())
        self.assertIsNotNone(self.remembered())
        target = memo.rename(self.folder / "target")
        memo.symlink_to(target)
        with self.subTest("a link"):
            self.assertIsNone(self.remembered())
        memo.unlink()
        os.mkfifo(memo, 0o600)
        with self.subTest("a FIFO"):
            self.assertIsNone(self.remembered())

    def remembered(self) -> object:
        """What is remembered of the file."""
        return fingerprint_module.KnownFile.at(self.file).recall()

    def test_processes_read_once(self) -> None:
        """Of processes at the same time one reads, the others wait and take what it remembered."""
        self.write({"large": np.zeros(40 << 20, np.uint8)})
        code = """
import sys, time
from pathlib import Path
from vua.weights import fingerprint, identify_weights
now = time.time
fingerprint.time.time = lambda: now() + 60
print("ready", flush=True)
sys.stdin.readline()
found = identify_weights([Path(sys.argv[1])])
print(found.fingerprint, found.read_nbytes)
"""
        command = [sys.executable, "-c", code, str(self.file)]
        pipe = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        running = [subprocess.Popen(command, **pipe) for _ in range(3)]
        for process in running:
            self.assertEqual("ready\n", process.stdout.readline())
        for process in running:
            process.stdin.write("go\n")
            process.stdin.flush()
        found = [process.communicate(timeout=300)[0].split() for process in running]

        self.assertEqual(1, len({fingerprint for fingerprint, _ in found}))
        self.assertEqual(
            [0, 0, self.file.stat().st_size], sorted(int(nbytes) for _, nbytes in found)
        )

    def test_change_while_reading(self) -> None:
        """A file that is written to, cut or exchanged meanwhile is an error and not remembered."""
        tensors = {"large": np.zeros(20 << 20, np.uint8)}

        def touch(file: Path) -> None:
            with file.open("r+b") as stream:
                stream.seek(1 << 20)
                stream.write(b"x")

        def exchange(file: Path) -> None:
            (self.folder / "new").write_bytes(file.read_bytes())
            (self.folder / "new").rename(file)

        def turn(link: Path) -> None:
            (self.folder / "new").write_bytes(link.read_bytes())
            link.unlink()
            link.symlink_to(self.folder / "new")

        link = self.model / "link.safetensors"
        link.symlink_to(self.file)
        for name, change, file in (
            ("written to", touch, self.file),
            ("cut", lambda file: os.truncate(file, 1 << 20), self.file),
            ("exchanged", exchange, self.file),
            ("a link turned", turn, link),
        ):
            self.write(tensors)
            todo = [partial(change, file)]

            def meanwhile(done: int, total: int, todo: list[Any] = todo) -> None:
                if done < total and todo:
                    todo.pop()()

            with self.subTest(name), self.later(), self.assertRaises((ConfigError, OSError)):
                identify_weights([file], progress=meanwhile)
            self.assertEqual([], [*self.memos.glob("*.json")])

    def test_stop(self) -> None:
        """A search that is stopped ends at once, while reading as while waiting for others."""
        file, stop = self.write({"large": np.zeros(20 << 20, np.uint8)}), threading.Event()
        with self.assertRaises(CancelledError):
            identify_weights([file], progress=lambda *_: stop.set(), stop=stop)


class TestBlobs(WeightsCase):
    """The Hugging Face hub's cache, whose blobs are named by their content."""

    def setUp(self) -> None:
        """Make what lies in the hub, as a plain file."""
        super().setUp()
        self.content = self.write(make_tensors()).read_bytes()

    def hub(self, place: str, content: bytes, name: str = "", kind: str = "models") -> Path:
        """Make a snapshot of one file; return it."""
        repo = self.folder / place / f"{kind}--someone--model"
        blob = repo / "blobs" / (name or sha256(self.content).hexdigest())
        link = repo / "snapshots" / ("0" * 40) / "model.safetensors"
        for folder in (blob.parent, link.parent):
            folder.mkdir(parents=True, exist_ok=True)
        blob.write_bytes(content)
        link.unlink(missing_ok=True)
        link.symlink_to(os.path.relpath(blob, link.parent))
        return link

    def other(self) -> bytes:
        """Other weights, in as many bytes."""
        changed = bytearray(self.content)
        changed[-1] ^= 1
        return bytes(changed)

    def test_when_files_changed(self) -> None:
        """Of files, and of links on the way to them, the latest change counts."""
        plain = self.model / "model.safetensors"
        os.utime(plain, (1, 1))
        self.assertAlmostEqual(plain.stat().st_ctime, identify_weights([plain]).changed_s, 3)
        alias = self.folder / "alias"
        time.sleep(0.02)
        alias.symlink_to(self.model)
        changed_s = identify_weights([alias / plain.name]).changed_s
        self.assertAlmostEqual(alias.lstat().st_ctime, changed_s, 3)

    def test_what_changed_since(self) -> None:
        """A file changed after a time counts, unless it is a blob that holds what its name says."""
        plain = self.model / "model.safetensors"
        fetched, replaced = self.hub("a", self.content), self.hub("b", self.other())
        for file, expected in ((plain, True), (replaced, True), (fetched, False)):
            with self.subTest(file):
                weights = identify_weights([file])
                self.assertEqual(expected, weights.changed_since(weights.changed_s - 1))
                self.assertFalse(weights.changed_since(weights.changed_s))
        both = identify_weights([fetched]).joined(identify_weights([replaced]))
        self.assertTrue(both.changed_since(0.0))


class TestIdentification(unittest.TestCase):
    """The search on a thread of its own."""

    @unittest.skipUnless(find_spec("psutil"), "psutil is not installed")
    def test_when_a_process_began(self) -> None:
        """It is in the past, by less than this test run took."""
        import psutil

        self.assertAlmostEqual(psutil.Process().create_time(), process_began_s(), delta=2)


if __name__ == "__main__":
    unittest.main()
