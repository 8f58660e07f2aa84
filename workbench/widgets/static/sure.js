// Checked access to a list or a column: types cannot express that a position is within it.

/**
 * `value`, which must exist: a position beyond the end is an error here, not NaN in a picture.
 * @template T
 * @param {T | undefined} value
 * @returns {T}
 */
export function sure(value) {
  if (value === undefined) throw new RangeError("index out of range");
  return value;
}
