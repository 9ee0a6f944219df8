// The verdict: where the runs differ first, by how much, why, and the fix.

import { copyButton, el, layerName, sentence } from "./dom.js";
import { count, figure, percent, times } from "./format.js";
import { isDeclared, timesAllowed } from "./store.js";
import { say } from "./words.js";

// Of further faults so many are described in full; the heat map marks the others.
const OTHERS = 5;

/** A figure with what it is called. */
export function stat(label, value, more = null) {
  return el("div", { class: "stat" }, el("dt", {}, label), el("dd", {}, value, more ? el("small", {}, more) : null));
}

/** The verdict card. `diff` is the first diff in full, where it is known; `open` is called to look at its tensor. */
export function verdictCard(store, diff, open) {
  const first = store.firstDiff;
  const head = store.head;
  const outcome = first ? "differ" : (head.outcome ?? "match");
  if (!first) return agreeing(store, outcome);
  const declared = isDeclared(first);
  // Reports of an older padiff have no diagnostic; that of another step is of no use.
  const brief = head.diagnostic?.step === first.step && head.diagnostic.stage === first.stage ? head.diagnostic : null;
  const excess = diff ? timesAllowed(diff) : NaN;
  const layers = el(
    "div",
    { class: "against" },
    side("reference", first.reference, store.typeOf("reference", first.reference), head.reference),
    el("div", { class: "versus", "aria-label": "against" }, "↔"),
    side("candidate", first.candidate, store.typeOf("candidate", first.candidate), head.candidate),
  );
  return el(
    "section",
    { class: "card verdict differ", id: "verdict" },
    el(
      "div",
      { class: "headline" },
      el("span", { class: "chip differ" }, declared ? "set differently" : "differ"),
      declared && !brief
        ? el("h1", {}, "The runs are ", el("strong", {}, "set differently"), ", though no tensor parts yet")
        : el("h1", {}, el("strong", {}, `Step ${first.step}, ${first.stage}`), brief?.where ? [": ", brief.where] : null),
    ),
    cause(first, brief),
    layers,
    el(
      "dl",
      { class: "stats" },
      first.slot ? stat(declared ? "setting" : "tensor", el("code", {}, first.slot), diff?.shape ? `${diff.shape.join(" × ") || "scalar"}` : null) : null,
      diff ? stat("times the allowed", el("b", { class: "loud" }, times(excess))) : null,
      diff?.judged ? stat(name(diff.judged.figure), figure(diff.judged.value), `allowed ${figure(diff.judged.limit)}`) : null,
      first.max_abs !== null && first.max_abs !== undefined ? stat("largest |difference|", figure(first.max_abs)) : null,
      diff?.worst ? stat("worst element", worst(diff.worst), diff.worst.index.length ? `at [${diff.worst.index.join(", ")}]` : null) : null,
    ),
    diff?.problem ? el("p", { class: "note" }, diff.problem) : null,
    declared ? el("p", { class: "prose" }, sentence(first.message)) : prose(first),
    others(store, brief),
    el(
      "div",
      { class: "actions" },
      diff ? el("button", { type: "button", class: "primary", click: open }, "Open this tensor") : null,
      copyButton(first.message, "Copy as text"),
    ),
  );
}

/** What the JSON calls a figure, as the page does. */
export function name(figureName) {
  return { rel_l2: "relative L2", max_abs: "largest |difference|", mean_abs: "mean |difference|", l2: "L2" }[figureName] ?? figureName;
}

function worst(element) {
  return el("span", { class: "pairvalue" }, figure(element.reference, 6), el("i", {}, "↔"), figure(element.candidate, 6));
}

function side(which, path, type, run) {
  return el(
    "div",
    { class: `side ${which}` },
    el("small", {}, which, run ? el("span", { class: "run" }, run) : null),
    layerName(path, type),
  );
}

function heading(outcome, steps) {
  if (outcome === "cannot tell") return "It is not known whether the runs match";
  return steps ? `The runs match in ${count(steps, "step")}` : "No step is compared yet";
}

