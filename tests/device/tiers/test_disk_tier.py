"""The disk tier: bytes come back as they went, in order, past the page cache, and nothing is left behind."""

from __future__ import annotations

import ctypes
import errno
import gc
import mmap
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from stowage.stages.device.tiers import DiskTier
from stowage.stages.ir.errors import IllegalPlanError, StowageError
from tests.device.tiers.moving import PAGE, bits, placed, random_bytes
from tests.matrix import examples

CHUNK = 2 * PAGE
SIZES = (0, 1, 63, 511, 512, 4095, 4096, 4097, CHUNK - 1, CHUNK, CHUNK + 1, 5 * CHUNK, 5 * CHUNK + 4095)


@pytest.fixture(params=["direct", "cached", "in RAM"])
def tier(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[DiskTier]:
    """With small chunks, so that small tensors have many."""
    folder = tmp_path
    if request.param == "in RAM":
        if not os.access("/dev/shm", os.W_OK):
            pytest.skip("/dev/shm is not writable")
        folder = Path(tempfile.mkdtemp(dir="/dev/shm"))
    made = DiskTier(folder, chunk_bytes=CHUNK, direct=request.param != "cached")
    yield made
    made.close()
    assert list(folder.iterdir()) == []
    if folder != tmp_path:
        shutil.rmtree(folder)


def round_trip(tier: DiskTier, tensor: torch.Tensor, back: torch.Tensor) -> None:
    name = f"t{len(tier._place)}"
    tier.reserve({name: tensor.numel() * tensor.element_size()})
    assert not tier.written(name)
    before = bits(tensor)
    tier.offload(name, tensor).wait()
    assert tier.written(name)
    tier.reload(name, back).wait()
    assert bits(back) == before == bits(tensor)


@pytest.mark.parametrize("behind_page", [0, 64, 512])
def test_sizes_and_addresses(tier: DiskTier, behind_page: int) -> None:
    for size in SIZES:
        content = random_bytes(size, size, behind_page=behind_page)
        for other in (0, 64):
            back = placed(torch.zeros(size, dtype=torch.uint8), other)
            round_trip(tier, content, back)


@pytest.mark.parametrize(
    "dtype",
    [
        *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.complex64),
        *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8),
    ],
)
def test_dtypes(tier: DiskTier, dtype: torch.dtype) -> None:
    """Random bits: NaN with payloads, infinities and denormals among them."""
    tensor = random_bytes(16 * 357).view(dtype).view(3, 17, -1)
    round_trip(tier, tensor, torch.zeros_like(tensor))


def test_booleans_and_scalars(tier: DiskTier) -> None:
    round_trip(tier, torch.tensor([True, False, True]), torch.zeros(3, dtype=torch.bool))
    round_trip(tier, torch.tensor(3.5), torch.tensor(0.0))
    round_trip(tier, torch.nn.Parameter(torch.randn(5)), torch.nn.Parameter(torch.zeros(5)))


def views(base: torch.Tensor) -> dict[str, torch.Tensor]:
    """Of a tensor of 12 × 8 × 10 elements."""
    return {
        "transposed": base.transpose(0, 2),
        "permuted": base.permute(1, 2, 0),
        "slice of rows": base[3:7],
        "channels last": base[None].contiguous(memory_format=torch.channels_last),
        "with gaps": base[:, ::2],
        "narrow": base[:, 1:3, 4:9],
        "expanded": base[:, :1, :1].expand(12, 4, 5),
        "conjugated": torch.complex(base, base + 1).conj(),
        "one element of many": base[4:5, 2:3, 1:2],
    }


