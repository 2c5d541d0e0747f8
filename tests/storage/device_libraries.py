"""Stand-ins for the libraries of stores that move the memory of devices, with the signatures of the real ones."""

from __future__ import annotations

import ctypes
from typing import Any

import torch


class MooncakeDistributedStore:
    """Objects in this process. As over RDMA, only registered memory can be read and written."""

    def __init__(self) -> None:
        self.registered: dict[int, int] = {}
        self.objects: dict[str, bytes] = {}
        self.refuses = False
        self.registrations = 0

    def setup(
        self, local_hostname: str, metadata_server: str, global_segment_size: int, local_buffer_size: int,
        protocol: str, rdma_devices: str, master_server_addr: str,
    ) -> int:  # fmt: skip
        assert protocol == "rdma"
        return 0

    def register_buffer(self, buffer_ptr: int, size: int) -> int:
        if self.refuses:
            return -1
        self.registered[buffer_ptr] = size
        self.registrations += 1
        return 0

    def unregister_buffer(self, buffer_ptr: int) -> int:
        del self.registered[buffer_ptr]
        return 0

    def upsert_from(self, key: str, buffer_ptr: int, size: int, config: Any) -> int:
        self.check(buffer_ptr, size)
        self.objects[key] = ctypes.string_at(buffer_ptr, size)
        return 0

    def get_into_ranges(
        self, buffer_ptrs: list[int], all_keys: list[list[str]], all_dst_offsets: list[list[list[int]]],
        all_src_offsets: list[list[list[int]]], all_sizes: list[list[list[int]]],
    ) -> list[list[list[int]]]:  # fmt: skip
        found = []
        for key, places, starts, sizes in zip(
            all_keys[0], all_dst_offsets[0], all_src_offsets[0], all_sizes[0], strict=True
        ):
            content = self.objects.get(key)
            for place, start, size in zip(places, starts, sizes, strict=True):
                self.check(buffer_ptrs[0] + place, size)
                if content is not None:
                    ctypes.memmove(buffer_ptrs[0] + place, content[start : start + size], size)
            found.append([-704 if content is None else size for size in sizes])
        return [found]

    def check(self, pointer: int, size: int) -> None:
        assert any(start <= pointer and pointer + size <= start + length for start, length in self.registered.items())

    def close(self) -> int:
        return 0


class ReplicateConfig:
    with_hard_pin = False


class DsTensorClient:
    """One for each process with an NPU; `copies` has the copies of all of them, by process."""

    copies: dict[str, tuple[DsTensorClient, torch.Tensor]]
    failure: str = ""

    def __init__(
        self, host: str, port: int, device_id: int, connect_timeout_ms: int = 60000, client_public_key: str = "",
        client_private_key: str = "", server_public_key: str = "", req_timeout_ms: int = 0,
        enable_remote_h2d: bool = False,
    ) -> None:  # fmt: skip
        self.asked: list[list[str]] = []

    def init(self) -> None:
        pass

    def dev_mset(self, keys: list[str], tensors: list[torch.Tensor]) -> list[str]:
        self.check(keys)
        self.copies.update({key: (self, tensor) for key, tensor in zip(keys, tensors, strict=True)})
        return []

    def dev_mget_into_tensor(
        self, keys: list[str], tensor: torch.Tensor, copy_ranges: list[Any], sub_timeout_ms: int = 60000
    ) -> list[str]:
        self.check(keys)
        assert len(keys) == len(set(keys)) == len(copy_ranges)
        failed = [key for key in keys if key not in self.copies]
        if len(failed) == len(keys):
            raise RuntimeError("code: [Key not found], msg: [Key not found]")
        for key, wanted in zip(keys, copy_ranges, strict=True):
            if key not in failed:
                assert self.copies[key][0] is not self  # not from an NPU to itself
                source = self.copies[key][1][wanted.src_offset : wanted.src_offset + wanted.length]
                tensor[wanted.dst_offset : wanted.dst_offset + wanted.length] = source
        return failed

    def dev_local_delete(self, keys: list[str]) -> list[str]:
        for key in keys:
            assert self.copies.pop(key)[0] is self
        return []

    def check(self, keys: list[str]) -> None:
        self.asked.append(keys)
        if self.failure:
            raise RuntimeError(self.failure)