/** What is known of how far it reaches and where in the code it is. */
function prose(first) {
  const sentences = [];
  if (first.inside === true) sentences.push("It is inside of this layer: its inputs agree.");
  if (first.last_agreeing && first.inside !== true) sentences.push(`The last layer that agrees is \`${first.last_agreeing}\`.`);
  if (first.call) sentences.push(`Call: ${first.call}.`);
  if (first.extent) sentences.push(first.extent);
  if (first.recomputed?.text) sentences.push(first.recomputed.text);
  return sentences.length ? el("p", { class: "prose" }, sentence(sentences.map(say).join(" "))) : null;
}

function cause(first, brief) {
  const why = first.why;
  const code = lines(brief?.places);
  if (!why) return code ? el("div", { class: "cause" }, code) : null;
  const unknown = why.kind === "unknown";
  const sure = unknown ? "Cause not found" : why.proven ? "Cause, proven" : "Likely cause";
  return el(
    "div",
    { class: `cause${why.proven ? " proven" : ""}` },
    el("h2", {}, sure),
    el("p", { class: "sentence" }, sentence(why.sentence)),
    fixLine(brief?.fix?.text ?? why.fix),
    code,
    why.evidence ? el("p", { class: "evidence" }, sentence(why.evidence)) : null,
    why.excluded?.length && !why.proven ? el("p", { class: "evidence" }, `Tried and excluded: ${why.excluded.join(", ")}.`) : null,
  );
}

/** The code that fixes a fault, to copy. */
function fixLine(fix) {
  return fix ? el("div", { class: "fix" }, el("span", {}, "Fix"), el("pre", {}, el("code", {}, fix)), copyButton(fix)) : null;
}

/** The lines of code of both sides, the candidate's first, with the part in question marked. */
function lines(places) {
  const known = ["candidate", "reference"].filter((side) => places?.[side]);
  if (!known.length) return null;
  return el(
    "div",
    { class: "lines" },
    known.map((side) => {
      const { file, line, code, span } = places[side];
      const marked = span ? [code.slice(0, span[0]), el("mark", {}, code.slice(...span)), code.slice(span[1])] : code;
      return el("div", { class: side }, el("small", {}, `${side} `, el("b", {}, `${file}:${line}`)), el("pre", {}, el("code", {}, marked)));
    }),
  );
}

/** Faults that do not follow from the first one, where the report names them. */
function others(store, brief) {
  const some = store.others.slice(0, OTHERS);
  return some.map((one, k) => {
    const fault = brief?.faults?.[k];
    const why = fault?.cause;
    const sure = !why || why.kind === "unknown" ? "cause not found" : why.proven ? "cause proven" : "likely cause";
    return el(
      "div",
      { class: `cause${why?.proven ? " proven" : ""}` },
      el("h2", {}, fault ? `Also, ${sure}` : "Also"),
      fault ? el("h3", {}, `Step ${fault.step}, ${fault.stage}`, ": ", fault.where) : null,
      el("p", { class: "sentence" }, sentence(why?.text ?? one.message)),
      fixLine(fault?.fix?.text),
      lines(fault?.places),
      fault?.size ? el("p", { class: "evidence" }, sentence(fault.size)) : null,
    );
  });
}

function agreeing(store, outcome) {
  const head = store.head;
  const counts = [...store.stages.values()].reduce((sum, one) => sum + one.compared, 0);
  const worstOf = [...store.stages.values()].reduce((most, one) => (one.worst > most.worst ? one : most), { worst: -1 });
  return el(
    "section",
    { class: `card verdict ${outcome === "match" ? "match" : "doubt"}`, id: "verdict" },
    el(
      "div",
      { class: "headline" },
      el("span", { class: `chip ${outcome === "match" ? "match" : "doubt"}` }, outcome),
      el("h1", {}, heading(outcome, store.steps.length)),
    ),
    el(
      "dl",
      { class: "stats" },
      stat("tensors compared", counts.toLocaleString("en")),
      head.coverage ? stat("of what was recorded", percent(head.coverage.share)) : null,
      worstOf.worst >= 0 ? stat("nearest to its limit", times(worstOf.worst), worstOf.worstAt ? worstOf.worstAt[0].layer : null) : null,
    ),
    head.diagnostic?.moved ? el("p", { class: "prose" }, "Moved: ", sentence(head.diagnostic.moved)) : null,
    head.verdict ? el("p", { class: "prose" }, sentence(head.verdict)) : null,
  );
}
