"""The bounded heap, in a process of its own: its settings cannot be taken back."""

import ctypes
import platform
import subprocess
import sys
from pathlib import Path

import pytest

from tandem.core.heap import MAX_ARENAS, bound_heap, trim_heap

_STORY = """
import ctypes, sys, threading
from contextlib import nullcontext
from tandem.core.heap import bound_heap, large_buffers_given_back

if sys.argv[1] == "bounded":
    assert bound_heap()
library = ctypes.CDLL(None)
library.malloc.restype = ctypes.c_void_p
library.malloc.argtypes = library.free.argtypes = (ctypes.c_size_t,)
library.fopen.restype = ctypes.c_void_p
everybody = threading.Barrier(16)

def use():
    library.malloc(1000)
    everybody.wait()

threads = [threading.Thread(target=use) for _ in range(16)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
library.free(library.malloc(8 << 20))
large = []
with large_buffers_given_back() if sys.argv[1] == "for a while" else nullcontext():
    for _ in range(100):
        large.append(library.malloc(1 << 20))
        library.malloc(4096)
for address in large:
    library.free(address)
file = ctypes.c_void_p(library.fopen(sys.argv[2].encode(), b"w"))
library.malloc_info(0, file)
library.fclose(file)
"""

_SMALL_STORY = """
import ctypes, sys
from tandem.core.heap import trim_heap

library = ctypes.CDLL(None)
library.malloc.restype = ctypes.c_void_p
library.free.argtypes = (ctypes.c_void_p,)
small = [library.malloc(100) for _ in range(500_000)]
for address in small[:-1]:
    library.free(address)

def resident():
    return int(open("/proc/self/statm").read().split()[1]) * 4096

before = resident()
assert trim_heap()
print(before - resident())
"""

of_glibc = pytest.mark.skipif(
    platform.libc_ver()[0] != "glibc", reason="it tests settings of glibc, and this system has another C library"
)


@of_glibc
@pytest.mark.parametrize("mode", ["bounded", "for a while", "default"])
def test_few_arenas_and_large_buffers_go_back_though_small_ones_between_them_stay(tmp_path: Path, mode: str) -> None:
    said = tmp_path / "heap.xml"
    subprocess.run([sys.executable, "-c", _STORY, mode, str(said)], check=True, timeout=60)
    info = said.read_text()
    num_arenas, held = info.count("<heap nr="), int(info.rpartition('<system type="current" size="')[2].split('"')[0])
    if mode == "bounded":
        assert num_arenas <= MAX_ARENAS
    else:
        assert num_arenas > MAX_ARENAS, "the default shows what is bounded"
    assert (held > 100e6) == (mode == "default")
    assert held > 100e6 or held < 20e6


def test_a_library_without_the_settings_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ctypes, "CDLL", lambda _: object())
    assert not bound_heap()
    assert not trim_heap()


@of_glibc
def test_what_many_small_buffers_took_goes_back_when_the_heap_is_trimmed() -> None:
    """Regression: a chat of 800,000 tokens left some 200 MB in a gateway's heap for as long as it ran."""
    told = subprocess.run([sys.executable, "-c", _SMALL_STORY], check=True, timeout=60, capture_output=True, text=True)
    assert int(told.stdout) > 40e6
