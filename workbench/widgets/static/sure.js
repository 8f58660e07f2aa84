// What a list or a column holds at a place that is within it: no type can say that it is.

/**
 * `value`, which is there; a place beyond the end is an error here, not NaN in a picture.
 * @template T
 * @param {T | undefined} value
 * @returns {T}
 */
export function sure(value) {
  if (value === undefined) throw new RangeError("there is nothing at this place");
  return value;
}
