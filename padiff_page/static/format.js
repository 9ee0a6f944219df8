// Numbers as people read them.

/** A number of the JSON: NaN is null there, infinity a text. */
export function numberOf(value) {
  if (value === "inf") return Infinity;
  if (value === "-inf") return -Infinity;
  return typeof value === "number" ? value : NaN;
}

/** A figure with three digits. */
export function figure(value, digits = 3) {
  const x = numberOf(value);
  if (Number.isNaN(x)) return "–";
  if (!Number.isFinite(x)) return x > 0 ? "∞" : "−∞";
  if (x === 0) return "0";
  const size = Math.abs(x);
  const text = size >= 1e5 || size < 1e-4 ? x.toExponential(digits - 1) : String(Number(x.toPrecision(digits)));
  return text.replace("-", "−").replace("e+", "e").replace("e-", "e−");
}

/** A power of ten. */
export function tenTo(power) {
  const raised = [...String(power)].map((sign) => (sign === "-" ? "⁻" : "⁰¹²³⁴⁵⁶⁷⁸⁹"[sign])).join("");
  return `10${raised} ×`;
}

/** How many times the allowed a figure is. */
export function times(x) {
  if (Number.isNaN(x)) return "–";
  if (!Number.isFinite(x)) return "∞ ×";
  if (x >= 1e5) return `${figure(x, 2)} ×`;
  return `${figure(x)} ×`;
}

/** How a diff stands to the first one. */
export function standing(name) {
  return { first: "first difference", again: "again", new: "another fault" }[name] ?? name;
}

export function count(n, noun) {
  return `${n.toLocaleString("en")} ${noun}${n === 1 ? "" : "s"}`;
}

export function percent(share) {
  return typeof share === "number" ? `${(100 * share).toFixed(share < 1 && share > 0.995 ? 1 : 0)} %` : "–";
}

/** The value of a setting. */
export function setting(value) {
  if (value === null || value === undefined) return "not set";
  return typeof value === "string" ? value : JSON.stringify(value);
}
