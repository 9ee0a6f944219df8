// Where on the page one is, as the part of the address after `#`: a link to a cell, and the back button.

export function placeOf({ stage, site, column, node }, store) {
  const place = new URLSearchParams();
  if (stage) place.set("stage", stage);
  if (site) {
    place.set("at", site.stage);
    if (site.reference) place.set("reference", site.reference);
    if (site.candidate) place.set("candidate", site.candidate);
  } else if (node) place.set("layer", node.key);
  if (column !== null && column !== undefined) place.set("step", store.steps[column]);
  return place;
}

/** What an address means; what is not there (any more) is left out. */
export function readPlace(hash, store) {
  const place = new URLSearchParams(hash.replace(/^#/, ""));
  const found = { stage: place.get("stage"), site: null, column: null, node: null, pair: place.get("pair") };
  const step = place.get("step");
  if (step !== null && store.columns.has(Number(step))) found.column = store.columns.get(Number(step));
  const at = place.get("at");
  if (at) {
    found.site = store.bySite.get(`${at}\n${place.get("reference")}\n${place.get("candidate")}`) ?? null;
    found.node = found.site?.node ?? null;
  } else if (place.get("layer")) found.node = store.tree.byKey.get(place.get("layer")) ?? null;
  return found;
}
