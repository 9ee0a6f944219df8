// Whether the page is light or dark: as TensorBoard's switch says where the page is its tab, else as the browser says.

const browser = matchMedia("(prefers-color-scheme: dark)");

/** TensorBoard's body, which has the class `dark-mode` in the dark; null elsewhere. */
function host() {
  try {
    const { body } = parent.document;
    return parent !== window && parent.document.querySelector("tb-webapp") ? body : null;
  } catch {
    return null; // a page of another origin
  }
}

class Scheme extends EventTarget {
  constructor() {
    super();
    this.host = host();
    if (this.host) new MutationObserver(() => this.#look()).observe(this.host, { attributes: true, attributeFilter: ["class"] });
    else browser.addEventListener("change", () => this.#look());
    this.#look();
  }

  #look() {
    const matches = this.host ? this.host.classList.contains("dark-mode") : browser.matches;
    if (matches === this.matches) return;
    this.matches = matches;
    document.documentElement.dataset.scheme = matches ? "dark" : "light";
    this.dispatchEvent(new Event("change"));
  }
}

/** `matches` is true in the dark, and `change` is its event, as of the browser's own list. */
export const scheme = new Scheme();