@pytest.mark.parametrize("view", views(torch.zeros(12, 8, 10)))
def test_strides(tier: DiskTier, view: str) -> None:
    """Into the same view of other memory; nothing beside the view is written."""
    base, other = torch.randn(12, 8, 10), torch.randn(12, 8, 10)
    tensor, back = views(base)[view], views(other)[view]
    if view == "expanded":
        back = torch.empty(back.shape)
    storage = torch.empty(0, dtype=back.dtype).set_(back.untyped_storage())
    before = storage.clone()
    round_trip(tier, tensor, back)
    back.resolve_conj()
    untouched = torch.ones_like(storage, dtype=torch.bool)
    untouched.as_strided(back.shape, back.stride(), back.storage_offset()).fill_(False)
    assert torch.equal(storage[untouched], before[untouched])


def test_other_strides_are_refused_and_bytes_are_bytes(tier: DiskTier) -> None:
    tier.reserve({"a": 96})
    tensor = torch.randn(4, 6)
    tier.offload("a", tensor.t()).wait()
    with pytest.raises(IllegalPlanError, match="strides"):
        tier.reload("a", torch.empty(6, 4))
    flat = torch.empty(96, dtype=torch.uint8)
    tier.reload("a", flat).wait()
    assert torch.equal(flat.view(torch.float32).view(4, 6), tensor)


def test_what_has_no_slot_or_does_not_fit(tier: DiskTier) -> None:
    tier.reserve({"a": 8})
    with pytest.raises(IllegalPlanError, match="'b' has no slot"):
        tier.offload("b", torch.zeros(1))
    with pytest.raises(IllegalPlanError, match="12 bytes do not fit its slot of 8"):
        tier.offload("a", torch.zeros(3))
    with pytest.raises(IllegalPlanError, match="never offloaded"):
        tier.reload("a", torch.zeros(2))
    tier.offload("a", torch.ones(2)).wait()
    with pytest.raises(IllegalPlanError, match="8 bytes were offloaded"):
        tier.reload("a", torch.zeros(1))
    with pytest.raises(StowageError, match="cannot grow"):
        tier.reserve({"a": 9})
    with pytest.raises(StowageError, match="meta"):
        tier.offload("a", torch.zeros(2, device="meta"))
    with pytest.raises(StowageError, match="sparse"):
        tier.offload("a", torch.zeros(2).to_sparse())
    tier.reserve({"a": 4, "c": 4})
    tier.reload("a", torch.zeros(2)).wait()


def test_many_transfers_without_waits_in_between(tier: DiskTier) -> None:
    tensors = [random_bytes(997 * index + 1, index) for index in range(40)]
    names = [f"n{index}" for index in range(40)]
    tier.reserve({name: tensor.numel() for name, tensor in zip(names, tensors)})
    for name, tensor in zip(names, tensors):
        tier.offload(name, tensor)
    backs = [torch.zeros_like(tensor) for tensor in tensors]
    for transfer in [tier.reload(name, back) for name, back in zip(names, backs)]:
        transfer.wait()
    assert all(torch.equal(tensor, back) for tensor, back in zip(tensors, backs))


steps = st.lists(st.tuples(st.booleans(), st.integers(0, 2), st.integers(0, 1000)), max_size=30)


@settings(max_examples=examples(60), deadline=None)
@given(steps)
def test_a_reload_sees_the_offload_before_it(program: list[tuple[bool, int, int]]) -> None:
    """Any sequence on three slots, nothing waited for before the end: each reload has the bytes of its turn."""
    sizes = {"0": 3 * CHUNK + 5, "1": 100, "2": CHUNK}
    with tempfile.TemporaryDirectory() as folder:
        tier = DiskTier(folder, chunk_bytes=CHUNK)
        tier.reserve(sizes)
        current: dict[str, int] = {}
        transfers, reloads = [], []
        for is_offload, slot, seed in program:
            name = str(slot)
            if is_offload:
                current[name] = seed
                transfers.append(tier.offload(name, random_bytes(sizes[name], seed)))
            elif name in current:
                back = torch.zeros(sizes[name], dtype=torch.uint8)
                reloads.append((back, current[name]))
                transfers.append(tier.reload(name, back))
        for transfer in transfers:
            transfer.wait()
        assert all(transfer.done() for transfer in transfers)
        for back, seed in reloads:
            assert torch.equal(back, random_bytes(back.numel(), seed))
        tier.close()


