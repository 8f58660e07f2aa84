import struct

import numpy as np
from hypothesis import given

from tests.helpers.trace_strategies import any_packed_rows, rows_from
from workbench.events import Category
from workbench.trace.schema import ROW, ROW_DTYPE, Header, KeyFrame


def test_row_and_dtype_have_the_same_size_and_offsets():
    assert ROW.size == ROW_DTYPE.itemsize
    sizes = [struct.calcsize("<" + letter) for letter in ROW.format.strip("<")]
    assert [ROW_DTYPE.fields[name][1] for name in ROW_DTYPE.names] == list(np.cumsum([0, *sizes[:-1]]))


@given(any_packed_rows())
def test_a_packed_row_reads_back_column_by_column(packed):
    for row, data in zip(rows_from(packed), packed, strict=True):
        assert ROW.pack(*row.tolist()) == data


def test_the_empty_header_and_key_frame_are_empty():
    assert Header().units == ()
    assert KeyFrame().bytes_by_category == (0,) * len(Category)
