// Elements, made from data that nobody vouches for: text only ever becomes a text node, never markup.

import { said, say } from "./words.js";

const SVG = "http://www.w3.org/2000/svg";

// Attributes that are read to people.
const SPOKEN = new Set(["title", "aria-label", "placeholder"]);

/** An element. `attributes` are set as they are; those that are functions listen to the event of their name. */
export function el(tag, attributes = {}, ...children) {
  return filled(document.createElement(tag), attributes, children);
}

/** Likewise for drawings. */
export function svg(tag, attributes = {}, ...children) {
  return filled(document.createElementNS(SVG, tag), attributes, children);
}

function filled(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (typeof value === "function") node.addEventListener(name, value);
    else if (value === true) node.setAttribute(name, "");
    else if (value !== false && value !== null && value !== undefined) node.setAttribute(name, SPOKEN.has(name) ? say(String(value)) : String(value));
  }
  for (const child of children.flat(Infinity)) {
    if (child === null || child === undefined || child === false) continue;
    node.append(child instanceof Node ? child : document.createTextNode(said(node.localName, attributes, String(child))));
  }
  return node;
}

/** Put other children into a node. */
export function refill(node, ...children) {
  node.replaceChildren(...children.flat(Infinity).filter((child) => child !== null && child !== undefined && child !== false));
}

/** A layer's name: its path, with the type beside it where that is known. */
export function layerName(path, type) {
  if (!path) return el("span", { class: "nothing" }, "no such layer");
  return el("span", { class: "layer" }, el("code", {}, path), type ? el("span", { class: "type" }, type) : null);
}

/** A sentence in which names stand between backquotes. */
export function sentence(text) {
  const local = say(text);
  const whole = local ? local[0].toUpperCase() + local.slice(1) : "";
  const parts = (/[.!?)。）]$/.test(whole) || !whole ? whole : `${whole}.`).split("`");
  // An odd one has no partner: then none is taken for a mark.
  return parts.length % 2 ? parts.map((part, k) => (k % 2 ? el("code", {}, part) : part)) : parts.join("`");
}

/** A button that copies a text, and says that it did. */
export function copyButton(text, label = "Copy") {
  const button = el("button", { class: "quiet copy", type: "button" }, label);
  button.addEventListener("click", async () => {
    try {
      await navigator.clipboard.writeText(typeof text === "function" ? text() : text);
      button.textContent = say("Copied");
    } catch {
      button.textContent = say("Not allowed here");
    }
    setTimeout(() => (button.textContent = say(label)), 1500);
  });
  return button;
}