def test_spans_are_in_order_on_each_stream(tier: DiskTier) -> None:
    tier.record = True
    sizes = [CHUNK * (index % 4) + 1 for index in range(12)]
    tier.reserve({str(index): size for index, size in enumerate(sizes)})
    for stream in ("offload", "reload"):
        move = tier.offload if stream == "offload" else tier.reload
        transfers = [move(str(index), random_bytes(size, index)) for index, size in enumerate(sizes)]
        transfers[-1].wait()
        assert all(transfer.done() for transfer in transfers), "the last is complete, so all are"
        spans = [span for span in tier.spans if span.stream == stream]
        assert [span.name for span in spans] == [str(index) for index in range(12)]
        assert [span.nbytes for span in spans] == sizes
        assert sorted(span.start_s for span in spans) == [span.start_s for span in spans]
        assert sorted(span.end_s for span in spans) == [span.end_s for span in spans]
        assert all(span.start_s <= span.end_s for span in spans)


def test_both_directions_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A write does not return before a read that was asked for later has begun, and the caller goes on meanwhile."""
    tier = DiskTier(tmp_path)
    tier.reserve({"a": 4, "b": 4})
    tier.offload("a", torch.ones(1)).wait()
    reading, write, read = threading.Event(), os.pwritev, os.preadv

    def slow_write(*arguments: Any) -> int:
        assert reading.wait(20)
        return write(*arguments)

    def seen_read(*arguments: Any) -> int:
        reading.set()
        return read(*arguments)

    monkeypatch.setattr(os, "pwritev", slow_write)
    monkeypatch.setattr(os, "preadv", seen_read)
    writing = tier.offload("b", torch.ones(1))
    assert not writing.done()
    back = torch.zeros(1)
    tier.reload("a", back).wait()
    writing.wait()
    assert back == 1
    tier.close()


def test_nothing_is_held_after_the_wait(tier: DiskTier) -> None:
    tier.reserve({"a": 4 * PAGE})
    for move in (tier.offload, tier.reload):
        tensor = torch.zeros(PAGE)
        storage = weakref.ref(tensor.untyped_storage())
        transfer = move("a", tensor)
        del tensor
        transfer.wait()
        gc.collect()
        assert storage() is None or storage().data_ptr() == 0  # type: ignore[union-attr]


def test_a_forgotten_tier_ends_its_threads(tmp_path: Path) -> None:
    before = threading.active_count()
    tier = DiskTier(tmp_path)
    handle = tier._handle
    tier.reserve({"a": 4})
    tier.offload("a", torch.ones(1)).wait()
    assert threading.active_count() == before + 4
    del tier
    gc.collect()
    assert threading.active_count() == before
    with pytest.raises(OSError, match=os.strerror(errno.EBADF)):
        os.fstat(handle)


def test_a_closed_tier(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tier = DiskTier(tmp_path)
    tier.reserve({"a": 4, "b": 4})
    entered, release, write = threading.Event(), threading.Event(), os.pwritev

    def slow_write(*arguments: Any) -> int:
        entered.set()
        assert release.wait(20)
        return write(*arguments)

    monkeypatch.setattr(os, "pwritev", slow_write)
    under_way, queued = tier.offload("a", torch.ones(1)), tier.reload("a", torch.zeros(1))
    assert entered.wait(20)
    closing = threading.Thread(target=tier.close)
    closing.start()
    release.set()
    closing.join()
    under_way.wait()
    with pytest.raises(StowageError, match="closed"):
        queued.wait()
    with pytest.raises(StowageError, match="closed"):
        tier.offload("b", torch.ones(1))
    tier.close()


def test_short_transfers_are_continued(tier: DiskTier, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each call does less than asked for, and not a whole number of blocks."""

    def short(call: Callable[..., int]) -> Callable[..., int]:
        def some(handle: int, buffers: list[memoryview], position: int) -> int:
            whole = len(buffers[0])
            if whole <= PAGE:
                return call(handle, buffers, position)
            return call(handle, [buffers[0][: whole // PAGE * PAGE]], position) - 100

        return some

    monkeypatch.setattr(os, "pwritev", short(os.pwritev))
    monkeypatch.setattr(os, "preadv", short(os.preadv))
    for size in SIZES:
        round_trip(tier, random_bytes(size, size), torch.zeros(size, dtype=torch.uint8))


@pytest.mark.parametrize("fails", ["no space", "stuck"])
def test_a_failed_write_names_tensor_and_folder(tier: DiskTier, monkeypatch: pytest.MonkeyPatch, fails: str) -> None:
    write, count = os.pwritev, [0]

    def failing(*arguments: Any) -> int:
        count[0] += 1
        if count[0] <= 2:
            return write(*arguments)
        if fails == "stuck":
            return 0
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    size = 6 * CHUNK
    tier.reserve({"layer.weight": size, "other": 4})
    monkeypatch.setattr(os, "pwritev", failing)
    content = random_bytes(size)
    transfer = tier.offload("layer.weight", content)
    behind = tier.reload("layer.weight", torch.zeros_like(content))
    why = "No space" if fails == "no space" else "nothing more was written"
    for broken in (transfer, transfer, behind):
        with pytest.raises(StowageError, match=rf"'layer.weight' .* written to .*{tier.folder}.*{why}"):
            broken.wait()
    assert not tier.written("layer.weight")
    with pytest.raises(StowageError, match=why):
        tier.reload("layer.weight", torch.zeros_like(content)).wait()
    monkeypatch.undo()
    tier.offload("other", torch.ones(1)).wait()
    tier.offload("layer.weight", content).wait()
    back = torch.zeros_like(content)
    tier.reload("layer.weight", back).wait()
    assert torch.equal(back, content)


def test_a_file_that_shrank(tier: DiskTier) -> None:
    tier.reserve({"a": 3 * CHUNK})
    tier.offload("a", random_bytes(3 * CHUNK)).wait()
    os.ftruncate(tier._handle, PAGE)
    with pytest.raises(StowageError, match=r"'a' .* read from .* the file ended early"):
        tier.reload("a", random_bytes(3 * CHUNK)).wait()


def test_a_full_disk_is_said_before_the_first_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tier = DiskTier(tmp_path)
    tier.reserve({"a": 10})

    def full(handle: int, position: int, nbytes: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patched:
        patched.setattr(os, "posix_fallocate", full)
        status = list(os.fstatvfs(tier._handle))
        status[3] = status[4] = 10_000_000 // status[1]
        patched.setattr(os, "fstatvfs", lambda handle: os.statvfs_result(status))
        with pytest.raises(StowageError, match=rf"'{tmp_path}' has no room .*20480000 bytes.* 104\d{{5}} bytes are"):
            tier.reserve({"b": 20_480_000})
    assert tier.file_bytes == PAGE
    tier.reserve({"b": PAGE})
    tier.offload("b", torch.ones(1024)).wait()
    tier.close()


FULL = """
import sys
from stowage.stages.device.tiers import DiskTier
from stowage.stages.ir.errors import StowageError
tier = DiskTier(sys.argv[1])
tier.reserve({"a": 1 << 19})
try:
    tier.reserve({"b": 1 << 20})
except StowageError as error:
    print(error)
tier.reserve({"c": 1 << 18})
print(tier.file_bytes)
"""


def test_a_file_system_that_is_really_full(tmp_path: Path) -> None:
    """A file system of 1 MiB that only this command sees."""
    mount = f"mount -t tmpfs -o size=1m none {tmp_path} && exec {sys.executable} -c '{FULL}' {tmp_path}"
    try:
        ended = subprocess.run(["unshare", "--mount", "sh", "-c", mount], capture_output=True, text=True, check=False)
    except OSError:
        pytest.skip("there is no unshare")
    if "permitted" in ended.stderr or "denied" in ended.stderr:
        pytest.skip(f"no file system may be mounted: {ended.stderr.strip()}")
    sentence, size = ended.stdout.strip().splitlines()
    assert "only 512.0 KiB are free, so at least 524288 bytes are missing" in sentence, ended.stderr
    assert int(size) == (1 << 19) + (1 << 18)


def test_a_folder_that_cannot_be_used(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StowageError, match=r"offload folder '.*file'"):
        DiskTier(tmp_path / "file")
    with pytest.raises(StowageError, match="multiple of 4096"):
        DiskTier(tmp_path, chunk_bytes=5000)


def test_a_file_that_is_kept(tmp_path: Path) -> None:
    tier = DiskTier(tmp_path, keep=True)
    tier.reserve({"a": 8})
    tier.offload("a", torch.arange(2, dtype=torch.int32)).wait()
    tier.close()
    assert [tier.path] == list(tmp_path.iterdir())
    assert tier.path is not None
    assert tier.path.read_bytes()[:8] == bytes([0, 0, 0, 0, 1, 0, 0, 0])


KILLED = """
import os, signal, sys, torch
from stowage.stages.device.tiers import DiskTier
tier = DiskTier(sys.argv[1])
tier.reserve({"a": 64 << 20})
tier.offload("a", torch.zeros(16 << 20)).wait()
print(os.listdir(sys.argv[1]), flush=True)
tier.offload("a", torch.zeros(16 << 20))
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_killed_process_leaves_nothing(tmp_path: Path) -> None:
    ended = subprocess.run([sys.executable, "-c", KILLED, str(tmp_path)], capture_output=True, text=True, check=False)
    assert ended.returncode == -signal.SIGKILL, ended.stderr
    assert ended.stdout.strip() == "[]", "nothing to see while it runs either"
    assert list(tmp_path.iterdir()) == []


def cached_pages(handle: int, nbytes: int) -> int:
    """Pages of a file that are in the page cache."""
    with mmap.mmap(handle, nbytes) as mapped:
        pages = (ctypes.c_uint8 * (nbytes // PAGE))()
        start = ctypes.c_char.from_buffer(mapped)
        libc = ctypes.CDLL(None, use_errno=True)
        asked = libc.mincore(ctypes.c_void_p(ctypes.addressof(start)), ctypes.c_size_t(nbytes), pages)
        del start
        assert asked == 0, os.strerror(ctypes.get_errno())
        return sum(page & 1 for page in pages)


@pytest.mark.parametrize("direct", [True, False])
def test_the_page_cache_holds_nothing(tmp_path: Path, direct: bool) -> None:
    nbytes = 16 << 20
    tier = DiskTier(tmp_path, direct=direct)
    if direct and not tier.direct:
        pytest.skip(tier.note)
    assert bool(tier.note) is not direct
    tier.reserve({"a": nbytes})
    os.pwritev(tier._handle, [mmap.mmap(-1, PAGE)], 0)
    if not direct:
        assert cached_pages(tier._handle, nbytes) > 0, "or there is nothing to be seen"
    tier.offload("a", random_bytes(nbytes)).wait()
    assert cached_pages(tier._handle, nbytes) == 0
    tier.reload("a", random_bytes(nbytes)).wait()
    assert cached_pages(tier._handle, nbytes) == 0
    assert tier.staging_bytes == 16 << 20
    tier.close()


def test_a_file_system_in_ram_is_said(tmp_path: Path) -> None:
    if not os.access("/dev/shm", os.W_OK):
        pytest.skip("/dev/shm is not writable")
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        tier = DiskTier(folder)
        assert not tier.direct
        assert folder in tier.note
        tier.close()
