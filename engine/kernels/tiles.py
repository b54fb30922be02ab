"""Divides rows among the programs of a kernel; plain arithmetic, which memory predictions use without Triton."""

from __future__ import annotations

from dataclasses import dataclass

CELLS = 4096  # elements of a program's block
MAX_WIDTH = 8192  # columns that a program holds in registers; wider rows are processed in blocks of this many
REDUCTION_PROGRAMS = 1024  # of a sum over rows, at most


def power_of_two(number: int) -> int:
    """Return the smallest power of two that is at least `number`."""
    return 1 << max(0, number - 1).bit_length()


def block_width(columns: int) -> int:
    """Return the columns of a block: all, if they fit in registers."""
    return min(power_of_two(columns), MAX_WIDTH)


@dataclass(frozen=True)
class RowTiles:
    """[rows, columns] in blocks of `width` columns, of which each program takes those of `per_program` rows together.

    most_sums   programs of a sum over rows, at most; each leaves a row of partial sums
    """

    rows: int
    columns: int
    most_sums: int = REDUCTION_PROGRAMS

    @property
    def width(self) -> int:
        """Columns of a block, a power of two."""
        return block_width(self.columns)

    @property
    def blocks(self) -> int:
        """Blocks per row."""
        return -(-self.columns // self.width)

    @property
    def per_program(self) -> int:
        """Rows of a program: many narrow ones, one wide one."""
        return max(1, CELLS // self.width)

    @property
    def programs(self) -> int:
        """Programs over all rows."""
        return -(-self.rows // self.per_program)

    @property
    def steps(self) -> int:
        """How often a program of a sum over rows takes `per_program` rows: a power of two, so that few kernels differ.

        It follows from the number of rows alone: the order of the sum is that of every run, on every GPU.
        """
        return power_of_two(-(-self.programs // self.most_sums))

    @property
    def partial_sums(self) -> int:
        """Programs of a sum over rows, each of which writes a partial sum."""
        return -(-self.programs // self.steps)

    @property
    def cells(self) -> int:
        """Elements of a program's block."""
        return self.per_program * self.width

    @property
    def constants(self) -> dict[str, int]:
        """Compile-time constants of kernels over rows."""
        return {
            "columns": self.columns,
            "width": self.width,
            "blocks": self.blocks,
            "per_program": self.per_program,
        }
