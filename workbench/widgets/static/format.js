// Numbers as the other views write them: see workbench/views/theme.py.

export function threeDigits(number) {
  const size = Math.abs(number);
  return number.toFixed(size < 9.995 ? 2 : size < 99.95 ? 1 : 0);
}

export function formatBytes(bytes) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let power = 0;
  while (bytes >= 1024 ** (power + 1) && power < units.length - 1) power += 1;
  return power ? `${threeDigits(bytes / 1024 ** power)} ${units[power]}` : `${bytes.toFixed(0)} B`;
}

export function timeUnit(us) {
  const size = Math.abs(us);
  return size >= 1e6 ? [1e6, "s"] : size >= 1e3 ? [1e3, "ms"] : [1, "\u00b5s"];
}

export function formatDuration(us) {
  const [divisor, unit] = timeUnit(us);
  return `${threeDigits(us / divisor)} ${unit}`;
}

/** The begin left out of what is longer than `width` letters: names differ at their end. */
export function shorten(text, width) {
  return text.length <= width ? text : `\u2026${text.slice(1 - width)}`;
}
