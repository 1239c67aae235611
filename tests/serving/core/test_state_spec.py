from __future__ import annotations

import pytest

from serving.core.errors import BundleError
from serving.core.state_spec import Role, StateSpec, StateTensor


def test_shapes_and_bytes_follow_the_axes() -> None:
    keys = StateTensor("keys", "float32", ("row", 4, "time", 8), Role.CACHE)
    memory = StateTensor("memory", "float16", ("row", "source", 6), Role.MEMORY)
    length = StateTensor("length", "int32", ("row",), Role.MEMORY)
    assert keys.shape(3, 50, 20) == (3, 4, 20, 8)
    assert memory.shape(3, 50, 20) == (3, 50, 6)
    assert length.shape(3, 50, 20) == (3,)
    assert (keys.axis("time"), keys.axis("source"), memory.axis("source")) == (2, None, 1)
    spec = StateSpec((keys, memory, length))
    assert spec.row_bytes(50, 20) == 4 * 20 * 8 * 4 + 50 * 6 * 2 + 4
    assert spec.of(Role.MEMORY) == (memory, length)
    assert list(spec) == [keys, memory, length]
    assert len(spec) == 3


@pytest.mark.parametrize(
    ("axes", "role"),
    [
        ((), Role.MEMORY),
        (("source", 4), Role.MEMORY),
        (("row", "target"), Role.MEMORY),
        (("row", "time"), Role.MEMORY),
        (("row", "time"), Role.RECURRENT),
        (("row", 4), Role.CACHE),
    ],
)
def test_axes_that_mean_nothing_are_refused(axes: tuple[str | int, ...], role: Role) -> None:
    with pytest.raises(BundleError, match="'x'"):
        StateTensor("x", "float32", axes, role)
