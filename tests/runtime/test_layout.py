from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from odtpack_runtime.checkpoint.parameters import ALIGNMENT, Layout, address, allocate, view

shapes = st.lists(st.lists(st.integers(0, 9), max_size=3).map(tuple), max_size=12)
dtypes = st.sampled_from([np.float32, np.int64, np.uint8, np.bool_])


@given(shapes, st.data())
@settings(deadline=None)
def test_slots_are_aligned_disjoint_and_shared(shapes: list[tuple[int, ...]], data) -> None:
    tensors = [
        (f"t{index}", shape, np.dtype(data.draw(dtypes))) for index, shape in enumerate(shapes)
    ]
    layout = Layout.pack(tensors)
    memory = allocate(layout.nbytes)
    assert layout.nbytes == 0 or address(memory) % ALIGNMENT == 0
    assert memory.nbytes == layout.nbytes
    assert not memory.any()
    for index, slot in enumerate(layout.slots):
        array = view(memory, slot)
        assert (array.shape, array.dtype) == tensors[index][1:]
        assert slot.offset % ALIGNMENT == 0
        assert slot.nbytes == array.nbytes
        assert array.size == 0 or address(array) == address(memory) + slot.offset
        array.fill(1)
    # Every element was set once and nothing in between: the slots are disjoint.
    expected = sum(
        np.ones(slot.shape, slot.dtype).reshape(-1).view(np.uint8).astype(np.int64).sum()
        for slot in layout.slots
    )
    assert memory.astype(np.int64).sum() == expected
