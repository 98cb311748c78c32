"""First fit, with neighbours joined again: where in the heap each allocation lies.

Every rank runs the same calls through its own allocator, so offsets agree without a word said.
"""

from bisect import bisect_left

from tutti.world.errors import UsageError


class Allocator:
    """Offsets in a block of `bytes`; every allocation begins at a multiple of `alignment`."""

    def __init__(self, bytes: int, alignment: int = 64) -> None:
        self.bytes = bytes
        self.alignment = alignment
        self.taken: dict[int, int] = {}  # offset → bytes
        self._gaps = [(0, bytes)] if bytes else []  # (offset, bytes), by offset, never adjacent

    def take(self, wanted: int) -> int:
        """The offset of `wanted` bytes; at least one unit of alignment, so that offsets differ."""
        rounded = max(1, -(-wanted // self.alignment)) * self.alignment
        for index, (offset, gap) in enumerate(self._gaps):
            if gap < rounded:
                continue
            if gap == rounded:
                del self._gaps[index]
            else:
                self._gaps[index] = (offset + rounded, gap - rounded)
            self.taken[offset] = rounded
            return offset
        raise UsageError(
            f"the heap has no room for {wanted} bytes: of its {self.bytes} bytes {self.free} are "
            f"free, {self.largest_gap} of them together: make the heap with bytes="
            f"{self.bytes + rounded} or more, or free tensors that are no longer needed"
        )

    def give(self, offset: int) -> None:
        """Return an allocation; it joins the gaps on both sides."""
        length = self.taken.pop(offset)
        index = bisect_left(self._gaps, (offset, 0))
        if index < len(self._gaps) and self._gaps[index][0] == offset + length:
            length += self._gaps.pop(index)[1]
        if index > 0 and sum(self._gaps[index - 1]) == offset:
            index -= 1
            offset, before = self._gaps.pop(index)
            length += before
        self._gaps.insert(index, (offset, length))

    @property
    def free(self) -> int:
        """Bytes that are not taken."""
        return sum(length for _, length in self._gaps)

    @property
    def largest_gap(self) -> int:
        """The largest allocation that would fit now."""
        return max((length for _, length in self._gaps), default=0)
