// The page as one file: the report lies in it, compressed, as lines of JSON.

import { Page } from "./app.js";
import { el } from "./dom.js";
import { Store } from "./store.js";
import { takeWords } from "./words.js";

async function lines() {
  const text = document.getElementById("report").textContent.trim();
  const bytes = Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip")).pipeThrough(new TextDecoderStream());
  // Part by part: all of a long report would be too much for one string.
  const found = [];
  const reader = stream.getReader();
  let rest = [];
  for (;;) {
    const { done, value } = await reader.read();
    if (done) break;
    const [first, ...more] = value.split("\n");
    rest.push(first);
    for (const part of more) {
      found.push(rest.join(""));
      rest = [part];
    }
  }
  return [...found, rest.join("")].filter(Boolean);
}

export async function open(root) {
  let found;
  try {
    found = await lines();
  } catch (error) {
    root.append(el("p", { class: "trouble" }, `This browser can’t read the report (${error.message}). Chromium 80, Firefox 113 and Safari 16.4 and later can.`));
    return null;
  }
  const store = new Store((place) => JSON.parse(found[place]));
  const head = JSON.parse(found[0]);
  takeWords(head.words);
  const page = new Page(root, store);
  store.setHead(head);
  for (let k = 1; k < found.length; k++) store.addLine(JSON.parse(found[k]), k);
  page.showHead();
  page.showSteps();
  // For those who look at the page from outside: tests, and people with a console.
  window.padiff = page;
  return page;
}
