// What differs around the tensors: settings, environment, and how much was compared.

import { copyButton, el, sentence } from "./dom.js";
import { count, percent, setting } from "./format.js";

const NAMED = {
  unmatched_layers: "Layers without a partner",
  unmatched_containers: "Containers without a partner (another nesting)",
  parts_of_layers: "Compared as parts of another layer",
  unrecorded_parameters: "Parameters that train and have no record",
  unmatched_parameters: "Parameters without a partner",
  unmatched_sites: "Recorded on one side only",
  unmatched_steps: "Steps of one run only",
};
const LISTED = {
  left_out: "Not recorded",
  uncalled: "Never called",
  ambiguous: "Close choices of a partner",
  assumed: "Assumed, since neither names nor shapes tell",
  views: "Compared in the reference’s layout",
  cut_elsewhere: "Layers that end at another place, compared inside only",
  unmeasured: "Kept as sketches that do not show parts of a tensor",
  zeros: "Gradients that are rounding noise around zero",
};

export function around(head) {
  return [settings(head), environment(head), coverage(head)].filter(Boolean);
}

function settings(head) {
  const some = head.settings_differ ?? [];
  if (!some.length) return el("section", { class: "card" }, el("h2", {}, "Settings"), el("p", { class: "prose" }, "Both runs declare the same."));
  return el(
    "section",
    { class: "card wide" },
    el("h2", {}, "Settings that differ"),
    el(
      "table",
      { class: "settings" },
      el("thead", {}, el("tr", {}, ["", head.reference ?? "reference", head.candidate ?? "candidate", "where", "fix"].map((text, k) => el("th", {}, k && k < 3 ? el("b", {}, text) : text)))),
      el(
        "tbody",
        {},
        some.map((one) =>
          el(
            "tr",
            { class: one.changes ? "changes" : "" },
            el("td", {}, el("code", {}, one.name), one.changes ? null : el("small", {}, "changes no result")),
            el("td", {}, el("code", {}, setting(one.reference))),
            el("td", {}, el("code", {}, setting(one.candidate))),
            el("td", {}, one.about || one.stage, one.note ? el("small", {}, sentence(one.note)) : null),
            el("td", {}, one.fix ? el("span", { class: "mend" }, el("code", {}, one.fix), copyButton(one.fix)) : "–"),
          ),
        ),
      ),
    ),
  );
}

function environment(head) {
  const some = head.environment ?? [];
  return el(
    "section",
    { class: "card" },
    el("h2", {}, "Environment"),
    some.length ? el("ul", { class: "plain" }, some.map((one) => el("li", {}, one))) : el("p", { class: "prose" }, "Nothing that is known to matter differs."),
    head.tolerance ? el("p", { class: "prose" }, `Judged by: ${head.tolerance}.`) : null,
  );
}

function coverage(head) {
  const known = head.coverage;
  if (!known || typeof known !== "object") return null;
  const lists = [];
  // A log folder has the coverage of one step.
  const of = head.step === undefined ? "" : ` in step ${head.step}`;
  for (const [key, title] of Object.entries(NAMED)) {
    const sides = known[key];
    if (!sides) continue;
    const names = ["reference", "candidate"].flatMap((side) => sides[side].map((name) => [side, name]));
    if (names.length) lists.push(folded(title, names.map(([side, name]) => el("li", {}, el("code", {}, String(name)), el("small", {}, side)))));
  }
  for (const [key, title] of Object.entries(LISTED)) {
    if (known[key]?.length) lists.push(folded(title, known[key].map((name) => el("li", {}, el("code", {}, name)))));
  }
  return el(
    "section",
    { class: "card" },
    el("h2", {}, "Coverage"),
    el("p", { class: "coverage" }, el("b", {}, percent(known.share)), " ", `of what was recorded${of} was compared: ${count(known.compared, "pair")}.`),
    known.ranks ? el("p", { class: "prose" }, known.ranks) : null,
    known.sketched ? el("p", { class: "prose" }, `${count(known.sketched, "pair")} judged from sketches.`) : null,
    lists.length ? lists : el("p", { class: "prose" }, "Nothing was left out."),
  );
}

function folded(title, items) {
  return el("details", {}, el("summary", {}, title, el("span", { class: "number" }, items.length.toLocaleString("en"))), el("ul", { class: "plain" }, items.slice(0, 500), items.length > 500 ? el("li", {}, `and ${items.length - 500} more`) : null));
}
