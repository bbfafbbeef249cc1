import platform

from obbo_lightning.training.allocator import keep_freed_memory


def test_glibc_takes_the_settings():
    assert keep_freed_memory() == (platform.libc_ver()[0] == "glibc")
