"""Copies to the device that do not wait for the work in flight there."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

ALIGN = 32
"""Elements to which every array of a packed copy is aligned: kernels are compiled anew for other alignments."""

LARGEST_PINNED = 16 << 20
SMALL_PINNED = 1 << 20
NUM_PINNED = 16
"""Blocks of each small size that are kept; of larger ones a quarter."""


def reserve_pinned() -> None:
    """Gives torch's cache of pinned memory blocks of every size (its sizes are powers of two).

    A block that is missing comes from the driver, which waits until the device has nothing left to do: the step that
    runs then is not followed by the next one in time.
    """
    blocks, size = [], 512
    while size <= LARGEST_PINNED:
        num_blocks = NUM_PINNED if size <= SMALL_PINNED else NUM_PINNED // 4
        blocks += [torch.empty(size, dtype=torch.uint8, pin_memory=True) for _ in range(num_blocks)]
        size *= 2


def to_device(values: Sequence[int] | Sequence[float] | npt.NDArray[np.generic], device: torch.device) -> torch.Tensor:
    """A tensor of the values; on a GPU through pinned memory, since a pageable copy waits for the stream."""
    tensor = torch.from_numpy(values) if isinstance(values, np.ndarray) else torch.tensor(values)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor


def upload(arrays: dict[str, npt.NDArray[np.int32]], device: torch.device) -> dict[str, torch.Tensor]:
    """Many int32 arrays in one copy."""
    starts, end = {}, 0
    for name, array in arrays.items():
        starts[name] = end
        end += -(-len(array) // ALIGN) * ALIGN
    packed = np.zeros(end, dtype=np.int32)
    for name, array in arrays.items():
        packed[starts[name] : starts[name] + len(array)] = array
    tensor = to_device(packed, device)
    return {name: tensor[start : start + len(arrays[name])] for name, start in starts.items()}
