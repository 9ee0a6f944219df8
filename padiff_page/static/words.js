// The page's texts in the reader's language, by the table that the report brings. Without one, texts stay English.

// Elements whose text is a name, a value or code of a run.
const NAMES = new Set(["code", "pre", "mark", "b", "option", "script", "style"]);
const VALUE = /\{\w+\}/;

let plain = new Map();
let patterns = [];
let known = new Map();

/** Take the words of a report: a translation for each text. A text with values has them in braces. */
export function takeWords(words) {
  const entries = Object.entries(words ?? {}).filter((entry) => typeof entry[1] === "string");
  plain = new Map(entries.filter(([text]) => !VALUE.test(text)));
  patterns = entries
    .filter(([text]) => VALUE.test(text))
    .map(([text, translation]) => {
      const names = [...text.matchAll(/\{(\w+)\}/g)].map((found) => found[1]);
      const parts = text.split(/\{\w+\}/).map((part) => part.replace(/[.*+?^${}()|[\]\\]/g, "\\$&"));
      return { expression: new RegExp(`^${parts.join("(.+?)")}$`, "s"), names, translation };
    });
  known = new Map();
}

/** A text in the reader's language. */
export function say(text) {
  if (!plain.size || typeof text !== "string") return text;
  if (!known.has(text)) {
    if (known.size > 5000) known.clear();
    known.set(text, plain.get(text) ?? filled(text) ?? text);
  }
  return known.get(text);
}

/** A text of an element: said, unless the element shows names. */
export function said(tag, attributes, text) {
  return NAMES.has(tag) || attributes.class === "run" ? text : say(text);
}

function filled(text) {
  for (const { expression, names, translation } of patterns) {
    const found = expression.exec(text);
    if (found) return translation.replace(/\{(\w+)\}/g, (whole, name) => say(found[names.indexOf(name) + 1] ?? whole));
  }
  return undefined;
}
