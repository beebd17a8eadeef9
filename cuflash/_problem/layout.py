"""How is an operand laid out? Byte strides in canonical order, and the widest copy of its rows."""

from __future__ import annotations

from typing import NamedTuple

from cuflash._problem.operand import Operand


class Layout(NamedTuple):
    """Byte strides of one operand in canonical order."""

    itemsize: int
    batch: tuple[int, ...]
    row: int = 0
    column: int = 0
    sequence: int = 0  # from one packed sequence to the next
    page: int = 0  # from one page of rows to the next

    @classmethod
    def of(cls, operand: Operand) -> Layout:
        """Layout of an operand with two core axes, or none."""
        ndim = len(operand.summed)
        found = cls(operand.dtype.itemsize, operand.strides[:ndim], *operand.strides[ndim:])
        return found._replace(page=operand.page)

    def copy_bytes(self, columns: int, address_bits: int) -> int:
        """Bytes of the widest copy of columns that is aligned in every row and divides a row."""
        if self.column != self.itemsize:
            return self.itemsize
        bits = columns * self.itemsize | address_bits
        for stride in (*self.batch, self.row, self.page):
            bits |= abs(stride)
        return min(16, bits & -bits or 16)
