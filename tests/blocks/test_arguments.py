"""Numbers that a caller gives: what is refused, and with which words."""

import pytest

from hf_paged_cache.blocks.arguments import (
    file_mode,
    file_mode_of_text,
    int_of_at_least,
    num_bytes_of,
)
from hf_paged_cache.errors import CacheArgumentError


@pytest.mark.parametrize("value", [0, True, 2.0, "2", None])
def test_what_is_no_int_or_too_small_is_refused(value: object) -> None:
    with pytest.raises(CacheArgumentError) as refused:
        int_of_at_least("num_blocks", value, 1, "blocks")
    assert str(refused.value) == f"num_blocks is {value!r}; it must be an int, 1 or more (blocks)"


def test_an_int_of_the_least_is_given_back() -> None:
    assert int_of_at_least("num_blocks", 1, 1, "blocks") == 1


@pytest.mark.parametrize(
    ("size", "num_bytes"),
    [
        (4_000_000_000, 4 * 10**9),
        ("4000000000", 4 * 10**9),
        ("4_000_000_000", 4 * 10**9),
        ("4GB", 4 * 10**9),
        ("512MB", 512 * 10**6),
        ("4GiB", 4 * 2**30),
        ("1.5 GB", 15 * 10**8),
        (" 1.5gib ", 3 * 2**29),
        ("3 kB", 3000),
        ("3KiB", 3072),
        ("2TB", 2 * 10**12),
        ("0.1TiB", 2**40 // 10),
        ("7 B", 7),
    ],
)
def test_a_size_is_a_number_of_bytes_or_has_a_unit(size: int | str, num_bytes: int) -> None:
    assert num_bytes_of("max_bytes", size, 1) == num_bytes


@pytest.mark.parametrize("size", ["4G", "4 gigs", "GB", "", "-4GB", "4,5GB", "1e9", "4GB 2MB", "half", "٤GB"])
def test_a_text_that_is_no_size_is_refused_with_those_that_are(size: str) -> None:
    with pytest.raises(CacheArgumentError) as refused:
        num_bytes_of("max_bytes", size, 1)
    assert str(refused.value).startswith(f"max_bytes is {size!r}; give a number of bytes, or one with a unit: ")
    assert all(each in str(refused.value) for each in ("'512MB'", "'4GB'", "'4GiB'"))


@pytest.mark.parametrize("size", [0, -1, 1e9, True, None, "0GB", "0.1B"])
def test_a_size_that_is_too_small_or_of_another_type_is_refused(size: object) -> None:
    with pytest.raises(CacheArgumentError, match=r"^disk_bytes is .*; it must be "):
        num_bytes_of("disk_bytes", size, 1)


@pytest.mark.parametrize("size", ["8", "999", "1.5"])
def test_a_text_of_so_few_bytes_lacks_its_unit(size: str) -> None:
    with pytest.raises(CacheArgumentError, match=f"max_bytes is {size} without a unit; for gigabytes give {size}GB"):
        num_bytes_of("max_bytes", size, 1)
    assert num_bytes_of("host_bytes", "0", 0) == 0


@pytest.mark.parametrize("mode", [0o600, 0o640, 0o660, 0o664, 0o666])
def test_permissions_are_those_of_files(mode: int) -> None:
    assert file_mode("mode", mode) == mode
    assert file_mode("mode", None) == 0o600
    assert file_mode_of_text("--mode", f"{mode:o}") == file_mode_of_text("--mode", f"0{mode:o}") == mode
    assert file_mode_of_text("--mode", None) is None


@pytest.mark.parametrize("mode", [600, 640, 644, 660, 664, 666, 0o700, 0o440, 0, -1, True, "660", 0o2660])
def test_permissions_that_are_none_or_were_written_as_a_decimal_are_refused(mode: object) -> None:
    with pytest.raises(CacheArgumentError) as refused:
        file_mode("mode", mode)
    assert str(refused.value).startswith(
        f"mode is {mode!r}; give permissions of files that their owner reads and writes"
    )


@pytest.mark.parametrize("text", ["rw-rw----", "0770", "440", "66", "6600", "", "-660", "0x1b0"])
def test_a_text_that_is_no_permissions_of_files_is_refused_as_it_was_given(text: str) -> None:
    with pytest.raises(CacheArgumentError, match=rf"^--mode is {text!r}; give permissions of files"):
        file_mode_of_text("--mode", text)
