// Layers as a tree: nested by their dotted paths, folding.

export const ROOT = "(root)";
export const LOOP = "(loop)";

export class Node {
  constructor(path, name, parent) {
    this.path = path;
    this.name = name;
    this.parent = parent;
    this.depth = parent ? parent.depth + 1 : -1;
    this.children = [];
    this.type = "";
    this.open = false;
    this.order = Infinity;
    this.own = []; // cells by stage, of the layer's own tensors
    this.folded = []; // likewise, with all that is inside of it
  }

  /** Open all layers that this one is inside of. */
  reveal() {
    for (let node = this.parent; node; node = node.parent) node.open = true;
  }
}

export class Tree {
  constructor() {
    this.top = new Node("", "", null);
    this.top.open = true;
    this.byKey = new Map();
  }

  /** The node of a path; those that it is inside of are made as well.
   * `key` tells layers of the two models with one name apart. */
  node(path, key = path) {
    const known = this.byKey.get(key);
    if (known) return known;
    const prefix = key.slice(0, key.length - path.length);
    const dot = path === ROOT || path === LOOP ? -1 : path.lastIndexOf(".");
    const parent = dot > 0 ? this.node(path.slice(0, dot), prefix + path.slice(0, dot)) : this.top;
    const node = new Node(path, dot > 0 ? path.slice(dot + 1) : path, parent);
    node.key = key;
    parent.children.push(node);
    this.byKey.set(key, node);
    return node;
  }

  /** Order siblings by what came first of them or inside of them. */
  sort() {
    const first = (node) => Math.min(node.order, ...node.children.map(first));
    const visit = (node) => {
      const firsts = new Map(node.children.map((child) => [child, first(child)]));
      node.children.sort((a, b) => firsts.get(a) - firsts.get(b));
      node.children.forEach(visit);
    };
    visit(this.top);
  }

  /** The nodes that are seen, from top to bottom. */
  visible() {
    const found = [];
    const visit = (node) => {
      for (const child of node.children) {
        found.push(child);
        if (child.open && child.children.length) visit(child);
      }
    };
    visit(this.top);
    return found;
  }

  all() {
    return [...this.byKey.values()];
  }

  openAll(open) {
    for (const node of this.byKey.values()) node.open = open && node.children.length > 0;
  }

  /** Open as many levels as keep the rows at a readable number. */
  openTo(rows) {
    this.openAll(false);
    const single = () => this.visible().filter((node) => !node.open && node.children.length);
    for (let closed = single(); closed.length; closed = single()) {
      const more = closed.reduce((sum, node) => sum + node.children.length, 0);
      // A single layer around everything says nothing by itself.
      if (this.visible().length + more > rows && closed.length > 1) return;
      for (const node of closed) node.open = true;
    }
  }
}
